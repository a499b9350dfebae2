"""One way to ask for a choice: which solver answers, and why that one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from jaxmem.errors import ArgumentError
from jaxmem.planner.problem import Problem
from jaxmem.planner.solvers import blocks, exhaustive, local, milp
from jaxmem.planner.solvers.answer import Answer, Clock, Limits
from jaxmem.planner.stages import cut_places

# A line with no more values than this is solved exactly, as a whole.
MOST_EXACT = 24
# A chain has at least this many stages.
FEWEST_STAGES = 3
# Cuts after which the exact solver gives up and says what is open.
_MOST_CUTS = 100


def solve(problem: Problem, limits: Limits, solver: str = "auto") -> Answer | None:
    """The best choice that a solver finds within the limits; ``None`` if it finds none.

    ``"auto"`` takes what proves most in reasonable time: of a line with hardly any values that can
    be dropped every choice is tried, one with few is solved exactly by ``"milp"``, a chain of
    stages by ``"chain"``, and any other line by ``"local"``. Where that finds nothing, or its time
    ends before it finds anything, ``"local"`` answers. ``Answer.why`` says which it was, why, and
    whether a time limit cut it short.

    Args:
        problem: the line.
        limits: what may be used. Where nothing can be offloaded to the host, for want of room or
            of a link, the choice is the one without offload.
        solver: ``"auto"``, ``"milp"``, ``"chain"`` or ``"local"``.

    Raises:
        ArgumentError: there is no such solver.

    >>> from jaxmem.planner.problem import Kernel
    >>> early = [Kernel(1.0, (n,), (n + 1,)) for n in range(3)]
    >>> late = [Kernel(1.0, (3,), (4,)), Kernel(1.0, (4, 2), (5,)), Kernel(1.0, (5, 1), (6,))]
    >>> line = Problem((*early, *late), (4,) * 7, 3)
    >>> answer = solve(line, Limits(12))
    >>> line.run(line.keep_all).peak_bytes, answer.run.peak_bytes, answer.run.recompute_seconds
    (16, 12, 1.0)
    >>> answer.why
    '3 values can be dropped, few enough to try all: optimal, of 8 choices'
    """
    if solver not in SOLVERS:
        raise ArgumentError(
            f"solver={solver!r} is not one of {', '.join(map(repr, SOLVERS))}. "
            'Leave it out for "auto".'
        )
    if not _offloads(problem, limits):
        limits = replace(limits, host_bytes=0)
    return SOLVERS[solver](problem, limits)


def _offloads(problem: Problem, limits: Limits) -> bool:
    """Whether anything fits the host and can be sent there and back."""
    least = min((problem.nbytes[v] for v in problem.droppable), default=0)
    linked = problem.d2h_bytes_per_second > 0 and problem.h2d_bytes_per_second > 0
    return linked and limits.host_bytes >= max(least, 1)


def _auto(problem: Problem, limits: Limits) -> Answer | None:
    count = len(problem.droppable)
    if exhaustive.count(problem, limits) <= exhaustive.MOST_CHOICES:
        chosen, reason = exhaustive.solve, f"{count} values can be dropped, few enough to try all"
    elif count <= MOST_EXACT:
        chosen, reason = _milp, f"{count} values can be dropped, few enough for MILP"
    else:
        stages = 1 + sum(1 for _ in cut_places(problem))
        if stages < FEWEST_STAGES:
            reason = f"{count} values can be dropped, too many for MILP, and it is no chain"
            return _because(reason, local.solve(problem, limits))
        chosen, reason = blocks.solve, f"a chain of {stages} stages"
    clock = Clock(limits.seconds)
    answer = chosen(problem, limits)
    if answer is None and not (chosen is exhaustive.solve and clock.left() > 0):
        answer = local.solve(problem, replace(limits, seconds=max(0.0, clock.left())))
        reason += ", which found nothing"
    return _because(reason, answer)


def _because(reason: str, answer: Answer | None) -> Answer | None:
    return None if answer is None else replace(answer, why=f"{reason}: {answer.why}")


def _milp(problem: Problem, limits: Limits) -> Answer | None:
    """What local search finds, until MILP finds better or proves that there is none."""
    clock = Clock(limits.seconds)
    # Local search takes milliseconds on lines of this size; on larger ones half of the time.
    start = local.solve(problem, replace(limits, seconds=limits.seconds / 2))
    left = max(0.0, clock.left()) if math.isfinite(limits.seconds) else math.inf
    return milp.solve(problem, replace(limits, seconds=left), start, _MOST_CUTS)


SOLVERS: dict[str, Callable[[Problem, Limits], Answer | None]] = {
    "auto": _auto,
    "milp": _milp,
    "chain": blocks.solve,
    "local": local.solve,
}
"""What ``solver=`` may be."""
