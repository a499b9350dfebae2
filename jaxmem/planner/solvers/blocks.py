"""Chains of blocks: ways to keep each distinct block by MILP, combined by the chain's table."""

from __future__ import annotations

import itertools
import math

from jaxmem.planner.problem import Choice, Problem, Run
from jaxmem.planner.solvers.answer import Answer, Clock, Limits, best_of
from jaxmem.planner.solvers.away import AwayTable, Host
from jaxmem.planner.solvers.chain import ChainTable
from jaxmem.planner.stages import Stages

# Memory is counted in this many parts of the limit; more is exact for more and takes longer.
_SLOTS = 256
# The table knows more memory than there is: rounding up makes programs use less than they may.
_SPARE = 1.15
_SHARED = 1.2
# How long links may keep the device waiting, as shares of all copies one after the other; then
# between the best of these and the next ones.
_WAITING = (0.0, 0.02, 0.06, 0.2, 0.5, 1.0)
_MORE_WAITING = 2
# The table counts bytes on the host to the nearest unit; where what it finds is then too much, it
# is told of less.
_HOST_PARTS = (1.0, 0.9, 0.75, 0.5)


class Blocks:
    """The choices of a chain of blocks.

    Args:
        problem: the line.
        clock: when its time is over stages are looked at less closely, and without a table.
    """

    def __init__(self, problem: Problem, clock: Clock | None = None):
        self.problem, self.stages = problem, Stages(problem, clock)
        self._tables: dict[int, ChainTable] = {}
        self._runs: dict[Choice, Run] = {}

    def solve(self, limits: Limits, clock: Clock | None = None) -> Answer | None:
        """The fastest choice of the chain within the limits; ``None`` if there is none.

        Args:
            limits: what may be used.
            clock: one that runs already; otherwise ``limits.seconds`` begin now. When its time is
                over the answer is the best there is by then, and says so.
        """
        clock = clock or Clock(limits.seconds)
        found = [best_of(self.problem, limits, self._simple())]
        table = self._table(int(limits.device_bytes * _SPARE), clock)
        if table is not None:
            found.append(self._largest(table, limits, clock))
            if limits.host_bytes and self.problem.d2h_bytes_per_second:
                found.append(self._with_host(table, limits, clock))
        best = min([f for f in found if f is not None], key=_cost, default=None)
        if best is None:
            return None
        why = f"{len(self.stages.cuts)} stages, of which {self.stages.distinct} are distinct"
        if clock.ran_out:
            why += "; its time limit ended it"
        return Answer(*best, "MILP per block + chain DP", why)

    def _simple(self) -> list[Choice]:
        """Everything kept, and what stages hand on with each of them kept in the same way."""
        cuts = self.stages.cuts
        handed = frozenset[int]().union(*(cut.handed for cut in cuts))
        most = max(len(cut.options) for cut in cuts)
        keeps = [
            handed.union(*(cut.options[min(n, len(cut.options) - 1)] for cut in cuts))
            for n in range(most)
        ]
        return [self.problem.keep_all, *(self.problem.keeping(keep) for keep in keeps)]

    def smallest(self, most_bytes: int, clock: Clock | None = None) -> tuple[Choice, Run] | None:
        """The choice with the smallest peak, of those that should need less than ``most_bytes``.

        ``None`` if there is none, or the time of ``clock`` is over before it is found.
        """
        clock = clock or Clock(math.inf)
        table = self._table(most_bytes, clock)
        if table is None:
            return None
        for slots in range(table.slots + 1):
            found = [] if clock.over() else self._at(table, slots)
            if found:
                return min(found, key=lambda f: (f[1].peak_bytes, f[1].seconds))
        return None

    def _largest(
        self, table: ChainTable | AwayTable, limits: Limits, clock: Clock
    ) -> tuple[Choice, Run] | None:
        """The choice for the most memory of the table that stays within the limits on the line.

        Stages share what is handed on and the table rounds up, so the memory of the table is not
        quite that of the line; one grows with the other.
        """
        low, high = -1, table.slots + 1
        seen: list[tuple[Choice, Run]] = []
        while high - low > 1 and not clock.over():
            middle = (low + high) // 2
            found = self._at(table, middle)
            fitting = [f for f in found if f[1].peak_bytes <= limits.device_bytes]
            if fitting or not found:
                low = middle
                seen += [f for f in fitting if limits.allow(f[1])]
            else:
                high = middle
        return min(seen, key=_cost, default=None)

    def _with_host(
        self, table: ChainTable, limits: Limits, clock: Clock
    ) -> tuple[Choice, Run] | None:
        """The fastest choice that may also offload, for any time that links keep it waiting."""
        problem = self.problem
        d2h, h2d = problem.d2h_bytes_per_second, problem.h2d_bytes_per_second
        most = sum(problem.nbytes[v] for v in problem.droppable) * (1 / d2h + 1 / h2d)
        found: dict[float, tuple[Choice, Run] | None] = {}

        def waiting(seconds: float) -> None:
            if seconds in found:
                return
            found[seconds] = None
            for part in _HOST_PARTS:
                host = Host(int(part * limits.host_bytes), d2h, h2d, seconds)
                away = AwayTable(table, host, clock.over)
                if away.complete:
                    found[seconds] = self._largest(away, limits, clock)
                if found[seconds] is not None or not away.full:
                    return

        for share in _WAITING:
            waiting(share * most)
        for _ in range(_MORE_WAITING):
            known = sorted(found)
            fitting = {w: _cost(f) for w, f in found.items() if f is not None}
            if not fitting:
                break
            best = known.index(min(fitting, key=lambda w: (fitting[w], w)))
            for low, high in itertools.pairwise(known[max(0, best - 1) : best + 2]):
                waiting((low + high) / 2)
        return min([f for f in found.values() if f is not None], key=_cost, default=None)

    def _table(self, most_bytes: int, clock: Clock) -> ChainTable | None:
        """A table for at least that many bytes; ``None`` if there is no time to fill one.

        Limits that are close to one another share a table.
        """
        step = max(0, math.ceil(math.log(max(most_bytes, 1), _SHARED)))
        if step not in self._tables:
            most = math.ceil(_SHARED**step)
            slot_bytes = max(1, -(-most // _SLOTS))
            slots = -(-most // slot_bytes)
            table = ChainTable(self.stages.chain, slot_bytes, slots, clock.over)
            if not table.complete:
                return None
            self._tables[step] = table
        return self._tables[step]

    def _at(self, table: ChainTable | AwayTable, slots: int) -> list[tuple[Choice, Run]]:
        """The choices for that much memory of the table, and what they need on the line.

        What is made again once and then held until it is not needed any more takes less time and
        more memory than what the table means: it is another choice, and often it fits, too.
        """
        solution = table.solution(slots)
        if solution is None:
            return []
        choice = self.stages.choice(solution)
        found = []
        for each in dict.fromkeys((choice, choice[:1])):
            if each not in self._runs:
                self._runs[each] = self.problem.run(each)
            found.append((each, self._runs[each]))
        return found


def _cost(found: tuple[Choice, Run]) -> tuple[float, int]:
    return found[1].seconds, found[1].peak_bytes


def solve(problem: Problem, limits: Limits) -> Answer | None:
    """The fastest choice of the chain within the limits; ``None`` if there is none."""
    clock = Clock(limits.seconds)
    return Blocks(problem, clock).solve(limits, clock)
