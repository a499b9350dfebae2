"""The same decisions with copies to and from the host, or gradients, at other times."""

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
    in_order: bool | None = None,
) -> Solution:
    """A solution with other slack, others in flight or gradients tied or not.

    See :class:`jaxmem.planner.fill.Solution`.

    What was proved of the solution is not proved of this one.
    """
    asked = replace(
        solution,
        slack_seconds=solution.slack_seconds if slack_seconds is None else slack_seconds,
        in_flight=solution.in_flight if in_flight is None else in_flight,
        in_order=solution.in_order if in_order is None else in_order,
        bound_seconds=None,
    )
    ran = search.simulator.step(search.schedule(asked))
    return replace(asked, temp_bytes=ran.temp_bytes, seconds=ran.seconds, host_bytes=ran.host_bytes)
