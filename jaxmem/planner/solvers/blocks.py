"""Chains of blocks: the ways to keep each distinct block by MILP, combined over all by the table."""

from __future__ import annotations

from jaxmem.planner.problem import Choice, Problem, Run
from jaxmem.planner.solvers.answer import Answer, Limits
from jaxmem.planner.solvers.chain import ChainTable
from jaxmem.planner.stages import Stages

# Memory is counted in this many parts of the limit; more is exact for more and takes longer.
_SLOTS = 256
# The table knows a little more memory than there is: rounding makes it use less than it is given.
_SPARE = 1.25


class Blocks:
    """Choices of a chain of blocks for every amount of memory up to a limit."""

    def __init__(self, problem: Problem, device_bytes: int):
        self.problem, self.stages = problem, Stages(problem)
        most = int(device_bytes * _SPARE)
        self.table = ChainTable(self.stages.chain, max(1, -(-most // _SLOTS)), min(_SLOTS, most))
        self._known: dict[int, tuple[Choice, Run] | None] = {}

    def at(self, slots: int) -> tuple[Choice, Run] | None:
        """The choice for that much memory of the table, and what it needs on the line."""
        if slots not in self._known:
            solution = self.table.solution(slots)
            if solution is None:
                self._known[slots] = None
            else:
                choice = self.stages.choice(solution.visits)
                self._known[slots] = (choice, self.problem.run(choice))
        return self._known[slots]

    def solve(self, limits: Limits) -> Answer | None:
        """The fastest of them within the limits."""
        found = [self.at(slots) for slots in range(self.table.slots + 1)]
        allowed = [f for f in found if f is not None and limits.allow(f[1])]
        if not allowed:
            return None
        choice, run = min(allowed, key=lambda f: (f[1].seconds, f[1].peak_bytes))
        stages = len(self.stages.cuts)
        why = f"{stages} stages, of which {self.stages.distinct} are distinct"
        return Answer(choice, run, "MILP per block + chain DP", why)


def solve(problem: Problem, limits: Limits) -> Answer | None:
    """The fastest choice of the chain within the limits; ``None`` if there is none."""
    return Blocks(problem, limits.device_bytes).solve(limits)
