"""What two plans do differently."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.displayed import Displayed
from jaxmem.planner.tables import Rows, names_of, write_table
from jaxmem.policies import Policy
from jaxmem.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from jaxmem.planner.decisions import Decision
    from jaxmem.planner.plan import Plan


@dataclass(frozen=True)
class Change:
    """One figure or setting that differs, as people read it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Moved:
    """A group of values that is treated differently; ``None`` where a program does not have it."""

    before: Decision | None
    after: Decision | None

    @property
    def decision(self) -> Decision:
        """The group, as the later of the plans has it."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the group where it is larger."""
        return max(d.nbytes for d in (self.before, self.after) if d is not None)

    @property
    def kind(self) -> str:
        """What became of what, for instance ``"keep -> recompute"``; equal moves are one group."""
        if self.before is None or self.after is None:
            return "new" if self.before is None else "missing"
        if self.before.action == self.after.action:
            if self.before.recomputed == self.after.recomputed:
                others = self.before.again != self.after.again
                return f"{self.after.action} {'others' if others else 'other sizes'}"
            fewer = self.after.recomputed < self.before.recomputed
            return "recompute fewer" if fewer else "recompute more"
        return f"{self.before.action} -> {self.after.action}"


@dataclass(frozen=True)
class PlanDiff(Displayed):
    """What the second of two plans does differently; false where it does the same.

    Attributes:
        function: name of the function of the first plan, ``other_function`` of the second.
        same_program: whether both plans are for the same program and shapes.
        changes: figures and settings.
        moved: groups of values, by what became of what and then by bytes.
    """

    function: str
    other_function: str
    same_program: bool
    changes: tuple[Change, ...]
    moved: tuple[Moved, ...]

    def __bool__(self) -> bool:
        return not self.same_program or bool(self.changes or self.moved)

    def to_json(self) -> str:
        """The difference as JSON text: ``same``, and what differs."""
        moved = [{**asdict(m), "kind": m.kind} for m in self.moved]
        found = {**asdict(self), "moved": moved, "same": not self}
        return json.dumps(found, indent=1, sort_keys=True)

    def to_csv(self, path: str | Path, table: str = "changes") -> None:
        """Write ``"changes"``, the figures and settings, or ``"moved"``, the values, as CSV.

        Raises:
            ReportError: there is no table of that name.
        """
        actions = ["group", "kind", "nbytes", "before", "after"]
        tables: dict[str, tuple[list[str], Rows]] = {
            "changes": (names_of(Change), lambda: map(vars, self.changes)),
            "moved": (actions, lambda: map(_moved_row, self.moved)),
        }
        write_table(path, tables, table)


def _moved_row(moved: Moved) -> dict[str, Any]:
    def action(decision: Decision | None) -> str:
        return "" if decision is None else decision.action

    sides = {"before": action(moved.before), "after": action(moved.after)}
    return {"group": moved.decision.key, "kind": moved.kind, "nbytes": moved.nbytes, **sides}


def difference(plan: Plan, other: Plan) -> PlanDiff:
    """See :meth:`jaxmem.Plan.diff`."""
    same = plan.fingerprint == other.fingerprint
    moved = [m for m in _pairs(plan.decisions, other.decisions, same) if _differs(m)]
    largest: dict[str, int] = {}
    for m in moved:
        largest[m.kind] = largest.get(m.kind, 0) + m.nbytes
    moved.sort(key=lambda m: (-largest[m.kind], m.kind, -m.nbytes, m.decision.key))
    return PlanDiff(
        plan.function,
        other.function,
        same,
        tuple(_changes(plan, other, bool(moved))),
        tuple(moved),
    )


def _differs(moved: Moved) -> bool:
    a, b = moved.before, moved.after
    if a is None or b is None:
        return True
    return _decided(a) != _decided(b)


def _decided(decision: Decision) -> tuple:
    d = decision
    return d.action, d.recomputed, d.again, d.offloaded, d.nbytes


def _pairs(
    before: Sequence[Decision], after: Sequence[Decision], same_program: bool
) -> Iterator[Moved]:
    """Equal groups of both; in different programs those of the same line, module and operation."""
    groups: dict[tuple, tuple[list[Decision], list[Decision]]] = {}
    for side, decisions in enumerate((before, after)):
        for d in decisions:
            key = (d.source, d.module, d.checkpoint_name, d.primitive, d.dtype)
            groups.setdefault((d.key,) if same_program else key, ([], []))[side].append(d)
    for first, second in groups.values():
        for a, b in zip_longest(first, second):
            yield Moved(a, b)


def _changes(plan: Plan, other: Plan, moved: bool) -> Iterator[Change]:
    figures = [
        ("function", plan.function, other.function),
        ("target", plan.target, other.target),
        ("solver", plan.solver, other.solver),
        ("microbatches", str(plan.microbatches), str(other.microbatches)),
        ("segments", _segments(plan), _segments(other)),
        ("arguments in host memory", _listed(plan.hosted), _listed(other.hosted)),
        ("updates of those", _updates(plan), _updates(other)),
        ("policy", _policy(plan), _policy(other)),
        ("largest copies on their way", _in_flight(plan), _in_flight(other)),
        ("gradients in loops", _gradients(plan), _gradients(other)),
        ("compiler options", _options(plan), _options(other)),
        ("mesh", _mesh(plan), _mesh(other)),
        ("arguments split otherwise", *_split(plan, other)),
        ("what products give", _products(plan), _products(other)),
    ]
    sizes = ("budget", "predicted", "compiled", "argument", "output", "aliased", "host")
    for name in sizes:
        a, b = (getattr(p, f"{name}_bytes") for p in (plan, other))
        yield from _figure(name, a, b, format_bytes(a), format_bytes(b))
    labels = {
        "predicted": "step",
        "keep_all": "step as written",
        "exposed": "copies not hidden",
        "slack": "given to each copy",
    }
    for name, label in labels.items():
        a, b = (getattr(p, f"{name}_seconds") for p in (plan, other))
        yield from _figure(label, a, b, format_seconds(a), format_seconds(b))
    a, b = (p.compiled_exposed_seconds for p in (plan, other))
    told = ("not known" if seconds is None else format_seconds(seconds) for seconds in (a, b))
    yield from _figure("copies not hidden, compiled", a, b, *told)
    for name, a, b in figures:
        yield from _figure(name, a, b, a, b)
    if not moved and plan.kept != other.kept:
        a, b = ({(k.path, k.turn, n) for k in p.kept for n in k.names} for p in (plan, other))
        yield Change("values kept by name", f"{len(a)}", f"{len(b)} ({len(a & b)} the same)")


def _figure(name: str, a: object, b: object, before: str, after: str) -> Iterator[Change]:
    """A change; what differs too little to be seen in the usual form is shown in full."""
    if a != b:
        yield Change(name, *((before, after) if before != after else (str(a), str(b))))


def _segments(plan: Plan) -> str:
    found = [f"{s.length} in {' x '.join(map(str, s.counts))}" for s in plan.segments]
    return _listed(found)


def _updates(plan: Plan) -> str:
    s = plan.streamed
    if s is None:
        return "in the step, last" if plan.updates_last else "in the step"
    return f"{s.updates} pieces, gradients in {s.stages} stages"


def _in_flight(plan: Plan) -> str:
    sent, fetched = plan.in_flight
    return f"{sent} there, {fetched} back"


def _gradients(plan: Plan) -> str:
    return "in order" if plan.in_order else "when the compiler likes"


def _policy(plan: Plan) -> str:
    return str(Policy.from_json(plan.policy)) if plan.policy else "none"


def _options(plan: Plan) -> str:
    return _listed([f"{name}={value}" for name, value in plan.options])


def _mesh(plan: Plan) -> str:
    return _listed([f"{name}={size}" for name, size in plan.mesh])


def _split(plan: Plan, other: Plan) -> tuple[str, str]:
    """The arguments that are split in two ways, as each has them."""
    first, second = dict(plan.split), dict(other.split)
    paths = [p for p in {**first, **second} if first.get(p) != second.get(p)]
    before, after = ([f"{p} {its.get(p, 'whole')}" for p in paths] for its in (first, second))
    return _listed(before), _listed(after)


def _products(plan: Plan) -> str:
    return "split as batches are" if plan.pinned else "split as the compiler has it"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
