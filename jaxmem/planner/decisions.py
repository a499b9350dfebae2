"""What a plan is made of: its decisions, what it keeps, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["keep", "recompute", "offload"]

InFlight = tuple[int, int]
"""How many of the largest copies to host memory, and back from it, may be on the way at once.

With 0 each copy there ends where its value is made, and each copy back starts where it is needed.
"""

# Chosen, not measured: one copy on its link while the one before it is used. Counted in bytes, as
# so many times the largest copy: small ones do not fill the device.
MOST_IN_FLIGHT = 4
IN_FLIGHT: InFlight = (MOST_IN_FLIGHT, MOST_IN_FLIGHT)
AT_ONCE: InFlight = (0, 0)


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
        again_seconds: predicted cost of recomputing all ``count`` values once, each from what it
            is made of; 0 for element-wise work that is part of a kernel anyway.
        feeds: how many operations that run again read one of these values where it is kept.
        modules: the module path of each value; empty where all have that of ``module``.
        again: which of them are recomputed, by their numbers in program order.
        offloaded: how many of the others wait in host memory.
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
    again_seconds: float = 0.0
    feeds: int = 0
    modules: tuple[str, ...] = ()
    again: tuple[int, ...] = ()
    offloaded: int = 0

    @property
    def label(self) -> str:
        """The shortest name a reader can find: checkpoint name, or operation and line."""
        where, what = self.source.split(" (")[0], self.checkpoint_name or self.primitive
        return f"{what} at {where}" if where else what

    @property
    def recomputed_bytes(self) -> int:
        """Bytes of the values that are recomputed."""
        return self.nbytes * self.recomputed // max(self.count, 1)

    @property
    def seconds_per_byte(self) -> float:
        """Predicted cost of making a byte of it again."""
        return self.again_seconds / max(self.nbytes, 1)


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
        measured_seconds: the median of its runs on the device; ``None`` where it was not timed.
    """

    name: str
    limit_bytes: int
    predicted_bytes: int
    compiled_bytes: int
    fits: bool
    problem: str = ""
    measured_seconds: float | None = None


@dataclass(frozen=True)
class Larger:
    """What a somewhat larger budget would buy, as predicted when the plan was made.

    Attributes:
        more_bytes: how much larger.
        saved_seconds: how much faster a step is then.
    """

    more_bytes: int
    saved_seconds: float


@dataclass(frozen=True)
class Streamed:
    """How argument leaves that wait in host memory are updated: one after the other.

    Attributes:
        stages: how many programs compute the gradients, one after the other.
        updates: how many pieces the update runs in; ``programs`` of them are different.
        fetched_bytes: bytes copied to the device in a step; ``sent_bytes`` those copied back.
        window_bytes: the most device memory that the copies take at a time.
        by_rows: how many of the pieces go through their leaves some rows at a time.
        ahead: how many leaves are read by loops that fetch a row one iteration ahead.
        along: how many leaves are updated row by row in the loops that make their gradients.
        kept_bytes: of gradients that wait in host memory, too, until all of them are made.
        within_bytes: what it was planned in: the budget (0 as well), or less where XLA's allocator
            adds much.
    """

    stages: int
    updates: int
    programs: int
    fetched_bytes: int
    sent_bytes: int
    window_bytes: int
    by_rows: int = 0
    ahead: int = 0
    along: int = 0
    kept_bytes: int = 0
    within_bytes: int = 0
