"""What a somewhat larger budget would buy: one more search, nothing more is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmem.planner.decisions import IN_FLIGHT, Decision, Larger, Round
from jaxmem.planner.fill import Solution
from jaxmem.planner.retimed import retimed
from jaxmem.planner.search import Search
from jaxmem.runtime.compiler import Compiler
from jaxmem.targets.compiling import Compiled
from jaxmem.units import GIB

# The step is this part of what is missing to keep everything, or a GiB if that is less.
_PART = 8
_AIM = 0.985


def larger(
    compiler: Compiler,
    solution: Solution | None,
    decisions: Sequence[Decision],
    compiled: Compiled,
    rounds: Sequence[Round],
    budget_bytes: int,
) -> Larger | None:
    """What more bytes would save.

    ``None`` where the step is as written, a policy decides, or no time is left to search.

    Args:
        compiler: of the program.
        solution: the one that was chosen, ``decisions`` and ``compiled`` what became of it.
        rounds: every compile.
        budget_bytes: bytes on each device.
    """
    as_written = [r.compiled_bytes for r in rounds if r.name.startswith("keep-all")]
    missing = min([compiler.keep_all().memory.total_bytes, *as_written]) - budget_bytes
    if solution is None or missing <= 0 or compiler.policy is not None:
        return None
    if compiler.deadline.over():
        return None
    # What is searched has no slack, and its gradients are tied.
    if solution.slack_seconds or not solution.in_order:
        solution = retimed(compiler.search, solution, slack_seconds=0.0, in_order=True)
    # With less than the smallest value that is recomputed nothing can change.
    each = [d.nbytes // d.count for d in decisions if d.recomputed and d.again_seconds]
    more = min(missing, max(min(GIB, missing // _PART), min(each, default=1), 1))
    if more == missing:
        seconds = compiler.search.keep_all.seconds
    else:
        used = compiled.memory.temp_bytes
        room = (budget_bytes - compiled.memory.total_bytes + used + more) * _AIM
        limit = int(room * solution.temp_bytes / max(used, 1))
        found = _solve(compiler.search, solution, limit)
        if compiler.deadline.ran_out:
            return None
        seconds = solution.seconds if found is None else found.seconds
    return Larger(more, max(0.0, solution.seconds - seconds))


def _solve(search: Search, solution: Solution, limit_bytes: int) -> Solution | None:
    """With the same arguments in host memory, and as much of it for values."""
    found = []
    last, in_flight = solution.updates_last, solution.in_flight
    for how in dict.fromkeys([(False, IN_FLIGHT), (last, IN_FLIGHT), (last, in_flight)]):
        with search.hosting(solution.hosted, updates_last=how[0], in_flight=how[1]):
            found.append(search.solve(limit_bytes, solution.host_bytes))
    return min((s for s in found if s is not None), key=lambda s: s.cost, default=None)
