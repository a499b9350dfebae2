"""Plan the first part of a cut step: what computes the gradients, beside what is lent to it."""

from __future__ import annotations

from dataclasses import replace

from jaxmem.errors import BudgetInfeasibleError, VerificationError
from jaxmem.planner.plan import Plan
from jaxmem.program.cut import Cut
from jaxmem.program.ir import Value
from jaxmem.runtime import following, rounds
from jaxmem.runtime.asked import Asked
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.progress import Report
from jaxmem.runtime.room import LENT_SHARE, window
from jaxmem.runtime.staging import in_one
from jaxmem.runtime.streamplan import with_rounding
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.target import Target
from jaxmem.units import format_budget, format_bytes


def lent_beyond(pieces: Cut, budget_bytes: int) -> int:
    """Bytes that lent leaves take while all are there, beyond what they may take of the budget."""
    return pieces.lent_bytes - min(pieces.lent_bytes, budget_bytes // LENT_SHARE)


def handed_bytes(pieces: Cut) -> int:
    """Bytes of gradients and whatever else the first part makes for updates."""
    read = {v for part in pieces.parts for v in part.reads}
    made = {v for v in pieces.first.block.outputs if isinstance(v, Value)}
    return sum(v.nbytes for v in made & read)


def plan_first(
    pieces: Cut,
    asked: Asked,
    compiler: Compiler,
    budget_bytes: int,
    report: Report,
    less: int = 0,
) -> Outcome:
    """What computes the gradients, planned; leaves that are lent to it do not count.

    It is planned as one program, which takes all of them at once, and then run in stages, of which
    each takes the few that it reads.
    """
    more = lent_beyond(pieces, budget_bytes) - less
    try:
        if asked.plan is None:
            found = rounds.fit(compiler, budget_bytes + more, report, host_bytes=0)
        else:
            plan = replace(asked.plan, hosted=(), streamed=None, host_bytes=0)
            found = _followed(compiler, plan, budget_bytes, more, report)
    except BudgetInfeasibleError as error:
        if not more:
            raise
        # Of a larger budget what is lent may take more, too.
        beside = error.smallest_bytes - pieces.lent_bytes + less
        smallest = min(beside * LENT_SHARE // (LENT_SHARE - 1) + 1, error.smallest_bytes + less)
        raise BudgetInfeasibleError(
            f"no plan fits budget={format_bytes(budget_bytes)}: beside the arguments that host= "
            f"names {pieces.program.name} takes {format_bytes(smallest)}, as far as was found.\n"
            f'  Use budget="{format_budget(smallest)}".',
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
            holders=error.holders,
        ) from error
    return replace(found, plan=replace(found.plan, budget_bytes=budget_bytes))


def _followed(
    compiler: Compiler, plan: Plan, budget_bytes: int, more: int, report: Report
) -> Outcome:
    """The first part by a plan made before, with ``more`` for what is lent to it."""
    try:
        return following.follow(compiler, plan, budget_bytes + more, report, lent=more > 0)
    except VerificationError as error:
        if budget_bytes >= plan.budget_bytes:
            raise
        raise VerificationError(
            f"{plan.function}: the plan was made for budget={format_bytes(plan.budget_bytes)} and "
            f"does not fit {format_bytes(budget_bytes)}. Plan again."
        ) from error


def plan_with_updates(
    pieces: Cut,
    asked: Asked,
    compiler: Compiler,
    target: Target,
    budget_bytes: int,
    report: Report,
) -> Outcome:
    """What computes the gradients; where it does not fit, the error counts the updates as well.

    Raises:
        BudgetInfeasibleError: it does not fit.
    """
    try:
        return plan_first(pieces, asked, compiler, budget_bytes, report)
    except BudgetInfeasibleError as error:
        kept = [] if asked.plan is not None else compiler.least().kept
        if not kept:
            raise
        smallest, solution = min(kept, key=lambda found: found[0])
        options = compiler.least_options(solution)
        compiled, most = compiler.compile(solution, options=options), window(pieces)
        plain = in_one(pieces, compiler.block(solution), compiled, target, smallest, most)
        needed = max((need.least_bytes for need in plain.memory), default=0)
        needed = with_rounding(plain, max(needed, error.smallest_bytes), target)
        if needed <= error.smallest_bytes:
            raise
        raise BudgetInfeasibleError(
            f"no plan fits budget={format_bytes(budget_bytes)} on {target.name}: what computes the "
            f"gradients takes {format_bytes(error.smallest_bytes)}, and the largest update beside "
            f'it {format_bytes(needed)}.\n  Use budget="{format_budget(needed)}".',
            budget_bytes=budget_bytes,
            smallest_bytes=needed,
            holders=error.holders,
        ) from error
