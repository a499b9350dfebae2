"""Programs of which few copies are on the way at once, and then more as far as that fits.

The smallest programs have no copy on its way beside anything else outside their loops, whose copies
are an iteration ahead: what is on its way takes room, and XLA:GPU starts copies back later than a
schedule would, so that less is there at the peak than on paper. What room the budget leaves the
chosen program goes to copies. A GPT of 1.3e9 parameters over four absent H200 with rates that were
measured on them (jax 0.11.2), with all its copies to the host and so many of the largest back on
their way:

====  =========  ============  ===========
back  predicted  compiled GiB  ms, played
====  =========  ============  ===========
   0       5.08          5.08          579
   2       5.83          5.66          553
   4       6.21          5.82          560
====  =========  ============  ===========
"""

from __future__ import annotations

from jaxmem.planner.decisions import IN_FLIGHT
from jaxmem.planner.fill import Solution
from jaxmem.planner.retimed import retimed
from jaxmem.runtime.order import order_of
from jaxmem.runtime.untying import Untying

# To the host and back; of those that fit on paper the quickest are compiled.
_TRIED = (IN_FLIGHT, (4, 2), (4, 1), (4, 0), (2, 2), (1, 1))
_MOST = 3


class Sooner(Untying):
    """The compiles of one budget."""

    def sooner(self) -> None:
        """Compile what fits with few copies on their way with more of them, too."""
        chosen = self.best().solution
        if chosen is None or chosen.in_flight == IN_FLIGHT:
            return
        for solution in self._with_more(chosen)[:_MOST]:
            if self.left() > 0:
                self.announce(solution)
                sent, fetched = solution.in_flight
                self.compile(f"{sent} copies out, {fetched} back", solution.temp_bytes, solution)

    def _with_more(self, chosen: Solution) -> list[Solution]:
        """Those that are predicted to fit and to be quicker, the quickest first."""
        found: list[Solution] = []
        orders = [order_of(self.compiler.block(chosen))]
        for most in _TRIED:
            more = all(a >= b for a, b in zip(most, chosen.in_flight, strict=True))
            if not more or most == chosen.in_flight or self.compiler.deadline.over():
                continue
            solution = retimed(self.compiler.search, chosen, in_flight=most)
            # What is predicted to be over may fit, and is not what a user should be told.
            fits = self.predicted(solution) <= self.budget
            order = order_of(self.compiler.block(solution))
            if fits and solution.seconds < chosen.seconds and order not in orders:
                orders.append(order)
                found.append(solution)
        found = [s for s in found if s.key not in self.tried]
        return sorted(found, key=lambda s: s.cost)
