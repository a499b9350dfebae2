"""Choose the stages in which the first part of a cut step runs, so that copies hide behind it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxmem.planner.simulate import Simulator
from jaxmem.program.cost import block_seconds
from jaxmem.program.cut import Cut
from jaxmem.program.ir import Block, Value, fetched_in, has_transfers
from jaxmem.program.parts import Part
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.fetching import fetching_ahead
from jaxmem.rewrite.staged import Staged, can_be_staged, ready_at, staged
from jaxmem.rewrite.standin import compilable
from jaxmem.runtime import verify
from jaxmem.runtime.compiler import rates_of
from jaxmem.runtime.parts import Need, compile_parts, needs
from jaxmem.runtime.timeline import Times, Turn, run_through
from jaxmem.targets.compiling import Compiled, compile_for
from jaxmem.targets.target import Target

# Numbers of stages that are looked at: the first one that fits and is quicker on paper is taken.
# The updates of the last stage are what nothing hides. Two stages' copies are under way at a time;
# there may be more stages than the first number to keep those to so many bytes.
_STAGES, _UNDER_WAY_BYTES, _MOST_STAGES = (16, 8, 4), 4 * 2**30, 64
# A step that is not quicker by this share stays in one piece.
_CLEARLY = 0.02
# Two numbers of stages that differ by this share take the same time.
_HARDLY = 0.02
# For lent leaves: as many stages as would read an equal part of them in the forward pass. The
# quickest on paper is taken for which there is room.
_LENDING_STAGES = (4, 8, 12, 16, 24, 32)
# Updates may fetch so many times what a stage reads: moments and master weights are more bytes.
_MADE = 4


@dataclass(frozen=True, eq=False)
class Pieces:
    """A cut step compiled for a target.

    Attributes:
        cut: the step; where it is staged the first stage is its first part.
        names: what the outputs of the first part are called, where not as they are.
        first: its first part; ``parts`` the others and ``memory`` what they take.
        seconds: predicted time of a step; in ``exposed_seconds`` of it only copies run.
        window_bytes: the most device memory that copies may take at a time.
        stages: how many programs compute the gradients.
    """

    cut: Cut
    names: tuple
    first: Compiled
    parts: Sequence[Compiled]
    memory: Sequence[Need]
    seconds: float
    exposed_seconds: float
    window_bytes: int
    stages: int = 1


def in_one(
    cut: Cut, block: Block, first: Compiled, target: Target, budget_bytes: int, window_bytes: int
) -> Pieces:
    """The step with its first part as one program.

    Args:
        cut: the step.
        block: the schedule of the first part, and ``first`` what it compiled to.
        target: what it is compiled for.
        budget_bytes: bytes on each device.
        window_bytes: the most that copies may take.
    """
    parts = compile_parts(cut.parts, target)
    memory = needs(cut, first.memory, [part.memory for part in parts])
    spare = budget_bytes - first.memory.total_bytes
    window = min([window_bytes, *(budget_bytes - need.beside_bytes for need in memory)])
    line = _Line(target, block, [len(block.ops)], [cut.parts])
    times = line.times(min(window, spare))
    return Pieces(cut, (), first, parts, memory, times.seconds, times.exposed, window)


def in_stages(
    plain: Pieces, block: Block, target: Target, budget_bytes: int, options: Mapping[str, str]
) -> Pieces:
    """The same in stages, where that fits the budget and is quicker on paper; else ``plain``."""
    cut = plain.cut
    if not can_be_staged(block) or cut.sent or not plain.exposed_seconds:
        return plain
    ready = ready_at(cut, block)
    most = -(-2 * cut.fetched_bytes // _UNDER_WAY_BYTES)
    for count in dict.fromkeys([min(max(most, _STAGES[0]), _MOST_STAGES), *_STAGES]):
        bounds = _bounds(cut.parts, ready, len(block.ops), count)
        if not bounds:
            return plain
        edges = [*bounds, len(block.ops)]
        groups = _updates_after(cut, ready, edges)
        window = 2 * max(sum(p.fetched_bytes for p in group) for group in groups)
        line = _Line(target, block, edges, groups)
        if line.times(window).seconds > plain.seconds * (1 - _CLEARLY):
            continue
        found = _compiled(staged(cut, block, bounds), line, target, budget_bytes, window, options)
        if isinstance(found, Pieces) and found.seconds <= plain.seconds * (1 - _CLEARLY):
            return found
    return plain


def lending(
    cut: Cut,
    block: Block,
    target: Target,
    budget_bytes: int,
    options: Mapping[str, str],
    *,
    by_rows: bool = True,
) -> tuple[Pieces | None, int]:
    """The step in stages that fetch the lent leaves they read, two stages ahead.

    What only loops read, row by row, they fetch themselves.

    Args:
        cut: a step whose first part is lent leaves.
        block: the schedule of its first part.
        target: what it is compiled for.
        budget_bytes: bytes on each device.
        options: what to compile with.
        by_rows: whether loops may fetch rows.

    Returns:
        The quickest that fits; where none does, how many bytes too much the smallest takes, or 0
        if none may run in stages.
    """
    ahead: frozenset[Value] = frozenset()
    if by_rows:
        block, ahead = fetching_ahead(block, cut.lent)
    ready = ready_at(cut, block)
    whole = cut.lent.keys() - ahead
    least = max(sum(v.nbytes for v in op.values if v in whole) for op in block.ops)
    tried: dict[tuple[int, ...], _Lending] = {}
    for count in _LENDING_STAGES:
        room = max(least, sum(v.nbytes for v in whole) // count)
        bounds = tuple(_lending_bounds(cut, block, ready, room, whole))
        if len(bounds) <= _MOST_STAGES and bounds not in tried:
            tried[bounds] = _in_stages_from(cut, block, ready, bounds, target, budget_bytes, ahead)
    if not tried:
        return None, 0
    # Every stage is one more program that Python must have started in time: few are better.
    limit = min(way.seconds for way in tried.values()) * (1 + _HARDLY)
    best: Pieces | None = None
    lacking: list[int] = []
    for way in sorted(tried.values(), key=lambda way: max(way.seconds, limit)):
        if best is not None and best.seconds <= way.seconds * (1 + _HARDLY):
            break
        found = _compiled(way.made, way.line, target, budget_bytes, way.window_bytes, options)
        if isinstance(found, int):
            lacking.append(found)
        elif best is None or found.seconds < best.seconds:
            best = replace(found, stages=found.stages - 1)  # The first one only takes arguments.
    return best, min(filter(None, lacking), default=0)


@dataclass(frozen=True, eq=False)
class _Lending:
    """One number of stages, not compiled.

    Attributes:
        made: the stages.
        line: them in time.
        window_bytes: the most that copies may take: what three of them fetch.
        seconds: of a step, if there is room for that much.
    """

    made: Staged
    line: _Line
    window_bytes: int
    seconds: float


def _in_stages_from(
    cut: Cut,
    block: Block,
    ready: Sequence[int],
    bounds: Sequence[int],
    target: Target,
    budget_bytes: int,
    ahead: frozenset[Value],
) -> _Lending:
    edges = [*bounds, len(block.ops)]
    groups = _updates_after(cut, ready, edges)
    made = staged(cut, block, bounds, ahead)
    lent = [0, *(part.fetched_bytes for part in made.cut.parts if part.stage)]
    line = _Line(target, block, edges, groups, lent)
    fetched = [sum(part.fetched_bytes for part in group) for group in groups]
    window = 3 * max(a + b for a, b in zip(lent, fetched, strict=True))
    return _Lending(made, line, window, line.times(min(window, budget_bytes)).seconds)


def _updates_after(cut: Cut, ready: Sequence[int], edges: Sequence[int]) -> list[list[Part]]:
    """The updates that can run after each stage and not before."""
    return [
        [part for part, at in zip(cut.parts, ready, strict=True) if start < at <= end]
        for start, end in itertools.pairwise([-1, *edges])
    ]


def _lending_bounds(
    cut: Cut, block: Block, ready: Sequence[int], room: int, whole: Collection[Value]
) -> list[int]:
    """Where stages start so that none reads more of the lent leaves, nor makes more, than ``room``.

    Those are meant that are fetched ``whole``.

    The first is before everything: it takes what is on the device and reads no lent leaf.
    """
    handed = dict.fromkeys(range(len(block.ops) + 1), 0)
    for at, part in zip(ready, cut.parts, strict=True):
        handed[at] += part.fetched_bytes
    bounds, read, made = [0], set[Value](), 0
    for n, op in enumerate(block.ops):
        now = {v for v in op.values if v in whole}
        made += handed[n]
        if sum(v.nbytes for v in read | now) > room or (made > _MADE * room and handed[n]):
            bounds += [n] if n > bounds[-1] else []
            read, made = set(), 0
        read |= now
    return bounds


def _bounds(parts: Sequence[Part], ready: Sequence[int], end: int, count: int) -> list[int]:
    """Where stages end, so that each has about as many bytes to fetch."""
    whole = sum(part.fetched_bytes for part in parts)
    found, so_far = [], 0
    for at, part in sorted(zip(ready, parts, strict=True), key=lambda pair: pair[0]):
        so_far += part.fetched_bytes
        if so_far * count >= whole * (len(found) + 1) and 0 < at < end:
            found += [at] if at not in found else []
    return found


def _compiled(
    pieces: Staged,
    line: _Line,
    target: Target,
    budget_bytes: int,
    window_bytes: int,
    options: Mapping[str, str],
) -> Pieces | int:
    """The stages compiled.

    Returns:
        If they take too much, by how many bytes; 0 if XLA undid what they make again.
    """
    program = pieces.cut.first
    first = compile_for(
        target,
        as_function(compilable(program.block, target)),
        program.avals(),
        donate=program.donated,
        options=options,
    )
    parts = compile_parts(pieces.cut.parts, target, options)
    memory = needs(pieces.cut, first.memory, [part.memory for part in parts])
    room = min([budget_bytes - need.beside_bytes for need in memory])
    room = min(room, budget_bytes - first.memory.total_bytes)
    lacking = max((need.way_bytes for need in memory), default=0) - room
    if lacking > 0:
        return lacking
    stages = [(program.block, first), *_own(pieces.cut.parts, parts)]
    if any(verify.undone(block, one.hlo_text()) for block, one in stages):
        return 0
    window = min(window_bytes, room)
    times = line.times(window, budget_bytes, memory)
    return Pieces(
        pieces.cut,
        pieces.names,
        first,
        parts,
        memory,
        times.seconds,
        times.exposed,
        window,
        stages=len(line.stages),
    )


def _own(parts: Sequence[Part], compiled: Sequence[Compiled]) -> list[tuple[Block, Compiled]]:
    """A stage for each executable: the one it was compiled for, whose recomputations it names."""
    pairs = zip(parts, compiled, strict=True)
    found: dict[int, tuple[Block, Compiled]] = {}
    for part, one in pairs:
        if part.stage:
            found.setdefault(id(one), (part.block, one))
    return list(found.values())


def _turn(part: Part, seconds: float, link: float) -> Turn:
    """An update on a timeline; one that copies by itself copies most of the time."""
    if part.chunks is not None:
        inside = part.chunks
        moved = max(inside.fetched_bytes, inside.sent_bytes) + inside.nbytes
        return Turn(max(seconds, moved / link), alone=max(0.0, moved / link - seconds))
    # What it gives takes the place of what was fetched.
    way = max(part.fetched_bytes, part.sent_bytes)
    return Turn(seconds, part.fetched_bytes, part.sent_bytes, way=way)


class _Line:
    """The stages of a step and what is updated after each, in predicted time.

    Attributes:
        stages: seconds of each, of which the first is the first part of the step.
        alone: seconds of each in which loops only wait for the rows that they fetch.
        groups: for each stage the updates that follow it.
        lent: bytes that each stage fetches for itself.
    """

    def __init__(
        self,
        target: Target,
        block: Block,
        ends: Sequence[int],
        groups: Sequence[Sequence[Part]],
        lent: Sequence[int] = (),
    ):
        rates = rates_of(target)
        simulator = Simulator(rates)
        taken = simulator.seconds_of(block.inputs, block.ops, block.outputs)
        # Loops that fetch rows take as long as their copies, at least.
        rows = [fetched_in(op) for op in block.ops]
        copies = [rates.link_seconds("fetch", n) if n else 0.0 for n in rows]
        waits = [max(0.0, copy - own) for copy, own in zip(copies, taken, strict=True)]
        edges = list(itertools.pairwise([0, *ends]))
        self.alone = [sum(waits[a:b]) for a, b in edges]
        self.stages = [sum(taken[a:b]) + sum(waits[a:b]) for a, b in edges]
        if has_transfers(block):
            self.stages = [simulator.step(block).seconds]
        self.lent = lent or [0] * len(self.stages)
        self.groups = [
            [_turn(p, block_seconds(p.block, rates), target.duplex_bytes_per_second) for p in group]
            for group in groups
        ]
        self.link = target.duplex_bytes_per_second

    def times(self, window: int, budget_bytes: int = 0, memory: Sequence[Need] = ()) -> Times:
        """How long a step takes.

        Args:
            window: the most device memory for copies.
            budget_bytes: bytes on the device; with ``memory``.
            memory: what each part takes, where that is known.
        """
        turns: list[Turn] = []
        stages = zip(self.stages, self.lent, self.alone, self.groups, strict=True)
        for n, (seconds, lent, alone, group) in enumerate(stages):
            turns += [Turn(seconds, lent, way=lent, stage=True, alone=alone)] if n else []
            turns += group
        turns = [replace(turn, room=window) for turn in turns]
        if memory:
            turns = [
                replace(
                    turn, way=need.way_bytes, room=min(window, budget_bytes - need.beside_bytes)
                )
                for turn, need in zip(turns, memory, strict=True)
            ]
        return run_through(self.stages[0], turns, self.link, window)
