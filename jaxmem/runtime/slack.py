"""Programs whose copies to and from the host have more time than they take.

XLA:GPU's scheduler goes through a program from its end, and takes every copy for some 5 ms,
whatever its bytes. Where all that is left to put in order waits for a copy that has less room than
that, it gives up on hiding it and starts all copies there at once, too late. A copy of 1.2 ms that
a schedule starts 6 ms before its value is needed is hidden, as is one that may land that late: a
GPT of 1.3e9 parameters in 30% of its memory waits 62 ms of a step as such copies are placed just in
time, and 23 with slack (jax 0.11.2, table rates of an H100, as the compiled program is played
through). What is on the way longer takes room, and other lifetimes are packed otherwise: with 5 ms
XLA lays the same bytes of that GPT out in 25.6 GiB, and with 4 or 6 ms in 20.1. So slack is given
last, to the program that is chosen, and kept where it compiles to what fits and is quicker.
"""

from __future__ import annotations

from dataclasses import replace

from jaxmem.planner.fill import Solution
from jaxmem.planner.search import Search
from jaxmem.runtime.overlaps import Overlaps

# Seconds that are tried, until one fits and is quicker.
SLACKS = (6e-3, 5e-3, 4e-3)
# Less than this share of a step is not worth a compile.
_WORTH_IT = 0.01


class Slack(Overlaps):
    """The compiles of one budget."""

    def loosen(self) -> None:
        """Compile the quickest that fits with slack for its copies, and add it where it fits."""
        chosen, scale, ends = self.best(), self.scale, self.ends
        solution, waits = chosen.solution, chosen.exposed.compiled_seconds
        if solution is None or waits is None or waits < _WORTH_IT * chosen.cost[0]:
            return
        if not any(op.transfer for op in self.compiler.block(solution).ops):
            return  # All copies are in loops, beside whole iterations.
        for seconds in SLACKS:
            loosened = with_slack(self.compiler.search, solution, seconds)
            if self.left() < 1 or self.best() is not chosen:
                return
            if self.predicted(loosened) <= self.budget:
                self.announce(loosened)
                self.compile(f"{1e3 * seconds:g} ms a copy", loosened.temp_bytes, loosened)
                # How it is packed says nothing about other programs.
                self.scale, self.ends = scale, ends


def with_slack(search: Search, solution: Solution, slack_seconds: float) -> Solution:
    """The same decisions with so many seconds for every copy, where there are as many."""
    asked = replace(solution, slack_seconds=slack_seconds)
    ran = search.simulator.step(search.schedule(asked))
    return replace(asked, temp_bytes=ran.temp_bytes, seconds=ran.seconds)
