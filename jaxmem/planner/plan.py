"""Plan: what to keep and what to recompute, as plain data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.displayed import Displayed
from jaxmem.errors import Holder, PlanMismatchError
from jaxmem.files import replacing
from jaxmem.planner.decisions import (
    IN_FLIGHT,
    MOST_IN_FLIGHT,
    Decision,
    InFlight,
    Kept,
    Larger,
    Round,
    Segmented,
    Streamed,
)
from jaxmem.planner.decode import AGAIN, damaged, decode, parse
from jaxmem.planner.tables import Rows, names_of, write_table

if TYPE_CHECKING:
    from jaxmem.planner.difference import PlanDiff
    from jaxmem.planner.explain import Explanation
    from jaxmem.planner.frontier import Frontier

SCHEMA_VERSION = 15


@dataclass(frozen=True)
class Plan(Displayed):
    """What to keep, recompute and offload so that a step fits: plain data, deterministic.

    All byte figures are per device and for the whole step: arguments + outputs + temporaries,
    buffers shared by donation counted once.

    Attributes:
        function: name of the planned function.
        target: name of the hardware it was planned for.
        budget_bytes: the limit.
        predicted_bytes: the simulator's peak for the chosen program.
        compiled_bytes: the compiler's peak for the chosen program, on the target.
        argument_bytes: bytes of the arguments; ``output_bytes`` and ``aliased_bytes`` likewise.
        keep_all_predicted_bytes: predicted peak of the program as written.
        keep_all_compiled_bytes: compiled peak of the program as written; ``None`` if not compiled.
        host_bytes: bytes the plan keeps in host memory: arguments and temporaries.
        hosted: paths of the argument leaves that live in host memory between steps.
        streamed: how they are updated where the step runs in pieces for that; ``None`` where it is
            one program.
        predicted_seconds: predicted time of one step on the target.
        keep_all_seconds: predicted time of one step as written.
        exposed_seconds: predicted time of one step in which only copies to and from the host run.
        compiled_exposed_seconds: the same of the compiled program, in the order that the compiler
            gave it; ``None`` where that copies nothing, or a step runs in pieces.
        decisions: one entry per group of values that live from forward to backward.
        solver: which search produced it, or ``"keep-all"`` when the program is unchanged; with a
            policy that is named too, and one that decides about every value is named alone.
        rounds: every compile that was made, in order.
        notes: anything the user should know (for instance: runs here, planned for another GPU).
        fingerprint: hash of the program the plan belongs to.
        kept: what is kept across each turn; empty where the program is unchanged.
        segments: the loops that run in segments, keeping only what is carried into each.
        options: names and values of the XLA options the program is compiled with.
        settled: whether more element-wise results are written out early, so that XLA keeps closer
            to the predicted bytes.
        updates_last: whether ``hosted`` leaves are updated after all else, where updates as soon
            as their gradients are there were tried and did not fit.
        slack_seconds: what each copy to or from the host is given, as far as turns and the copies
            around it allow; 0 where it has what it takes on paper.
        in_flight: so many of the largest copies to host memory, and back from it, may be on the way
            at once outside pairs of scans; with 0 each copy there ends where its value is made, and
            each copy back starts where it is needed.
        in_order: whether gradients that backward iterations of loops only hand out are tied to what
            comes next, where the compiler may put them off and keep what they are made of; false
            where that was tried without, and took no more memory (less than 1% more).
        microbatches: how many ``jaxmem.AUTO`` stands for; 1 where the step does not use it.
        larger: what a somewhat larger budget would buy; ``None`` where the step is as written,
            a policy decides, or a time limit ended the search.
        holders: what fills the predicted peak, the largest first.
        policy: JSON of the policy it follows, which ``Policy.from_json`` reads; ``""`` for none.
        why: why that solver, and how it ended, in words.
        bound_seconds: a lower bound on predicted seconds: within the bytes that the search was
            given, no program that makes values again at one turn only is faster on paper. ``None``
            where nothing of the kind was proved for the step as a whole.
        measured_seconds: seconds of a step on the device, the median of several runs when it was
            planned; ``None`` where nothing was timed.
        measured_exposed_seconds: of one such step, of which a profile was made, the time in which
            only copies to and from the host ran; ``None`` where nothing was timed or copied.
        mesh: names and sizes of the axes that arguments are laid out over; empty for one device.
        split: the argument leaves that are split over it: their paths, and how.
        pinned: whether the compiler is told to split what products give as batches are; it would
            have devices exchange activations where parameters are less.
    """

    function: str
    target: str
    budget_bytes: int
    predicted_bytes: int
    compiled_bytes: int
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    keep_all_predicted_bytes: int
    keep_all_compiled_bytes: int | None
    predicted_seconds: float
    keep_all_seconds: float
    decisions: tuple[Decision, ...]
    solver: str
    rounds: tuple[Round, ...]
    fingerprint: str
    kept: tuple[Kept, ...] = ()
    segments: tuple[Segmented, ...] = ()
    notes: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    host_bytes: int = 0
    hosted: tuple[str, ...] = ()
    streamed: Streamed | None = None
    microbatches: int = 1
    settled: bool = False
    updates_last: bool = False
    slack_seconds: float = 0.0
    in_flight: InFlight = IN_FLIGHT
    in_order: bool = True
    larger: Larger | None = None
    holders: tuple[Holder, ...] = ()
    policy: str = ""
    why: str = ""
    bound_seconds: float | None = None
    measured_seconds: float | None = None
    exposed_seconds: float = 0.0
    compiled_exposed_seconds: float | None = None
    measured_exposed_seconds: float | None = None
    mesh: tuple[tuple[str, int], ...] = ()
    split: tuple[tuple[str, str], ...] = ()
    pinned: bool = False
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def recompute_seconds(self) -> float:
        """Predicted extra seconds per step spent on recomputation."""
        return self.predicted_seconds - self.keep_all_seconds

    @property
    def gap(self) -> float | None:
        """How much more time than the bound it takes on paper, as a share of the bound."""
        if not self.bound_seconds:
            return None
        return max(0.0, self.predicted_seconds / self.bound_seconds - 1)

    def recomputed(self) -> tuple[Decision, ...]:
        """The decisions that recompute at least one value."""
        return tuple(d for d in self.decisions if d.recomputed)

    @property
    def marginal_seconds_per_byte(self) -> float:
        """Predicted seconds that each byte more of budget saves; 0 where more saves nothing."""
        return self.larger.saved_seconds / self.larger.more_bytes if self.larger else 0.0

    def explain(self, query: str = "") -> Explanation:
        """Why values are kept, recomputed or moved; without a query why the plan is what it is.

        Args:
            query: which values: a run of names in the module path (``"h3.mlp"``, ``"h*/mlp"``), a
                checkpoint name, a source (``"train.py:41"`` or ``"train.py"``) or a primitive.

        Raises:
            PlanQueryError: nothing of that name lives from the forward to the backward pass.
        """
        from jaxmem.planner.explain import explain

        return explain(self, query)

    def diff(self, other: Plan) -> PlanDiff:
        """What ``other`` does differently; false where it does the same.

        How the plans were found (compiles, notes, measured times, what is recorded for
        :meth:`explain`) is not compared.
        """
        from jaxmem.planner.difference import difference

        return difference(self, other)

    def to_json(self) -> str:
        """The plan as JSON text; the same plan gives the same text, byte for byte."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from :meth:`to_json` text.

        Raises:
            PlanMismatchError: not a plan, of another schema version, or damaged; the message names
                the field.
        """
        data = parse(text)
        version = data.get("schema_version") if isinstance(data, Mapping) else type(data).__name__
        if isinstance(data, Mapping) and "buffers" in data and "rounds" not in data:
            raise PlanMismatchError(
                "this is a report, such as jaxmem analyze writes, and not a plan: jaxmem plan "
                "train:entry -o plan.json, or plan.save(path), writes one."
            )
        if isinstance(version, bool) or version != SCHEMA_VERSION:
            raise PlanMismatchError(
                f"plan has schema version {version!r}, this jaxmem reads {SCHEMA_VERSION}. {AGAIN}"
            )
        plan = decode(cls, data)
        for where, found, wanted in _contradictions(plan):
            raise damaged(where, found, wanted)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to ``path`` as JSON; a file that is there is replaced as a whole."""
        with replacing(path) as file:
            file.write(self.to_json())

    def to_csv(self, path: str | Path, table: str = "decisions") -> None:
        """Write ``"decisions"``, ``"rounds"`` (the compiles) or ``"holders"`` as CSV.

        Raises:
            ReportError: there is no table of that name.
        """
        tables: dict[str, tuple[list[str], Rows]] = {
            "decisions": (names_of(Decision), lambda: map(vars, self.decisions)),
            "rounds": (names_of(Round), lambda: map(vars, self.rounds)),
            "holders": (names_of(Holder), lambda: map(vars, self.holders)),
        }
        write_table(path, tables, table)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`.

        Raises:
            PlanMismatchError: as :meth:`from_json`, or ``path`` is a folder or not text.
            FileNotFoundError: there is no such file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, IsADirectoryError) as error:
            raise PlanMismatchError(f"{path} is not a jaxmem plan: {error}. {AGAIN}") from error
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{path}: {error}") from error

    def to_html(self, path: str | os.PathLike[str], *, frontier: Frontier | None = None) -> Path:
        """Write the plan as one HTML file that works offline, and return its path.

        A plan knows no buffers: ``step.report(...).to_html(path, plan=plan)`` draws them too.

        Args:
            path: the file to write; one that is there is replaced.
            frontier: what other budgets would cost, drawn with stock policies.

        Raises:
            ReportFileError: the file cannot be written.
            ArgumentError: ``frontier`` is none, or of another step or target.
        """
        from jaxmem.show.page import document, write_page

        return write_page(path, document(plan=self, frontier=frontier))


def _contradictions(plan: Plan) -> Iterator[tuple[str, Any, str]]:
    """Fields that have the right type and cannot be: place, value, what it should be."""
    if plan.microbatches < 1:
        yield "microbatches", plan.microbatches, "1 or more"
    if plan.updates_last and not plan.hosted:
        yield "updates_last", True, "false where nothing is hosted"
    if not plan.in_order and not (plan.kept or plan.segments):
        yield "in_order", False, "true where the program is unchanged"
    if plan.larger is not None and plan.larger.more_bytes < 1:
        yield "larger.more_bytes", plan.larger.more_bytes, "1 or more"
    for n, d in enumerate(plan.decisions):
        for name, wanted in _wrong_in(d):
            yield f"decisions[{n}].{name}", getattr(d, name), wanted
    yield from _wrong_moves(plan)
    yield from _wrong_turns_and_loops(plan)


def _wrong_moves(plan: Plan) -> Iterator[tuple[str, Any, str]]:
    moves = plan.streamed is None and (plan.hosted or any(k.offloaded for k in plan.kept))
    if plan.slack_seconds and not moves:
        yield "slack_seconds", plan.slack_seconds, "0 where no program moves anything"
    if plan.in_flight != IN_FLIGHT and not moves:
        yield "in_flight", plan.in_flight, f"{[*IN_FLIGHT]} where no program moves anything"
    if max(plan.in_flight) > MOST_IN_FLIGHT:
        yield "in_flight", plan.in_flight, f"{MOST_IN_FLIGHT} at most, each way"
    if plan.slack_seconds == math.inf:
        yield "slack_seconds", plan.slack_seconds, "a finite number"


def _wrong_turns_and_loops(plan: Plan) -> Iterator[tuple[str, Any, str]]:
    turns, loops = [(k.path, k.turn) for k in plan.kept], [s.path for s in plan.segments]
    for n, k in enumerate(plan.kept):
        if turns[n] in turns[:n]:
            yield f"kept[{n}].turn", k.turn, "another one than those before it"
        if not set(k.offloaded) <= set(k.names):
            yield f"kept[{n}].offloaded", k.offloaded, "among its names"
    for n, s in enumerate(plan.segments):
        if s.path in loops[:n]:
            yield f"segments[{n}].path", s.path, "another one than those before it"
        if not s.counts or min(s.counts) < 1:
            yield f"segments[{n}].counts", s.counts, "numbers of 1 or more"


def _wrong_in(decision: Decision) -> Iterator[tuple[str, str]]:
    again, count = decision.recomputed, decision.count
    if again > count:
        yield "recomputed", f"at most its count {count}"
    if (decision.action == "recompute") != bool(again):
        yield "action", f"what recomputing {again} values is called"
    if decision.again and (len(set(decision.again)) != again or max(decision.again) >= count):
        yield "again", f"{again} different numbers below {count}"
    if not 0 <= decision.offloaded <= count - again:
        yield "offloaded", f"from 0 to {count - again}"
    elif not again and (decision.action == "offload") != bool(decision.offloaded):
        yield "action", f"what offloading {decision.offloaded} values is called"
    if len(decision.modules) not in (0, count):
        yield "modules", f"a list of {count}"
