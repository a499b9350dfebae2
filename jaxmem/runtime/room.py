"""Whether a step that is cut has the room it needs: on its host, and beside each update."""

from __future__ import annotations

from jaxmem.errors import BudgetError, BudgetInfeasibleError, CutError
from jaxmem.program.cut import Cut
from jaxmem.runtime.asked import Asked
from jaxmem.runtime.host import host_limit, host_memory
from jaxmem.runtime.staging import Pieces
from jaxmem.runtime.streamplan import with_rounding
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.target import Target
from jaxmem.units import format_budget, format_bytes

# So many of the largest are under way at a time: one on its way to the device, one being updated
# and two on their way back keep both directions busy; or so many bytes, if that is more.
_WINDOW, _WINDOW_BYTES = 4, 2**30
# What is lent to the gradients may take so much of the budget while they are planned, for the
# leaves of two stages: those of one that runs, and of the next.
LENT_SHARE = 4


def window(pieces: Cut) -> int:
    """Device memory that copies may take where there is more than enough."""
    largest = max((part.fetched_bytes for part in pieces.parts), default=0)
    return max(_WINDOW * largest, _WINDOW_BYTES)


def check_host(pieces: Cut, asked: Asked, target: Target) -> None:
    """Check that what waits fits host memory, with what is copied back before the old is given up.

    Raises:
        BudgetError: it does not.
    """
    nbytes = host_bytes(pieces)
    allowed = host_memory(target, asked.host_bytes)
    if nbytes > allowed:
        raise BudgetError(
            f"{pieces.program.name} would keep {format_bytes(nbytes)} in host memory, and there "
            f"are {format_bytes(allowed)} for each device of {target.name}. Name fewer arguments "
            f"in host=, or {_more_host(nbytes, target)}."
        )


def _more_host(nbytes: int, target: Target) -> str:
    """How to allow so much host memory: there may be more than is taken unless it is asked for."""
    if nbytes <= host_limit(target):
        return "allow more with host_budget="
    needed = -(-nbytes // 2**30) * 2**30 * target.devices_per_host
    if min(target.host_bytes, needed) == needed:
        return f"plan for one whose processes may pin more: pinned_host_bytes={needed}"
    return "plan for one with more host memory"


def host_bytes(pieces: Cut) -> int:
    """Host memory of a step: the leaves, and room to write new ones before the old are given up."""
    hosted = pieces.program.host_bytes(pieces.hosting)
    return hosted + min(hosted, window(pieces))


def check_fits(
    pieces: Cut, plain: Pieces, budget_bytes: int, target: Target, first: Outcome
) -> None:
    """Check that each update fits beside what is there.

    Raises:
        BudgetInfeasibleError: one does not.
    """
    memory = plain.memory
    largest = max(memory, key=lambda need: need.least_bytes, default=None)
    if largest is None or largest.least_bytes <= budget_bytes:
        return
    part = pieces.parts[memory.index(largest)]
    paths = pieces.paths_of(part)
    named = paths[0] if paths else pieces.written.arguments[0].path
    count = len(paths)
    together = f" and {count - 1} more at once" if count > 1 else ""
    smallest = with_rounding(plain, largest.least_bytes, target)
    raise BudgetInfeasibleError(
        f"no plan fits budget={format_bytes(budget_bytes)} on {target.name}: updating "
        f"{named}{together} takes {format_bytes(largest.way_bytes)} beside "
        f"{format_bytes(largest.beside_bytes)} of parameters, gradients and temporaries.\n"
        f'  Use budget="{format_budget(smallest)}", or smaller leaves: an array whose '
        "rows need each other, or what meets in one operation, is fetched at once.",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
        holders=first.plan.holders,
    )


def check_stages(pieces: Cut) -> None:
    """Check that what reads lent leaves may run in stages.

    Raises:
        CutError: it may not.
    """
    first, consts = next(iter(pieces.lent.values())), len(pieces.program.consts)
    path = pieces.program.arguments[pieces.program.block.inputs.index(first) - consts].path
    if pieces.sent:
        number = next(n for n, v in pieces.hosted_results if v in pieces.sent)
        raise CutError(
            f"{pieces.program.name} cannot keep {path} in host memory beside "
            f"{pieces.program.results[number].path}: that result needs nothing of what waits "
            "there, and would be on the device until the end. Leave its argument out of host=."
        )
    effect = next((op for op in pieces.first.block.ops if op.eqn.effects), None)
    if effect is not None:
        raise CutError(
            f"{pieces.program.name} cannot keep {path} in host memory: it is read by what computes "
            f"the gradients, which would run in stages, and {effect.name} has an effect. Leave "
            "that leaf out of host=, or the effect."
        )


def too_large(
    pieces: Cut, budget_bytes: int, target: Target, first: Outcome, lacking: int
) -> BudgetInfeasibleError:
    largest = max(pieces.lent, key=lambda v: v.nbytes)
    number = pieces.program.block.inputs.index(largest) - len(pieces.program.consts)
    smallest = budget_bytes + (lacking or budget_bytes // LENT_SHARE + largest.nbytes)
    return BudgetInfeasibleError(
        f"no plan fits budget={format_bytes(budget_bytes)} on {target.name}: no number of stages "
        f"leaves room for the arguments that each reads. The largest of them is "
        f"{pieces.program.arguments[number].path} ({format_bytes(largest.nbytes)}), and one array "
        f"is fetched at once.\n"
        f'  Try budget="{format_budget(smallest)}", or name fewer arguments in host=.',
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
        holders=first.plan.holders,
    )
