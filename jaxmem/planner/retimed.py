"""The same decisions with copies to and from the host at other times."""

from __future__ import annotations

from dataclasses import replace

from jaxmem.planner.decisions import InFlight
from jaxmem.planner.fill import Solution
from jaxmem.planner.search import Search


def retimed(
    search: Search,
    solution: Solution,
    *,
    slack_seconds: float | None = None,
    in_flight: InFlight | None = None,
) -> Solution:
    """A solution with other slack, or others in flight: see :class:`jaxmem.planner.fill.Solution`.

    What was proved of the solution is not proved of this one.
    """
    asked = replace(
        solution,
        slack_seconds=solution.slack_seconds if slack_seconds is None else slack_seconds,
        in_flight=solution.in_flight if in_flight is None else in_flight,
        bound_seconds=None,
    )
    ran = search.simulator.step(search.schedule(asked))
    return replace(asked, temp_bytes=ran.temp_bytes, seconds=ran.seconds, host_bytes=ran.host_bytes)
