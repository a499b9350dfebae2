"""The same decisions with more time for copies to and from the host than they take."""

from __future__ import annotations

from dataclasses import replace

from jaxmem.planner.fill import Solution
from jaxmem.planner.search import Search


def with_slack(search: Search, solution: Solution, slack_seconds: float) -> Solution:
    """A solution with so many seconds for every copy of its outermost line, or with none.

    Each gets as much as turns, and the copies around it, allow. What was proved of the solution is
    not proved of this one.
    """
    asked = replace(solution, slack_seconds=slack_seconds, bound_seconds=None)
    ran = search.simulator.step(search.schedule(asked))
    return replace(asked, temp_bytes=ran.temp_bytes, seconds=ran.seconds, host_bytes=ran.host_bytes)
