"""What a solver is asked and what it answers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from jaxmem.planner.problem import Choice, Problem, Run


@dataclass(frozen=True)
class Limits:
    """What a choice may use.

    Attributes:
        device_bytes: device bytes of the line, arguments and results of the step left out.
        host_bytes: bytes of host memory for what is offloaded.
        seconds: how long a solver may take; the same whatever it is if it is not reached.
    """

    device_bytes: int
    host_bytes: int = 0
    seconds: float = math.inf

    def allow(self, run: Run) -> bool:
        """Whether a run stays within them."""
        return run.peak_bytes <= self.device_bytes and run.host_bytes <= self.host_bytes


@dataclass(frozen=True)
class Answer:
    """The best choice that a solver found.

    Attributes:
        choice: the choice; ``run`` what it needs.
        solver: who found it.
        why: why that solver, and how it ended, in words.
        bound_seconds: no choice of the kind the solver looks for is faster; ``None`` if it does
            not know.
    """

    choice: Choice
    run: Run
    solver: str
    why: str
    bound_seconds: float | None = None

    @property
    def gap(self) -> float | None:
        """How much slower than the bound, as a share of the bound; 0 for an optimum."""
        if self.bound_seconds is None:
            return None
        if not self.bound_seconds:
            return 0.0
        return max(0.0, self.run.seconds / self.bound_seconds - 1)


@dataclass
class Clock:
    """Says when a time limit is over, and whether anybody was told so."""

    seconds: float
    started: float = field(default_factory=time.perf_counter)
    ran_out: bool = False

    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self.started)

    def over(self) -> bool:
        """Whether the time is over."""
        if self.left() <= 0:
            self.ran_out = True
        return self.ran_out


def best_of(problem: Problem, limits: Limits, choices: list[Choice]) -> tuple[Choice, Run] | None:
    """The fastest of ``choices`` within the limits, the smallest of equally fast ones."""
    runs = [(choice, problem.run(choice)) for choice in choices]
    allowed = [(c, r) for c, r in runs if limits.allow(r)]
    return min(allowed, key=lambda item: (item[1].seconds, item[1].peak_bytes), default=None)
