"""Plan a step of which argument leaves wait in host memory and are updated one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxmem.errors import BudgetError, BudgetInfeasibleError, CutError, JaxmemError
from jaxmem.program.cut import Cut, cut
from jaxmem.program.ir import Program
from jaxmem.program.joining import joinable
from jaxmem.program.parts import Part
from jaxmem.runtime import guard
from jaxmem.runtime.asked import Asked, check_layouts
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.gradients import lent_beyond, plan_first, plan_with_updates
from jaxmem.runtime.lent import ROUNDS, lent
from jaxmem.runtime.parts import compile_parts
from jaxmem.runtime.progress import Report
from jaxmem.runtime.room import check_fits, check_host, host_bytes, window
from jaxmem.runtime.staging import Pieces, gains, in_one, in_stages, lending
from jaxmem.runtime.streamplan import RoundedUpError, outcome_of
from jaxmem.runtime.tries import Outcome
from jaxmem.runtime.winning import check_after, check_before
from jaxmem.targets.target import Target
from jaxmem.units import format_budget, format_bytes

# What is fetched together: in 48 MiB at a time an H200's link gave 47.7 GB/s each way, in 192 MiB
# 48.5, in 768 MiB 46.2 and in 12 MiB 29. Of small budgets, this share.
_BUCKET_BYTES, _BUCKETS = 64 * 2**20, 32
# An update that fetches more, or this share of the budget, goes through its leaves by rows.
_WHOLE_BYTES, _WHOLE_SHARE = 2 * 2**30, 16
# So many budgets are tried for an error to name, larger by this share where nothing tells by how
# much.
_TRIES, _MORE_SHARE = 6, 6
_TRIES_ROUNDED = 2


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
        NotQuickerError: it takes longer than ``asked`` wants it to.
    """
    planned_bytes = budget_bytes
    if asked.plan is not None:
        # What it was planned for decides about stages and rows, wherever it is followed.
        planned_bytes = asked.plan.budget_bytes
        budget_bytes = min(budget_bytes, planned_bytes)
    given = compiler_of, target
    if asked.plan is not None:
        told = asked.plan.streamed
        within = min(budget_bytes, told.within_bytes or budget_bytes) if told else budget_bytes
        asked = replace(asked, given_out_bytes=budget_bytes)
        found = _fit(program, asked, planned_bytes, *given, within, report)
        return replace(found, plan=replace(found.plan, budget_bytes=budget_bytes))
    try:
        return _in_blocks(program, asked, *given, budget_bytes, report)
    except RoundedUpError as error:
        cause = error
    # The time that takes is only worth it where nothing else is tried.
    verified, smallest = False, budget_bytes + cause.nbytes
    for _ in range(_TRIES_ROUNDED if math.isinf(asked.quicker_than) else 0):
        try:
            _in_blocks(program, asked, *given, smallest, report)
        except RoundedUpError as error:
            smallest += error.nbytes
        except JaxmemError:
            break
        else:
            verified = True
            break
    raise BudgetInfeasibleError(
        f"no plan fits budget={format_bytes(budget_bytes)} on {target.name}: XLA's allocator gives "
        f"out larger blocks than are asked for, as arrays of {program.name} come and go in many "
        f"sizes, and would give out {format_bytes(cause.nbytes)} too much.\n"
        f'  {"Use" if verified else "Try"} budget="{format_budget(smallest)}", or name fewer '
        "arguments in host=.",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
    ) from cause


def _in_blocks(
    program: Program,
    asked: Asked,
    compiler_of: Callable[[Program], Compiler],
    target: Target,
    budget_bytes: int,
    report: Report,
) -> Outcome:
    """The step planned in less than the budget where XLA's allocator adds to what it takes.

    Raises:
        RoundedUpError: that is no help; by how much it was too much at least.
    """
    asked, less = replace(asked, given_out_bytes=budget_bytes), 0
    least = math.inf
    for _ in range(ROUNDS):
        given = compiler_of, target, budget_bytes - less, report
        try:
            found = _fit(program, asked, budget_bytes, *given)
        except RoundedUpError as error:
            if error.nbytes >= least:
                break
            least = error.nbytes
            less += error.nbytes
        except BudgetInfeasibleError:
            if not less:
                raise
            break
        else:
            return replace(found, plan=replace(found.plan, budget_bytes=budget_bytes))
    raise RoundedUpError(int(least))


def _fit(
    program: Program,
    asked: Asked,
    planned_bytes: int,
    compiler_of: Callable[[Program], Compiler],
    target: Target,
    budget_bytes: int,
    report: Report,
) -> Outcome:
    """The same; what it is planned for decides about sizes.

    Raises:
        RoundedUpError: XLA's allocator would give out more than the budget.
    """
    bucket = min(_BUCKET_BYTES, planned_bytes // _BUCKETS)
    whole = min(_WHOLE_BYTES, planned_bytes // _WHOLE_SHARE)
    given = compiler_of, target, budget_bytes, report
    if program.sharded:
        # Rows are those of a device's part only where nothing else of the update is split.
        check_layouts(program, asked)
        return _apart(cut(program, asked.hosted, bucket), asked, *given)
    told = asked.plan.streamed if asked.plan else None
    kept = told is not None and told.kept_bytes > 0
    joined = _joined(program, asked, target, bucket, keeping=kept)
    first = joined is not None and (told is not None or gains(joined, target, budget_bytes))
    against = "not with this jaxlib" if told is not None and (told.along or kept) else ""
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
        # Ways that take less of the device, and more time.
        ways = [joined] if joined is not None and not first else []
        if told is None and (keeping := _joined(program, asked, target, bucket, keeping=True)):
            ways.append(keeping)
        return _in_loops(ways, asked, *given, error)


def _in_loops(
    ways: Sequence[Cut],
    asked: Asked,
    compiler_of: Callable[[Program], Compiler],
    target: Target,
    budget_bytes: int,
    report: Report,
    error: BudgetInfeasibleError,
) -> Outcome:
    """The first of these ways that fits, with updates, or gradients sent away, in the loops.

    Raises:
        BudgetInfeasibleError: none does; ``error``, or one that names a smaller budget.
    """
    smallest = error.smallest_bytes
    for way in ways:
        try:
            return _along(way, asked, compiler_of, target, budget_bytes, report)
        except _NotAlongError as against:
            smallest = _smaller(smallest, against, way, asked, compiler_of, target, report)
        except BudgetError as against:
            error.add_note(f"With gradients in host memory as well: {against}")
    if smallest == error.smallest_bytes:
        raise error
    raise BudgetInfeasibleError(
        f"no plan fits budget={format_bytes(budget_bytes)}: beside the arguments that host= names "
        f"{ways[0].program.name} takes {format_bytes(smallest)}, with updates in the loops that "
        f'make their gradients.\n  Use budget="{format_budget(smallest)}".',
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
        holders=error.holders,
    ) from error


class _NotAlongError(Exception):
    """Updates cannot go along with the loops that make their gradients; the text says why.

    Attributes:
        smallest_bytes: a budget in which they might; 0 if that is not known.
    """

    def __init__(self, why: str, smallest_bytes: int = 0):
        super().__init__(why)
        self.smallest_bytes = smallest_bytes


def _smaller(
    smallest: int,
    against: _NotAlongError,
    way: Cut,
    asked: Asked,
    compiler_of: Callable[[Program], Compiler],
    target: Target,
    report: Report,
) -> int:
    """The smaller of two budgets, where updates that go along with loops do fit the second."""
    tried = 0
    for _ in range(_TRIES):
        if not tried < against.smallest_bytes < smallest:
            break
        tried = against.smallest_bytes
        inside = replace(asked, given_out_bytes=tried)
        try:
            _along(way, inside, compiler_of, target, tried, report)
        except _NotAlongError as error:
            against = error
        except RoundedUpError as error:
            against = _NotAlongError("XLA's allocator adds to it", tried + error.nbytes)
        else:
            return tried
    return smallest


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
    check_host(pieces, asked, target)
    compiler = compiler_of(pieces.first)
    room = budget_bytes + lent_beyond(pieces, budget_bytes)
    check_before(pieces, asked, compiler, room, budget_bytes)
    if pieces.lent:
        first, found = lent(pieces, asked, compiler, target, budget_bytes, report)
    else:
        first = plan_with_updates(pieces, asked, compiler, target, budget_bytes, report)
        check_after(pieces, asked, compiler, first.block, budget_bytes)
        report(f"compiling {len(pieces.parts)} updates")
        options = dict(first.plan.options)
        most = window(pieces)
        plain = in_one(pieces, first.block, first.compiled, target, budget_bytes, most)
        check_fits(pieces, plain, budget_bytes, target, first)
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


def _joined(
    program: Program, asked: Asked, target: Target, bucket_bytes: int, *, keeping: bool = False
) -> Cut | None:
    """The step cut so that updates may go along with the loops that make their gradients.

    ``None`` where none can, or a plan that is followed does not say so; ``keeping``: stacks of
    gradients that all updates wait for go to host memory in these loops, and back afterwards.
    """
    told = asked.plan.streamed if asked.plan else None
    if told is not None and not told.along and not told.kept_bytes:
        return None
    try:
        pieces = cut(program, asked.hosted, bucket_bytes, bucket_bytes, keeping=keeping)
    except CutError:
        if keeping:
            return None
        raise
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
    check_host(pieces, asked, target)
    compiler = compiler_of(pieces.first)
    loops = joinable(pieces.first.block, pieces.first.block.outputs, pieces.parts)
    stacks = [v for made in loops.values() for v in made]
    less, smallest = -sum(v.nbytes - v.nbytes // v.aval.shape[0] for v in stacks), 0
    room = budget_bytes + lent_beyond(pieces, budget_bytes) - less
    check_before(pieces, asked, compiler, room, budget_bytes, joining=True)
    for _ in range(ROUNDS):
        try:
            first = plan_first(pieces, asked, compiler, budget_bytes, report, less)
        except BudgetInfeasibleError as error:
            smallest = error.smallest_bytes
            break
        check_after(pieces, asked, compiler, first.block, budget_bytes, joining=True)
        report(f"compiling stages and {len(pieces.parts)} updates")
        options = dict(first.plan.options)
        found, lacking = lending(pieces, first.block, target, budget_bytes, options, joining=True)
        if found is not None and any(one.memory.host_temp_bytes for one in found.parts):
            raise _NotAlongError("XLA would copy leaves in host memory")
        if found is not None:
            return _outcome(first, pieces, found, budget_bytes, target, asked)
        # Loops that had to be split to fit take no updates along: with more room they may.
        smallest = budget_bytes + (lacking or budget_bytes // _MORE_SHARE)
        if not lacking or asked.plan is not None:
            break
        less += lacking
    raise _NotAlongError("in them they do not fit the budget", smallest)


def _against_rows(parts: Sequence[Part], target: Target) -> str:
    """Why updates must not go by rows, after all; "" for no reason."""
    if not parts:
        return ""
    # Such a copy of a leaf in host memory went at 5 GB/s on an H200.
    if any(one.memory.host_temp_bytes for one in compile_parts(parts, target)):
        return "XLA would copy them in host memory"
    return guard.against_rows(target)
