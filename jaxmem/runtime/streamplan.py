"""The programs of a step that is cut, in order, and the plan that tells of them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jaxmem.planner.decisions import Streamed
from jaxmem.planner.plan import Plan
from jaxmem.planner.simulate import Simulator
from jaxmem.program.cost import block_seconds
from jaxmem.program.cut import Cut
from jaxmem.program.ir import Hosting, Value
from jaxmem.runtime.asked import Asked
from jaxmem.runtime.onpaper import needs_on_paper
from jaxmem.runtime.rates import rates_of
from jaxmem.runtime.rehearsal import rehearsed
from jaxmem.runtime.staging import Pieces
from jaxmem.runtime.stream import Item, Stream
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.target import Target
from jaxmem.units import format_bytes

# Room that copies leave for what XLA's allocator adds (``allocator``): at least this share of a
# budget. Of 24 GiB an H200 gave 33.6 MB more than was planned; of 20.3, where 113 programs hand
# over 200 arrays of other sizes than those before, an H100 357 MB more, and a rehearsal 332.
_ROUNDED_SHARE, _ROUNDED_BYTES = 128, 2**16
# So many steps are rehearsed, and copies are given less room until all of a budget but this share
# is enough, so many times.
_STEPS, _REHEARSALS, _LEFT_SHARE = 6, 8, 256


def _shuffled(seed: int, values: list[Value]) -> list[Value]:
    return random.Random(seed).sample(values, len(values))


# How a rehearsal starts, by how many arrays lie where: with those alone that stay on the device;
# with all made there in order, as by one program, of which some then left; or in any order. And
# what the link makes of its speed.
_ALONE, _IN_ORDER = (None, 0.7), (list, 1.0)
_IN_ANY = (partial(_shuffled, 1), 1.0), (partial(_shuffled, 2), 1.4)


class GivenOut(NamedTuple):
    """The most bytes that XLA's allocator gives out at a time for a step in pieces.

    Attributes:
        least: where nothing was on the device before.
        likely: where the arguments were made there, in order.
        most: where they lie in any order.
    """

    least: int
    likely: int
    most: int


def outcome_of(
    first: Outcome,
    pieces: Cut,
    found: Pieces,
    *,
    budget_bytes: int,
    host_bytes: int,
    target: Target,
    asked: Asked,
) -> Outcome:
    """The step as it will run.

    Raises:
        RoundedUpError: XLA's allocator would give out more than the budget.

    Args:
        first: what computes the gradients, planned, and ``pieces`` what it was cut from.
        found: the pieces compiled.
        budget_bytes: what it is planned in on each device; ``host_bytes`` waits beside it.
        target: what it is compiled for.
        asked: which leaves wait, and what may be given out.
    """
    most = asked.given_out_bytes or budget_bytes
    stream, given_out = _stream(found, most, target)
    if given_out.least > most and asked.plan is None:
        raise RoundedUpError(given_out.least - most)
    plan = _plan(first.plan, pieces, stream, found, target, asked, host_bytes, budget_bytes)
    if given_out.likely and asked.plan is None:  # One that is followed says so already.
        # Copies never fill all the room they have, and the allocator adds to what they do.
        beyond = given_out.likely - plan.compiled_bytes
        plan = replace(plan, predicted_bytes=plan.predicted_bytes + beyond)
    if given_out.likely > most:
        note = (
            f"XLA's allocator may give out {format_bytes(given_out.likely)}, more than the budget, "
            "as it gives out blocks larger than are asked for"
        )
        plan = replace(plan, notes=(*plan.notes, note))
    # What the step keeps for itself is none of the caller's.
    hosting = Hosting(
        pieces.hosting.inputs.intersection(range(len(pieces.written.block.inputs))),
        pieces.hosting.results.intersection(range(len(pieces.written.block.outputs))),
    )
    return replace(first, plan=plan, hosting=hosting, stream=stream, planned=pieces.first)


class RoundedUpError(Exception):
    """XLA's allocator would give out more for a step in pieces than its budget, by ``nbytes``."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.nbytes = nbytes


def _stream(found: Pieces, most_bytes: int, target: Target) -> tuple[Stream, GivenOut]:
    """The step with as much under way as there is room for, and what is given out for it.

    That is over ``most_bytes`` where it would be with the least under way.
    """
    left = max(_ROUNDED_BYTES, most_bytes // _ROUNDED_SHARE)
    stream = _within(found, most_bytes - left)
    if target.platform == "cpu":
        return stream, GivenOut(0, 0, 0)
    tried = [(stream, given_out_for(stream, target))]
    while len(tried) <= _REHEARSALS:
        over = tried[-1][1].most - (most_bytes - most_bytes // _LEFT_SHARE)
        if over <= 0:
            break
        # Memory comes in the sizes of leaves: half of what is too much may be enough.
        left += -(-over // 2)
        stream, before = _within(found, most_bytes - left), stream
        if stream.rooms == before.rooms:
            break
        tried.append((stream, given_out_for(stream, target)))
    return min(tried, key=lambda pair: (pair[1].least > most_bytes, pair[1].most))


def with_rounding(found: Pieces, budget_bytes: int, target: Target) -> int:
    """So large a budget leaves room for what XLA's allocator adds as well."""
    needed = budget_bytes
    for _ in range(_REHEARSALS):
        _, given_out = _stream(found, needed, target)
        if given_out.least <= needed:
            break
        needed = max(given_out.least, needed + (needed - budget_bytes))
    return needed


def given_out_for(stream: Stream, target: Target) -> GivenOut:
    """What XLA's allocator gives out in steps that are rehearsed."""
    rates, link = rates_of(target), target.duplex_bytes_per_second
    seconds = [block_seconds(item.part.block, rates) for item in stream.items]
    seconds.append(block_seconds(stream.cut.first.block, rates))
    alone, in_order, *others = (
        rehearsed(stream, link * speed, seconds.__getitem__, _STEPS, made).allocator.most
        for made, speed in (_ALONE, _IN_ORDER, *_IN_ANY)
    )
    likely = max(alone, in_order)
    return GivenOut(alone, likely, max(likely, *others))


def _within(found: Pieces, budget_bytes: int) -> Stream:
    most = found.window_bytes
    spare = max(0, budget_bytes - found.first.memory.total_bytes)
    tail = min(most, spare) // 2
    return Stream(
        found.cut,
        found.first.executable,
        tuple(
            Item(part, one.executable, need.way_bytes, min(most, budget_bytes - need.beside_bytes))
            for part, one, need in zip(found.cut.parts, found.parts, found.memory, strict=True)
        ),
        ahead_bytes=min(most, spare - tail),
        tail_bytes=tail,
        names=found.names,
        lowered=tuple({id(one): one.lowered for one in found.parts}.values()),
    )


def _plan(
    first: Plan,
    pieces: Cut,
    stream: Stream,
    found: Pieces,
    target: Target,
    asked: Asked,
    host_bytes: int,
    within_bytes: int,
) -> Plan:
    """The plan of the whole step."""
    program = pieces.written
    simulator = Simulator(rates_of(target))
    written = simulator.step(program.block)
    most = sum(item.way_bytes for item in stream.items)
    # A part that is larger than the window is copied with nothing else under way.
    windows = [max(item.way_bytes, min(item.room_bytes, most)) for item in stream.items]
    taken = [need.beside_bytes + w for need, w in zip(found.memory, windows, strict=True)]
    ahead = min(stream.ahead_bytes + stream.tail_bytes, most)
    temporaries = first.predicted_bytes - pieces.first.fixed_bytes if found.cut is pieces else None
    on_paper, paper_needs = needs_on_paper(found, simulator, temporaries)
    predicted = [need.beside_bytes + w for need, w in zip(paper_needs, windows, strict=True)]
    on_paper_bytes = max([on_paper.total_bytes + ahead, *predicted])
    if asked.plan is not None:  # It does not say what was predicted of the first part alone.
        on_paper_bytes = asked.plan.predicted_bytes
    here = {
        n: nbytes
        for n, nbytes in enumerate(program.result_bytes)
        if n not in pieces.hosting.results
    }
    return replace(
        first,
        argument_bytes=first.argument_bytes - pieces.lent_bytes,
        output_bytes=sum(here.values()),
        aliased_bytes=sum(here[n] for n in program.places if n in here),
        predicted_bytes=on_paper_bytes,
        compiled_bytes=max([found.first.memory.total_bytes + ahead, *taken]),
        keep_all_predicted_bytes=program.fixed_bytes + written.temp_bytes,
        keep_all_compiled_bytes=None,
        predicted_seconds=found.seconds,
        keep_all_seconds=written.seconds,
        exposed_seconds=found.exposed_seconds,
        host_bytes=first.host_bytes + host_bytes,
        hosted=tuple(program.arguments[n].path for n in sorted(asked.hosted)),
        notes=(*first.notes, *asked.notes),
        streamed=_streamed(stream, found, pieces, max(windows, default=0), within_bytes),
    )


def _streamed(
    stream: Stream, found: Pieces, pieces: Cut, window_bytes: int, within_bytes: int
) -> Streamed:
    """How its leaves are updated."""
    moved = [n for n, item in enumerate(stream.items) if any(item.part.moved_bytes)]
    by_rows = [item.part.chunks for item in stream.items if item.part.chunks]
    updates = [n for n in moved if not stream.items[n].part.stage]
    return Streamed(
        stages=found.stages,
        updates=len(updates),
        programs=len({id(found.parts[n]) for n in updates}),
        fetched_bytes=found.cut.fetched_bytes,
        sent_bytes=pieces.sent_bytes,
        window_bytes=max([window_bytes, *(chunks.nbytes for chunks in by_rows)]),
        by_rows=sum(one.beside is None for one in by_rows),
        ahead=len({v for item in stream.items for v in item.part.waiting}),
        along=sum(len(one.homes) for one in by_rows if one.beside) - len(pieces.buffers),
        kept_bytes=sum(v.nbytes for _, v in pieces.buffers),
        within_bytes=within_bytes,
    )
