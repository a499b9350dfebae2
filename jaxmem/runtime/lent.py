"""Plan a step whose gradients are computed in stages, each of which is lent the leaves it reads."""

from __future__ import annotations

from dataclasses import replace

from jaxmem.errors import BudgetInfeasibleError, JaxmemError, VerificationError
from jaxmem.planner.plan import Plan
from jaxmem.program.cut import Cut
from jaxmem.runtime import guard
from jaxmem.runtime.asked import Asked
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.gradients import handed_bytes, plan_first
from jaxmem.runtime.progress import Report
from jaxmem.runtime.room import check_stages, too_large
from jaxmem.runtime.staging import Pieces, lending
from jaxmem.runtime.tries import Outcome
from jaxmem.runtime.winning import check_after
from jaxmem.targets.target import Target

# How often gradients are planned again where their stages turn out to take more.
ROUNDS = 4


def lent(
    pieces: Cut,
    asked: Asked,
    compiler: Compiler,
    target: Target,
    budget_bytes: int,
    report: Report,
) -> tuple[Outcome, Pieces]:
    """What computes the gradients, and the stages in which it runs.

    Stages hand over what one program would not hold at once. Where they take more than there is,
    the gradients are planned with that much less; and where one program cannot hold all gradients
    that it makes, as if these took no memory.
    """
    check_stages(pieces)
    less, left, against = 0, ROUNDS, ""
    refused: JaxmemError | None = None
    while True:
        try:
            first = plan_first(pieces, asked, compiler, budget_bytes, report, less)
        except (BudgetInfeasibleError, VerificationError) as error:
            if refused is not None:
                raise refused from error
            if less or _is_for_more(asked.plan, budget_bytes):
                raise
            refused, less = error, -handed_bytes(pieces)
            continue
        check_after(pieces, asked, compiler, first.block, budget_bytes)
        report(f"compiling stages and {len(pieces.parts)} updates")
        options = dict(first.plan.options)
        by_rows = not against and not pieces.program.sharded
        found, lacking = lending(
            pieces, first.block, target, budget_bytes, options, by_rows=by_rows
        )
        if found is not None and not against:
            against = _against_loops(found, target)
            if against:
                continue
        if found is not None:
            return replace(first, plan=_told(first.plan, against)), found
        left -= 1
        if not left or not lacking or asked.plan is not None:
            raise refused or too_large(pieces, budget_bytes, target, first, lacking)
        less += lacking


def _is_for_more(plan: Plan | None, budget_bytes: int) -> bool:
    """Whether a plan that is followed was made for a larger budget."""
    if plan is None:
        return False
    within = plan.streamed.within_bytes if plan.streamed else 0
    return budget_bytes < (within or plan.budget_bytes)


def _against_loops(found: Pieces, target: Target) -> str:
    """Why loops must not fetch rows, after all; "" for no reason."""
    loops = [one for part, one in zip(found.cut.parts, found.parts, strict=True) if part.waiting]
    if not loops:
        return ""
    if any(one.memory.host_temp_bytes for one in loops):
        return "XLA would copy them in host memory"
    return guard.against_rows(target)


def _told(plan: Plan, against: str) -> Plan:
    if not against:
        return plan
    note = f"what loops read row by row is fetched whole: {against}"
    return replace(plan, notes=(*plan.notes, note))
