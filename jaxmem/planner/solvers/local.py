"""Greedy fill and local search: for lines too large, or too odd, for anything exact."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from enum import IntEnum

from jaxmem.planner.problem import Problem, Run
from jaxmem.planner.solvers.answer import Answer, Clock, Limits

# Rounds of improvement; each looks at every single change, or at every exchange in small lines.
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
    if len(problem.droppable) > _MOST_EXCHANGES:
        why = "single changes of values no longer help"
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
        self.options = tuple(Fate) if self.offloads else (Fate.RECOMPUTE, Fate.KEEP)
        self.order = sorted(self.values, key=self._worth, reverse=True)

    def _worth(self, value: int) -> float:
        problem = self.problem
        return problem.kernels[problem.made[value]].seconds / max(1, problem.nbytes[value])

    def run(self, fates: Fates) -> Run:
        if len(self.values) > _MOST_EXCHANGES:
            return self.problem.run(self.problem.keeping(*split(fates)))
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
        for _ in range(_MOST_ROUNDS):
            before = fates
            fates = self.sweep(fates)
            if fates is before and len(self.values) <= _MOST_EXCHANGES:
                fates = self.exchange(fates)
            if fates is before or self.clock.over():
                break
        run = self.run(fates)
        over, seconds, nbytes = self.cost(run)
        return None if over else ((seconds, nbytes), fates, run)

    def sweep(self, fates: Fates) -> Fates:
        """Every single change that helps when its turn comes, dearest bytes to make first.

        From nothing this is greedy filling, from everything greedy dropping.
        """
        cost = self.cost(self.run(fates))
        for value in self.order:
            for fate in self.options:
                if fate is fates[value] or self.clock.over():
                    continue
                changed = {**fates, value: fate}
                other = self.cost(self.run(changed))
                if other < cost:
                    fates, cost = changed, other
        return fates

    def exchange(self, fates: Fates) -> Fates:
        """The best exchange of two values, if one helps."""
        best, cost = fates, self.cost(self.run(fates))
        for first, second in itertools.combinations(self.values, 2):
            for a, b in itertools.product(self.options, repeat=2):
                if a is fates[first] or b is fates[second] or self.clock.over():
                    continue
                changed = {**fates, first: a, second: b}
                other = self.cost(self.run(changed))
                if other < cost:
                    best, cost = changed, other
        return best
