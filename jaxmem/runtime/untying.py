"""Programs in which backward iterations make gradients when the compiler likes.

Where XLA would keep activations for gradients that it puts off, these are tied to what comes next
(:mod:`jaxmem.planner.inorder`). Ties take time: a GPT of 1.3e9 parameters with its blocks in one
loop took 1.3% longer with them on an H200. And XLA does not always put gradients off: with flash
attention that GPT compiles to the same bytes without ties. So the program that is chosen is
compiled without them as well, which is taken where it takes no more than 1% more.
"""

from __future__ import annotations

from jaxmem.planner.inorder import is_tied
from jaxmem.planner.retimed import retimed
from jaxmem.runtime.exposed import exposed
from jaxmem.runtime.overlaps import Overlaps
from jaxmem.runtime.planned import Chosen
from jaxmem.runtime.tries import SAME_BYTES

# Name of the round.
UNTIED = "gradients not tied"


class Untying(Overlaps):
    """The compiles of one budget."""

    def untie(self, *, both: bool) -> None:
        """Compile the quickest that fits without ties; where that is no larger it takes its place.

        Args:
            both: both are kept, as they will be timed.
        """
        chosen = self.best()
        solution, compiler = chosen.solution, self.compiler
        if solution is None or self.left() < 1 or not is_tied(compiler.block(solution)):
            return
        free = retimed(compiler.search, solution, in_order=False)
        self.announce(free)
        pinned = compiler.search.pinned
        attempt = self.attempted(
            f"a program ({UNTIED})", free, compiler.options_of(chosen.compiled)
        )
        compiler.search.pinned = pinned  # What comes of it changes nothing else.
        if attempt is None:
            return
        predicted, total = chosen.predicted_bytes, attempt.compiled.memory.total_bytes
        self.note(UNTIED, predicted, predicted, attempt.compiled, attempt.problem)
        most = chosen.compiled.memory.total_bytes * (1 + SAME_BYTES)
        if total > min(most, self.budget) or attempt.problem:
            return
        waits = exposed(compiler.search.simulator, compiler.block(free), attempt.compiled)
        found = Chosen(free, attempt.compiled, predicted, waits)
        if both:
            self.fitting.append(found)
        elif found.cost[0] <= chosen.cost[0]:
            self.fitting[self.fitting.index(chosen)] = found
