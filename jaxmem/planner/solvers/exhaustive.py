"""Every choice there is: for lines so small that this takes less time than a model of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxmem.planner.problem import Choice, Problem, Run
from jaxmem.planner.solvers.answer import Answer, Clock, Limits

# With more choices than this MILP is quicker; a choice takes 0.05 ms.
MOST_CHOICES = 4096


def count(problem: Problem, limits: Limits) -> int:
    """How many choices of one turn there are."""
    return len(_fates(limits)) ** len(problem.droppable)


def solve(problem: Problem, limits: Limits) -> Answer | None:
    """The fastest choice within the limits, the smallest of equally fast ones."""
    clock = Clock(limits.seconds)
    best: tuple[Choice, Run] | None = None
    tried = 0
    for choice in _choices(problem, limits):
        if clock.over():
            break
        tried += 1
        run = problem.run(choice)
        if limits.allow(run) and (best is None or _cost((choice, run)) < _cost(best)):
            best = (choice, run)
    if best is None:
        return None
    if clock.ran_out:
        why = f"its time limit ended it after {tried} of {count(problem, limits)} choices"
        return Answer(*best, "every choice", why)
    return Answer(*best, "every choice", f"optimal, of {tried} choices", best[1].seconds)


def _cost(found: tuple[Choice, Run]) -> tuple[float, int]:
    return found[1].seconds, found[1].peak_bytes


def _fates(limits: Limits) -> str:
    """Keep, recompute, offload."""
    return "kro" if limits.host_bytes else "kr"


def _choices(problem: Problem, limits: Limits) -> Iterator[Choice]:
    """Keeping everything first."""
    for fates in itertools.product(_fates(limits), repeat=len(problem.droppable)):
        fate = list(zip(problem.droppable, fates, strict=True))
        yield problem.keeping([v for v, f in fate if f == "k"], [v for v, f in fate if f == "o"])
