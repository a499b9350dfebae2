"""Choose the stages in which the first part of a cut step runs, so that copies hide behind it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxmem.program.cut import Cut
from jaxmem.program.ir import Block, Value
from jaxmem.program.joining import joinable
from jaxmem.program.parts import Part
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.fetching import fetching_ahead
from jaxmem.rewrite.staged import Staged, can_be_staged, ready_at, staged
from jaxmem.rewrite.standin import compilable
from jaxmem.runtime import verify
from jaxmem.runtime.line import Inside, Line
from jaxmem.runtime.parts import Need, compile_parts, needs
from jaxmem.runtime.spread import spread_of
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
    parts = compile_parts(cut.parts, target, spread=spread_of(cut, (), first))
    memory = needs(cut, first.memory, [part.memory for part in parts])
    spare = budget_bytes - first.memory.total_bytes
    window = min([window_bytes, *(budget_bytes - need.beside_bytes for need in memory)])
    line = Line(target, block, [len(block.ops)], [cut.parts])
    times = line.times(min(window, spare))
    return Pieces(cut, (), first, parts, memory, times.seconds, times.exposed, window)


def in_stages(
    plain: Pieces, block: Block, target: Target, budget_bytes: int, options: Mapping[str, str]
) -> Pieces:
    """The same in stages, where that fits the budget and is quicker on paper; else ``plain``."""
    cut = plain.cut
    if not plain.exposed_seconds:
        return plain
    for bounds, line, window in _staged_lines(cut, block, target):
        if line.times(window).seconds > plain.seconds * (1 - _CLEARLY):
            continue
        found = _compiled(staged(cut, block, bounds), line, target, budget_bytes, window, options)
        if isinstance(found, Pieces) and found.seconds <= plain.seconds * (1 - _CLEARLY):
            return found
    return plain


def _staged_lines(
    cut: Cut, block: Block, target: Target
) -> Iterator[tuple[Sequence[int], Line, int]]:
    """Numbers of stages: where each ends, them in time, and the most that their copies take."""
    if not can_be_staged(block) or cut.sent:
        return
    ready = ready_at(cut, block)
    most = -(-2 * cut.fetched_bytes // _UNDER_WAY_BYTES)
    for count in dict.fromkeys([min(max(most, _STAGES[0]), _MOST_STAGES), *_STAGES]):
        bounds = _bounds(cut.parts, ready, len(block.ops), count)
        if not bounds:
            return
        edges = [*bounds, len(block.ops)]
        groups = _updates_after(cut, ready, edges)
        window = 2 * max(sum(p.fetched_bytes for p in group) for group in groups)
        yield bounds, Line(target, block, edges, groups), window


def least_seconds(
    cut: Cut, block: Block, target: Target, budget_bytes: int, *, joining: bool = False
) -> float:
    """Predicted seconds that no number of stages is quicker than, whatever compiles to what.

    Args:
        cut: the step.
        block: the schedule of its first part.
        target: what it is for.
        budget_bytes: bytes on each device: copies never take more.
        joining: whether updates go along with the loops that make their gradients.
    """
    if cut.lent or joining:
        by_rows = not cut.program.sharded
        ways = _ways(cut, block, target, budget_bytes, by_rows=by_rows, joining=joining)
        return min((way.seconds for way in ways), default=0.0)
    whole = Line(target, block, [len(block.ops)], [cut.parts]).times(budget_bytes).seconds
    stages = (line.times(window).seconds for _, line, window in _staged_lines(cut, block, target))
    return min([whole, *stages])


def lending(
    cut: Cut,
    block: Block,
    target: Target,
    budget_bytes: int,
    options: Mapping[str, str],
    *,
    by_rows: bool = True,
    joining: bool = False,
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
        joining: whether updates go along with the loops that make their gradients; at least one
            must.

    Returns:
        The quickest that fits; where none does, how many bytes too much the smallest takes, or 0
        if none may run in stages.
    """
    ways = _ways(cut, block, target, budget_bytes, by_rows=by_rows, joining=joining)
    if not ways:
        return None, 0
    # Every stage is one more program that Python must have started in time: few are better.
    limit = min(way.seconds for way in ways) * (1 + _HARDLY)
    best: Pieces | None = None
    lacking: list[int] = []
    for way in sorted(ways, key=lambda way: max(way.seconds, limit)):
        if best is not None and best.seconds <= way.seconds * (1 + _HARDLY):
            break
        found = _compiled(way.made, way.line, target, budget_bytes, way.window_bytes, options)
        if isinstance(found, int):
            lacking.append(found)
        elif best is None or found.seconds < best.seconds:
            best = replace(found, stages=found.stages - 1)  # The first one only takes arguments.
    return best, min(filter(None, lacking), default=0)


def gains(cut: Cut, target: Target, budget_bytes: int) -> bool:
    """Whether a step is quicker on paper with updates that go along with loops, as it is written.

    What is made again to fit a budget only gives copies more to hide behind.
    """
    ways = _ways(cut, cut.first.block, target, budget_bytes, by_rows=True, joining=True)
    return any(way.line.gained > way.seconds * _HARDLY for way in ways)


def _ways(
    cut: Cut, block: Block, target: Target, budget_bytes: int, *, by_rows: bool, joining: bool
) -> list[_Lending]:
    """The step in different numbers of stages."""
    ahead: frozenset[Value] = frozenset()
    if by_rows:
        block, ahead = fetching_ahead(block, cut.lent)
    ready = ready_at(cut, block)
    whole = cut.lent.keys() - ahead
    least = max(sum(v.nbytes for v in op.values if v in whole) for op in block.ops)
    loops = joinable(block, cut.first.block.outputs, cut.parts) if joining else ()
    apart = {edge for at in loops for edge in (at, at + 1) if edge < len(block.ops)}
    tried: dict[tuple[int, ...], _Lending] = {}
    for count in _LENDING_STAGES:
        room = max(least, sum(v.nbytes for v in whole) // count) if whole else math.inf
        bounds = tuple(sorted(apart.union(_lending_bounds(cut, block, ready, room, whole))))
        if len(bounds) <= _MOST_STAGES and bounds not in tried:
            way = _in_stages_from(
                cut, block, ready, bounds, target, budget_bytes, ahead, joining=joining
            )
            if not joining or any(part.along for part in way.made.cut.parts):
                tried[bounds] = way
    return list(tried.values())


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
    line: Line
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
    *,
    joining: bool = False,
) -> _Lending:
    edges = [*bounds, len(block.ops)]
    groups = _updates_after(cut, ready, edges)
    made = staged(cut, block, bounds, ahead, joining=joining)
    stages = [part for part in made.cut.parts if part.stage]
    lent = [0, *(part.fetched_bytes for part in stages)]
    # What goes along with a loop is no update of its own.
    inside = [Inside(None), *(Inside(part, _updates_in(part, cut)) for part in stages)]
    gone = {part for one in inside for part in one.updates}
    groups = [[part for part in group if part not in gone] for group in groups]
    line = Line(target, block, edges, groups, lent, inside)
    fetched = [sum(part.fetched_bytes for part in group) for group in groups]
    window = 3 * max(a + b for a, b in zip(lent, fetched, strict=True))
    return _Lending(made, line, window, line.times(min(window, budget_bytes)).seconds)


def _updates_in(stage: Part, cut: Cut) -> list[Part]:
    """The updates that go along with the loop of a stage."""
    made = set(stage.names) if stage.along else set()
    return [part for part in cut.parts if part.chunks and made.issuperset(part.names)]


def _updates_after(cut: Cut, ready: Sequence[int], edges: Sequence[int]) -> list[list[Part]]:
    """The updates that can run after each stage and not before."""
    return [
        [part for part, at in zip(cut.parts, ready, strict=True) if start < at <= end]
        for start, end in itertools.pairwise([-1, *edges])
    ]


def _lending_bounds(
    cut: Cut, block: Block, ready: Sequence[int], room: float, whole: Collection[Value]
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
    line: Line,
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
        out_shardings=program.out_shardings(),
        options=options,
    )
    spread = spread_of(pieces.cut, pieces.names, first)
    parts = compile_parts(pieces.cut.parts, target, options, spread)
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
