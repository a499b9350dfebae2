"""Programs of which some have collectives beside other work, and some have nothing beside them.

Told what room there is for collectives beside other work, XLA:GPU may take more: a GPT of 1.3e9
parameters over two H200 compiled to 15.5 GiB, and with nothing beside them to the 13.96 that were
predicted, at 99% of its speed. So what is predicted to come near the budget has nothing beside
them, nor has what would not fit with it. The one that is chosen is compiled with it after all.
"""

from __future__ import annotations

from dataclasses import replace

from jaxmem.planner.fill import Solution
from jaxmem.runtime.compiler import Attempt, Compiler
from jaxmem.runtime.progress import Report
from jaxmem.runtime.tries import Tries

# Names of rounds.
ALONE, OVERLAPPING = "nothing beside collectives", "collectives beside other work"


class Overlaps(Tries):
    """The compiles of one budget.

    Attributes:
        overlapped: keys of the solutions that were compiled with collectives beside other work.
        reserved: until something fits, so many of the compiles that are left are for others.
    """

    reserved: int = 0

    def __init__(self, compiler: Compiler, budget: int, report: Report):
        super().__init__(compiler, budget, report)
        self.overlapped: set[frozenset] = set()

    def compile(self, name: str, limit: int, solution: Solution) -> Attempt | None:
        """Compile a solution, twice where it has room for overlaps and does not fit with them.

        ``None`` where XLA cannot compile it, which the plan, or the error, will say.
        """
        near = self.compiler.is_near(self.predicted(solution))
        reserved = 0 if self.fitting else self.reserved
        # Whatever its room is, what can be compiled only once must take the least.
        self.compiler.alone = near or self.left() - reserved < 2
        if self.compiler.alone:
            return self._recorded(name, limit, solution)
        self.overlapped.add(solution.key)
        before, attempt = (self.scale, self.closer), self._recorded(name, limit, solution)
        if attempt is not None and attempt.problem:
            return attempt
        over = attempt is None or attempt.compiled.memory.total_bytes > self.budget
        if over and self.compiler.may_take_less(solution):
            self.compiler.alone, (self.scale, self.closer) = True, before
            self.announce(solution)
            return self._recorded(f"{name}, {ALONE}", limit, solution) or attempt
        return attempt

    def overlap(self) -> None:
        """Compile the quickest that fits with overlaps, and take that where it fits, too."""
        chosen = self.best()
        if chosen.solution is None or chosen.solution.key in self.overlapped or self.left() < 1:
            return
        self.compiler.alone = False
        if not self.compiler.may_take_less(chosen.solution):
            return
        self.announce(chosen.solution)
        attempt = self.attempted(f"a program ({OVERLAPPING})", chosen.solution)
        if attempt is None:
            return
        predicted, total = chosen.predicted_bytes, attempt.compiled.memory.total_bytes
        self.note(OVERLAPPING, predicted, predicted, attempt.compiled, attempt.problem)
        if total <= self.budget and not attempt.problem:
            self.fitting[self.fitting.index(chosen)] = replace(chosen, compiled=attempt.compiled)

    def _recorded(self, name: str, limit: int, solution: Solution) -> Attempt | None:
        attempt = self.attempted(f"a program ({name})", solution)
        self.tried.add(solution.key)
        if attempt is not None:
            self.record(name, limit, attempt)
        return attempt
