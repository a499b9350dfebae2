"""Plan: what to keep and what to recompute, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxmem.errors import PlanMismatchError

SCHEMA_VERSION = 4
Action = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True)
class Decision:
    """What happens to a group of equal values between their early and their late use.

    Attributes:
        key: stable identity of the group inside the program; the rewrite finds the values by it.
        action: ``"keep"``, ``"recompute"`` where any of them is, or ``"offload"`` where any is kept
            in host memory and none is recomputed.
        count: how many equal values share the decision (repeated layers).
        recomputed: how many of them are recomputed, in program order.
        nbytes: bytes of all ``count`` values together, on each device.
        seconds: predicted cost of recomputing all ``recomputed`` values once.
        primitive: the operation that makes the value, for instance ``"dot_general"``.
        shape: shape of one value.
        dtype: dtype name of one value.
        source: ``file.py:line (function)`` of the user's own line.
        module: module path from the name stack, for instance ``"h3/mlp"``.
        checkpoint_name: name given by ``checkpoint_name``, or ``""``.
    """

    key: str
    action: Action
    count: int
    recomputed: int
    nbytes: int
    seconds: float
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    source: str
    module: str
    checkpoint_name: str


@dataclass(frozen=True)
class Kept:
    """What is kept across one turn; everything else made before it is made again.

    Attributes:
        path: the block the turn is in, ``""`` for the step itself.
        turn: the operation of that block at which the late part starts.
        names: names of the values kept, sorted.
        offloaded: those of them that are in host memory meanwhile, sorted.
        inside: a turn inside a late part: it drops only what was made before that part.
    """

    path: str
    turn: int
    names: tuple[str, ...]
    offloaded: tuple[str, ...] = ()
    inside: bool = False


@dataclass(frozen=True)
class Segmented:
    """A loop and its backward loop that run in segments: the forward pass runs again in each.

    Attributes:
        path: the two loops, by the block that one iteration of both is.
        length: how many iterations they have.
        counts: how many segments, then how many within each of these, and so on.
    """

    path: str
    length: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """One compile of the way from the first guess to the verified program.

    Attributes:
        name: what was compiled, for instance ``"keep-all"`` or ``"search"``.
        limit_bytes: the simulator limit this round solved for.
        predicted_bytes: what the simulator (calibrated by earlier rounds) said.
        compiled_bytes: what the compiler then said for the target.
        fits: whether ``compiled_bytes`` is within the budget.
        problem: why the round was not taken although it fits, or ``""``.
    """

    name: str
    limit_bytes: int
    predicted_bytes: int
    compiled_bytes: int
    fits: bool
    problem: str = ""


@dataclass(frozen=True)
class Plan:
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
        predicted_seconds: predicted time of one step on the target.
        keep_all_seconds: predicted time of one step as written.
        decisions: one entry per group of values that live from forward to backward.
        solver: which search produced it, or ``"keep-all"`` when the program is unchanged; with a
            policy that is named too, and one that decides about every value is named alone.
        rounds: every compile that was made, in order.
        notes: anything the user should know (for instance: runs here, planned for another GPU).
        fingerprint: hash of the program the plan belongs to.
        kept: what is kept across each turn; empty where the program is unchanged.
        segments: the loops that run in segments, keeping only what is carried into each.
        options: names and values of the XLA options the program is compiled with.
        microbatches: how many ``jaxmem.AUTO`` stands for; 1 where the step does not use it.
        policy: JSON of the policy it follows, which ``Policy.from_json`` reads; ``""`` for none.
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
    microbatches: int = 1
    policy: str = ""
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def recompute_seconds(self) -> float:
        """Predicted extra seconds per step spent on recomputation."""
        return self.predicted_seconds - self.keep_all_seconds

    def recomputed(self) -> tuple[Decision, ...]:
        """The decisions that recompute at least one value."""
        return tuple(d for d in self.decisions if d.recomputed)

    def to_json(self) -> str:
        """The plan as JSON text; the same plan gives the same text, byte for byte."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from :meth:`to_json` text.

        Raises:
            PlanMismatchError: not a plan, or of another schema version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanMismatchError(f"not a jaxmem plan: {error}") from error
        if not isinstance(data, Mapping) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, Mapping) else type(data).__name__
            raise PlanMismatchError(
                f"plan has schema version {found!r}, this jaxmem reads {SCHEMA_VERSION}. "
                "Plan again: jaxmem.plan(step, *args, budget=...)."
            )
        try:
            return cls(**_decoded(dict(data)))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanMismatchError(f"plan file is damaged: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to ``path`` as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`."""
        return cls.from_json(Path(path).read_text())

    def __str__(self) -> str:
        from jaxmem.show.terminal import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from jaxmem.show.html import plan_html

        return plan_html(self)


def _decoded(data: dict[str, Any]) -> dict[str, Any]:
    decisions = tuple(Decision(**{**d, "shape": tuple(d["shape"])}) for d in data.pop("decisions"))
    rounds = tuple(Round(**r) for r in data.pop("rounds"))
    notes = tuple(data.pop("notes"))
    kept = tuple(
        Kept(**{**k, "names": tuple(k["names"]), "offloaded": tuple(k.get("offloaded", ()))})
        for k in data.pop("kept")
    )
    hosted = tuple(data.pop("hosted", ()))
    options = tuple((str(name), str(value)) for name, value in data.pop("options"))
    segments = tuple(
        Segmented(s["path"], s["length"], tuple(s["counts"])) for s in data.pop("segments")
    )
    lists = {"decisions": decisions, "rounds": rounds, "notes": notes, "kept": kept}
    return {**data, **lists, "hosted": hosted, "segments": segments, "options": options}
