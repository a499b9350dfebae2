"""Chains of blocks: ways to keep each distinct block by MILP, combined by the chain's table."""

from __future__ import annotations

import math

from jaxmem.planner.problem import Choice, Problem, Run
from jaxmem.planner.solvers.answer import Answer, Limits
from jaxmem.planner.solvers.chain import ChainTable
from jaxmem.planner.stages import Stages

# Memory is counted in this many parts of the limit; more is exact for more and takes longer.
_SLOTS = 256
# The table knows more memory than there is: rounding up makes programs use less than they may.
_SPARE = 1.15
_SHARED = 1.2


class Blocks:
    """The choices of a chain of blocks."""

    def __init__(self, problem: Problem):
        self.problem, self.stages = problem, Stages(problem)
        self._tables: dict[int, ChainTable] = {}
        self._runs: dict[Choice, Run] = {}

    def solve(self, limits: Limits) -> Answer | None:
        """The fastest choice of the chain within the limits; ``None`` if there is none."""
        found = self._largest(limits, int(limits.device_bytes * _SPARE))
        if found is None:
            return None
        why = f"{len(self.stages.cuts)} stages, of which {self.stages.distinct} are distinct"
        return Answer(*found, "MILP per block + chain DP", why)

    def smallest(self, most_bytes: int) -> tuple[Choice, Run] | None:
        """The choice with the smallest peak, of those that should need less than ``most_bytes``."""
        table = self._table(most_bytes)
        for slots in range(table.slots + 1):
            found = self._at(table, slots)
            if found is not None:
                return found
        return None

    def _largest(self, limits: Limits, most_bytes: int) -> tuple[Choice, Run] | None:
        """The choice for the most memory of the table that stays within the limits on the line.

        Stages share what is handed on and the table rounds up, so the memory of the table is not
        quite that of the line; one grows with the other.
        """
        table = self._table(most_bytes)
        low, high, best = -1, table.slots + 1, None
        while high - low > 1:
            middle = (low + high) // 2
            found = self._at(table, middle)
            if found is None or limits.allow(found[1]):
                low = middle
                if found is not None:
                    best = found if best is None else min(best, found, key=_cost)
            else:
                high = middle
        return best

    def _table(self, most_bytes: int) -> ChainTable:
        """A table for at least ``most_bytes``; limits that are close to one another share it."""
        step = max(0, math.ceil(math.log(max(most_bytes, 1), _SHARED)))
        if step not in self._tables:
            most = math.ceil(_SHARED**step)
            slot_bytes = max(1, -(-most // _SLOTS))
            slots = -(-most // slot_bytes)
            self._tables[step] = ChainTable(self.stages.chain, slot_bytes, slots)
        return self._tables[step]

    def _at(self, table: ChainTable, slots: int) -> tuple[Choice, Run] | None:
        """The choice for that much memory of the table, and what it needs on the line."""
        solution = table.solution(slots)
        if solution is None:
            return None
        choice = self.stages.choice(solution.visits)
        if choice not in self._runs:
            self._runs[choice] = self.problem.run(choice)
        run = self._runs[choice]
        if len(choice) > 1:
            once = choice[:1]
            if once not in self._runs:
                self._runs[once] = self.problem.run(once)
            simple = self._runs[once]
            if simple.peak_bytes <= run.peak_bytes and simple.seconds <= run.seconds:
                return once, simple
        return choice, run


def _cost(found: tuple[Choice, Run]) -> tuple[float, int]:
    return found[1].seconds, found[1].peak_bytes


def solve(problem: Problem, limits: Limits) -> Answer | None:
    """The fastest choice of the chain within the limits; ``None`` if there is none."""
    return Blocks(problem).solve(limits)
