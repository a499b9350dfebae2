"""Plan a step of which argument leaves wait in host memory and are updated one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxmem.errors import (
    ArgumentError,
    BudgetError,
    BudgetInfeasibleError,
    CutError,
)
from jaxmem.planner.plan import Plan
from jaxmem.program.cut import Cut, cut
from jaxmem.program.ir import Program
from jaxmem.program.joining import joinable
from jaxmem.program.parts import Part
from jaxmem.runtime import following, guard, rounds
from jaxmem.runtime.asked import Asked
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.host import host_limit, host_memory
from jaxmem.runtime.parts import Need, compile_parts
from jaxmem.runtime.progress import Report
from jaxmem.runtime.staging import Pieces, gains, in_one, in_stages, lending
from jaxmem.runtime.streamplan import outcome_of
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.target import Target
from jaxmem.units import format_budget, format_bytes

# What is fetched together: in 48 MiB at a time an H200's link gave 47.7 GB/s each way, in 192 MiB
# 48.5, in 768 MiB 46.2 and in 12 MiB 29. Of small budgets, this share.
_BUCKET_BYTES, _BUCKETS = 64 * 2**20, 32
# So many of the largest are under way at a time: one on its way to the device, one being updated
# and two on their way back keep both directions busy; or so many bytes, if that is more.
_WINDOW, _WINDOW_BYTES = 4, 2**30
# An update that fetches more, or this share of the budget, goes through its leaves by rows.
_WHOLE_BYTES, _WHOLE_SHARE = 2 * 2**30, 16
# What is lent to the gradients may take so much of the budget while they are planned, for the
# leaves of two stages: those of one that runs, and of the next.
_LENT_SHARE = 4
# How often they are planned again where their stages turn out to take more.
_ROUNDS = 4


def fit(
    program: Program,
    asked: Asked,
    compiler_of: Callable[[Program], Compiler],
    target: Target,
    budget_bytes: int,
    report: Report,
) -> Outcome:
    """A step within the budget of which leaves are streamed.

    Args:
        program: the step.
        asked: which leaves.
        compiler_of: makes the compiler of the first part.
        target: what it is compiled for.
        budget_bytes: bytes on each device.
        report: shows progress.

    Raises:
        BudgetInfeasibleError: the first part or an update does not fit.
        BudgetError: there is not enough host memory.
        CutError: the step cannot be cut for these leaves.
    """
    if program.sharded:
        raise ArgumentError(
            f"{program.name}: host= streams arguments of steps on one device; these are split "
            "over several. Leave host= out."
        )
    planned_bytes = budget_bytes
    if asked.plan is not None:
        # What it was planned for decides about stages and rows, wherever it is followed.
        planned_bytes = asked.plan.budget_bytes
        budget_bytes = min(budget_bytes, planned_bytes)
    bucket = min(_BUCKET_BYTES, planned_bytes // _BUCKETS)
    whole = min(_WHOLE_BYTES, planned_bytes // _WHOLE_SHARE)
    given = compiler_of, target, budget_bytes, report
    told = asked.plan.streamed if asked.plan else None
    joined = _joined(program, asked, target, bucket)
    first = joined is not None and (told is not None or gains(joined, target, budget_bytes))
    against = "not with this jaxlib" if told is not None and told.along else ""
    if joined is not None and first:
        try:
            return _along(joined, asked, *given)
        except _NotAlongError as error:
            against = str(error)
    if against:
        note = f"updates come after the loops that make their gradients: {against}"
        asked = replace(asked, notes=(*asked.notes, note))
    try:
        return _apart(*_by_rows(program, asked, target, bucket, whole), *given)
    except BudgetInfeasibleError as error:
        if joined is None or first:
            raise
        try:
            return _along(joined, asked, *given)
        except _NotAlongError:
            raise error from None


class _NotAlongError(Exception):
    """Updates cannot go along with the loops that make their gradients; the text says why."""


def _by_rows(
    program: Program, asked: Asked, target: Target, bucket_bytes: int, whole_bytes: int
) -> tuple[Cut, Asked]:
    """The step cut, with updates of large leaves by rows where that comes out right."""
    pieces = cut(program, asked.hosted, bucket_bytes, whole_bytes)
    against = _against_rows([part for part in pieces.parts if part.chunks], target)
    if not against:
        return pieces, asked
    note = f"leaves are fetched whole and not by rows: {against}"
    asked = replace(asked, notes=(*asked.notes, note))
    return cut(program, asked.hosted, bucket_bytes), asked


def _apart(
    pieces: Cut,
    asked: Asked,
    compiler_of: Callable[[Program], Compiler],
    target: Target,
    budget_bytes: int,
    report: Report,
) -> Outcome:
    """The step with updates that come after the loops that make their gradients."""
    _check_host(pieces, asked, target)
    compiler = compiler_of(pieces.first)
    if pieces.lent:
        first, found = _lent(pieces, asked, compiler, target, budget_bytes, report)
    else:
        first = _with_updates(pieces, asked, compiler, target, budget_bytes, report)
        report(f"compiling {len(pieces.parts)} updates")
        options = dict(first.plan.options)
        most = _window(pieces)
        plain = in_one(pieces, first.block, first.compiled, target, budget_bytes, most)
        _check_fits(pieces, plain.memory, budget_bytes, target, first)
        found = in_stages(plain, first.block, target, budget_bytes, options)
    return _outcome(first, pieces, found, budget_bytes, target, asked)


def _outcome(
    first: Outcome, pieces: Cut, found: Pieces, budget_bytes: int, target: Target, asked: Asked
) -> Outcome:
    return outcome_of(
        first,
        pieces,
        found,
        budget_bytes=budget_bytes,
        host_bytes=host_bytes(pieces),
        target=target,
        asked=asked,
    )


def _joined(program: Program, asked: Asked, target: Target, bucket_bytes: int) -> Cut | None:
    """The step cut so that updates may go along with the loops that make their gradients.

    ``None`` where none can, or a plan that is followed does not say so.
    """
    if asked.plan and asked.plan.streamed and not asked.plan.streamed.along:
        return None
    pieces = cut(program, asked.hosted, bucket_bytes, bucket_bytes)
    first = pieces.first.block
    if not joinable(first, first.outputs, pieces.parts) or pieces.sent:
        return None
    if any(op.eqn.effects for op in first.ops) or guard.against_rows(target):
        return None
    return pieces


def _along(
    pieces: Cut,
    asked: Asked,
    compiler_of: Callable[[Program], Compiler],
    target: Target,
    budget_bytes: int,
    report: Report,
) -> Outcome:
    """The step with updates that go along with the loops that make their gradients.

    Gradients that such a loop stacks up are planned as if they took no memory.

    Raises:
        _NotAlongError: it does not fit so, or XLA would copy leaves.
    """
    _check_host(pieces, asked, target)
    compiler = compiler_of(pieces.first)
    loops = joinable(pieces.first.block, pieces.first.block.outputs, pieces.parts)
    stacks = [v for made in loops.values() for v in made]
    less = -sum(v.nbytes - v.nbytes // v.aval.shape[0] for v in stacks)
    for _ in range(_ROUNDS):
        try:
            first = _first(pieces, asked, compiler, budget_bytes, report, less)
        except BudgetInfeasibleError:
            break
        report(f"compiling stages and {len(pieces.parts)} updates")
        options = dict(first.plan.options)
        found, lacking = lending(pieces, first.block, target, budget_bytes, options, joining=True)
        if found is not None and any(one.memory.host_temp_bytes for one in found.parts):
            raise _NotAlongError("XLA would copy leaves in host memory")
        if found is not None:
            return _outcome(first, pieces, found, budget_bytes, target, asked)
        if not lacking or asked.plan is not None:
            break
        less += lacking
    raise _NotAlongError("in them they do not fit the budget")


def _against_rows(parts: Sequence[Part], target: Target) -> str:
    """Why updates must not go by rows, after all; "" for no reason."""
    if not parts:
        return ""
    # Such a copy of a leaf in host memory went at 5 GB/s on an H200.
    if any(one.memory.host_temp_bytes for one in compile_parts(parts, target)):
        return "XLA would copy them in host memory"
    return guard.against_rows(target)


def _lent(
    pieces: Cut,
    asked: Asked,
    compiler: Compiler,
    target: Target,
    budget_bytes: int,
    report: Report,
) -> tuple[Outcome, Pieces]:
    """What computes the gradients, and the stages in which it runs.

    Stages hand over what one program would not hold at once. Where they take more than there is,
    the gradients are planned with that much less.
    """
    _check_stages(pieces)
    less, left, against = 0, _ROUNDS, ""
    while True:
        first = _first(pieces, asked, compiler, budget_bytes, report, less)
        report(f"compiling stages and {len(pieces.parts)} updates")
        options = dict(first.plan.options)
        found, lacking = lending(
            pieces, first.block, target, budget_bytes, options, by_rows=not against
        )
        if found is not None and not against:
            against = _against_loops(found, target)
            if against:
                continue
        if found is not None:
            return replace(first, plan=_told(first.plan, against)), found
        left -= 1
        if not left or not lacking or asked.plan is not None:
            raise _too_large(pieces, budget_bytes, target, first, lacking)
        less += lacking


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


def _first(
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
    more = -less
    if pieces.lent:
        more += pieces.lent_bytes - min(pieces.lent_bytes, budget_bytes // _LENT_SHARE)
    try:
        if asked.plan is None:
            found = rounds.fit(compiler, budget_bytes + more, report, host_bytes=0)
        else:
            plan = replace(asked.plan, hosted=(), streamed=None, host_bytes=0)
            found = following.follow(compiler, plan, budget_bytes + more, report)
    except BudgetInfeasibleError as error:
        if not more:
            raise
        # Of a larger budget what is lent may take more, too.
        beside = error.smallest_bytes - pieces.lent_bytes + less
        smallest = min(beside * _LENT_SHARE // (_LENT_SHARE - 1) + 1, error.smallest_bytes + less)
        raise BudgetInfeasibleError(
            f"no plan fits budget={format_bytes(budget_bytes)}: beside the arguments that host= "
            f"names {pieces.program.name} takes {format_bytes(smallest)}, as far as was found.\n"
            f'  Use budget="{format_budget(smallest)}".',
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
            holders=error.holders,
        ) from error
    return replace(found, plan=replace(found.plan, budget_bytes=budget_bytes))


def _with_updates(
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
        return _first(pieces, asked, compiler, budget_bytes, report)
    except BudgetInfeasibleError as error:
        kept = [] if asked.plan is not None else compiler.least().kept
        if not kept:
            raise
        smallest, solution = min(kept, key=lambda found: found[0])
        compiled, most = compiler.compile(solution), _window(pieces)
        plain = in_one(pieces, compiler.block(solution), compiled, target, smallest, most)
        needed = max((need.least_bytes for need in plain.memory), default=0)
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


def _check_stages(pieces: Cut) -> None:
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


def _too_large(
    pieces: Cut, budget_bytes: int, target: Target, first: Outcome, lacking: int
) -> BudgetInfeasibleError:
    largest = max(pieces.lent, key=lambda v: v.nbytes)
    number = pieces.program.block.inputs.index(largest) - len(pieces.program.consts)
    smallest = budget_bytes + (lacking or budget_bytes // _LENT_SHARE + largest.nbytes)
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


def _window(pieces: Cut) -> int:
    """Device memory that copies may take where there is more than enough."""
    largest = max((part.fetched_bytes for part in pieces.parts), default=0)
    return max(_WINDOW * largest, _WINDOW_BYTES)


def _check_host(pieces: Cut, asked: Asked, target: Target) -> None:
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
    return hosted + min(hosted, _window(pieces))


def _check_fits(
    pieces: Cut, memory: Sequence[Need], budget_bytes: int, target: Target, first: Outcome
) -> None:
    largest = max(memory, key=lambda need: need.least_bytes, default=None)
    if largest is None or largest.least_bytes <= budget_bytes:
        return
    part = pieces.parts[memory.index(largest)]
    program = pieces.program
    leaf = program.block.inputs.index(part.leaves[0]) - len(program.consts) if part.leaves else 0
    count = len(part.leaves)
    together = f" and {count - 1} more at once" if count > 1 else ""
    smallest = largest.least_bytes
    raise BudgetInfeasibleError(
        f"no plan fits budget={format_bytes(budget_bytes)} on {target.name}: updating "
        f"{program.arguments[leaf].path}{together} takes {format_bytes(largest.way_bytes)} beside "
        f"{format_bytes(largest.beside_bytes)} of parameters, gradients and temporaries.\n"
        f'  Use budget="{format_budget(smallest)}", or smaller leaves: an array whose '
        "rows need each other, or what meets in one operation, is fetched at once.",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
        holders=first.plan.holders,
    )
