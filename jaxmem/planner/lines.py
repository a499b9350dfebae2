"""Solve a program that is one straight line: which solver, and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxmem.planner.fill import KeptSets, Solution
from jaxmem.planner.fused import FusedLine
from jaxmem.planner.schedule import Keep, Turn
from jaxmem.planner.solvers import milp
from jaxmem.planner.solvers.answer import Answer, Clock, Limits
from jaxmem.planner.solvers.auto import FEWEST_STAGES, MOST_EXACT
from jaxmem.planner.solvers.blocks import Blocks

# Cuts after which the exact solver gives up and says what is open.
_MOST_CUTS = 40


class LineSolver:
    """Proposes kept sets for one line of kernels.

    Args:
        line: the line.
        turn: how its turn is called in kept sets.
        on_paper: what a kept set needs, with some of it offloaded.
        clock: when its time is over the solvers stop at what they have.
    """

    def __init__(
        self,
        line: FusedLine,
        turn: Turn,
        on_paper: Callable[[KeptSets, Keep], Solution],
        clock: Clock,
    ):
        self.line, self.turn, self._on_paper = line, turn, on_paper
        self.clock = clock
        self.blocks = Blocks(line.problem, clock)

    def starts(self, limit_bytes: int) -> Iterator[Solution]:
        """What the solvers that apply find within ``limit_bytes``."""
        if len(self.line.problem.droppable) <= MOST_EXACT:
            limits = Limits(limit_bytes, seconds=self.clock.left())
            answer = milp.solve(self.line.problem, limits, most_cuts=_MOST_CUTS)
            if answer is not None:
                count = len(self.line.problem.droppable)
                why = f"{count} values can be dropped, few enough for MILP: {answer.why}"
                yield replace(self._solution(answer, why), bound_seconds=answer.bound_seconds)
        if len(self.blocks.stages.cuts) >= FEWEST_STAGES:
            answer = self.blocks.solve(Limits(limit_bytes), self.clock)
            if answer is not None:
                yield self._solution(answer, f"a chain of {answer.why}")

    def offloading(self, limit_bytes: int, host_bytes: int) -> Solution | None:
        """What the solver for chains finds if values may also wait in host memory."""
        if len(self.blocks.stages.cuts) < FEWEST_STAGES:
            return None
        answer = self.blocks.solve(Limits(limit_bytes, host_bytes), self.clock)
        if answer is None or not answer.choice[0].offload:
            return None
        return self._solution(answer, f"a chain of {answer.why}, and host memory")

    def smallest(self, limit_bytes: int) -> KeptSets | None:
        """The kept set with the smallest peak that nesting leads to, if that is below a limit."""
        if len(self.blocks.stages.cuts) < FEWEST_STAGES:
            return None
        found = self.blocks.smallest(limit_bytes, self.clock)
        return None if found is None else self.line.keep_of(found[0], self.turn)

    def _solution(self, answer: Answer, why: str) -> Solution:
        keep = self.line.keep_of(answer.choice, self.turn)
        paper = self._on_paper(keep, self.line.offload_of(answer.choice, self.turn))
        return replace(paper, solver=answer.solver, why=why)
