"""Solve a program that is one straight line: which solver, and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxmem.planner.fill import KeptSets, Solution
from jaxmem.planner.fused import FusedLine
from jaxmem.planner.problem import Choice
from jaxmem.planner.schedule import Turn
from jaxmem.planner.solvers import milp
from jaxmem.planner.solvers.answer import Limits
from jaxmem.planner.solvers.blocks import Blocks

# A line with no more values than this is solved exactly, as a whole.
MOST_EXACT = 24
# Cuts after which the exact solver gives up and says what is open.
_MOST_CUTS = 40
# A chain has at least this many stages.
FEWEST_STAGES = 3


class LineSolver:
    """Proposes kept sets for one line of kernels.

    Args:
        line: the line.
        turn: how its turn is called in kept sets.
        on_paper: what a kept set needs.
    """

    def __init__(self, line: FusedLine, turn: Turn, on_paper: Callable[[KeptSets], Solution]):
        self.line, self.turn, self._on_paper = line, turn, on_paper
        self.blocks = Blocks(line.problem)

    def starts(self, limit_bytes: int) -> Iterator[Solution]:
        """What the solvers that apply find within ``limit_bytes``."""
        if len(self.line.problem.droppable) <= MOST_EXACT:
            answer = milp.solve(self.line.problem, Limits(limit_bytes), most_cuts=_MOST_CUTS)
            if answer is not None:
                yield self._solution(answer.choice, answer.solver)
        if len(self.blocks.stages.cuts) >= FEWEST_STAGES:
            answer = self.blocks.solve(Limits(limit_bytes))
            if answer is not None:
                yield self._solution(answer.choice, answer.solver)

    def smallest(self, limit_bytes: int) -> KeptSets | None:
        """The kept set with the smallest peak that nesting leads to, if that is below a limit."""
        if len(self.blocks.stages.cuts) < FEWEST_STAGES:
            return None
        found = self.blocks.smallest(limit_bytes)
        return None if found is None else self.line.keep_of(found[0], self.turn)

    def _solution(self, choice: Choice, solver: str) -> Solution:
        return replace(self._on_paper(self.line.keep_of(choice, self.turn)), solver=solver)
