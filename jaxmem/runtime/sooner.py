"""Programs that fetch from host memory where that is needed, and then earlier as far as that fits.

The smallest programs fetch nothing early: what is on its way takes room, and XLA:GPU starts such
copies later than a schedule would, so less of it is there at the peak than on paper. What room the
budget leaves the chosen one goes to earlier copies. A GPT of 1.3e9 parameters over four absent H200
with rates that were measured on them (jax 0.11.2), with so many of the largest copies on their way:

====  =========  ============  ===========
most  predicted  compiled GiB  ms a step
====  =========  ============  ===========
   0       5.08          5.08          579
   2       5.83          5.66          553
   4       6.21          5.82          560
====  =========  ============  ===========
"""

from __future__ import annotations

from jaxmem.planner.decisions import PREFETCH
from jaxmem.planner.retimed import retimed
from jaxmem.runtime.overlaps import Overlaps


class Sooner(Overlaps):
    """The compiles of one budget."""

    def sooner(self) -> None:
        """Compile what fits with copies from the host as late as can be with earlier ones, too."""
        chosen = self.best()
        solution = chosen.solution
        if solution is None or solution.prefetch:
            return
        for prefetch in (PREFETCH, PREFETCH // 2, 1):
            earlier = retimed(self.compiler.search, solution, prefetch=prefetch)
            # What is predicted to be over may fit, and is not what a user should be told.
            over = self.predicted(earlier) > self.budget
            if self.left() > 0 and not over and earlier.seconds < solution.seconds:
                self.announce(earlier)
                self.compile(f"{prefetch} copies on their way", earlier.temp_bytes, earlier)
