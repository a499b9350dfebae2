"""Greedy fill and local search: for lines too large, or too odd, for anything exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum

from jaxmem.planner.problem import Problem, Run
from jaxmem.planner.solvers.answer import Answer, Clock, Limits

# Rounds of improvement; each looks at every single change, and at every exchange in small lines.
_MOST_ROUNDS = 12
_MOST_EXCHANGES = 24


class Fate(IntEnum):
    """What happens to a value at the turn."""

    RECOMPUTE = 0
    KEEP = 1
    OFFLOAD = 2


Fates = dict[int, Fate]


def solve(problem: Problem, limits: Limits, starts: Iterable[frozenset[int]] = ()) -> Answer | None:
    """The best choice that filling and single changes lead to, from several starts.

    Args:
        problem: the line.
        limits: what may be used.
        starts: kept sets to begin with, besides nothing, everything and cuts of the line.
    """
    search = _Local(problem, limits)
    best: tuple[tuple[float, int], Fates, Run] | None = None
    for fates in search.starts(starts):
        found = search.climb(fates)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        return None
    why = "single changes and exchanges of values no longer help"
    if search.clock.ran_out:
        why = "its time limit ended the search"
    return Answer(problem.keeping(*split(best[1])), best[2], "greedy + local search", why)


def split(fates: Fates) -> tuple[frozenset[int], frozenset[int]]:
    """What is kept on the device, and what is offloaded."""
    kept = frozenset(v for v, fate in fates.items() if fate is Fate.KEEP)
    return kept, frozenset(v for v, fate in fates.items() if fate is Fate.OFFLOAD)


class _Local:
    def __init__(self, problem: Problem, limits: Limits):
        self.problem, self.limits = problem, limits
        self.clock = Clock(limits.seconds)
        self.values = problem.droppable
        self.known: dict[tuple[Fate, ...], Run] = {}
        self.offloads = limits.host_bytes > 0 and problem.d2h_bytes_per_second > 0

    def run(self, fates: Fates) -> Run:
        key = tuple([fates[v] for v in self.values])
        if key not in self.known:
            self.known[key] = self.problem.run(self.problem.keeping(*split(fates)))
        return self.known[key]

    def cost(self, run: Run) -> tuple[float, float, int]:
        """What is over the limits first, then seconds, then bytes."""
        over = max(0, run.peak_bytes - self.limits.device_bytes)
        over += max(0, run.host_bytes - self.limits.host_bytes)
        return float(over), run.seconds, run.peak_bytes

    def starts(self, given: Iterable[frozenset[int]]) -> Iterator[Fates]:
        """Kept sets that the search begins with."""
        nothing = dict.fromkeys(self.values, Fate.RECOMPUTE)
        for kept in (*given, *self.cuts()):
            yield {v: Fate.KEEP if v in kept else Fate.RECOMPUTE for v in self.values}
        yield nothing
        yield dict.fromkeys(self.values, Fate.KEEP)
        if self.offloads:
            yield dict.fromkeys(self.values, Fate.OFFLOAD)

    def cuts(self) -> list[frozenset[int]]:
        """What is read again late: the residuals themselves."""
        late = {v for k in self.problem.kernels[self.problem.turn :] for v in k.reads}
        return [frozenset(v for v in self.values if v in late)]

    def climb(self, fates: Fates) -> tuple[tuple[float, int], Fates, Run] | None:
        """Change one value, or exchange two, as long as that helps; ``None`` if nothing fits."""
        run = self.run(fates)
        for _ in range(_MOST_ROUNDS):
            best, best_cost = None, self.cost(run)
            for changed in self.neighbours(fates):
                if self.clock.over():
                    break
                other = self.run(changed)
                if self.cost(other) < best_cost:
                    best, best_cost = changed, self.cost(other)
            if best is None:
                break
            fates, run = best, self.run(best)
        over, seconds, nbytes = self.cost(run)
        return None if over else ((seconds, nbytes), fates, run)

    def neighbours(self, fates: Fates) -> Iterator[Fates]:
        """Every change of one value; in small lines also every exchange of two."""
        options = tuple(Fate) if self.offloads else (Fate.RECOMPUTE, Fate.KEEP)
        for value in self.values:
            for fate in options:
                if fate is not fates[value]:
                    yield {**fates, value: fate}
        if len(self.values) > _MOST_EXCHANGES:
            return
        for n, first in enumerate(self.values):
            for second in self.values[n + 1 :]:
                for a in options:
                    for b in options:
                        if a is not fates[first] and b is not fates[second]:
                            yield {**fates, first: a, second: b}
