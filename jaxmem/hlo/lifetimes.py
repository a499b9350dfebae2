"""When each value of a compiled program is live, in the order in which the program runs.

XLA tells where in memory each value is, not from when to when, so this reads it off the schedule: a
value lives from the instruction that makes it to the last one that reads it at any of its places.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from jaxmem.hlo.assignment import Allocation, Slice
from jaxmem.hlo.module import Instruction
from jaxmem.hlo.schedule import Place, Schedule, places

# What hands a value on without reading it; where it goes is among the value's places.
_HANDING_ON = frozenset(["tuple", "get-tuple-element", "bitcast", "opt-barrier"])


@dataclass(eq=False, slots=True)
class Life:
    """Bytes of an allocation that hold the same thing from one time to another.

    Attributes:
        slices: the values that are there, one after the other: what a loop carries is the value it
            starts with and the one that each turn makes.
        start: first time; ``end`` last time.
        offset: first byte in its allocation; ``nbytes`` how many.
    """

    slices: list[Slice]
    start: int
    end: int
    offset: int
    nbytes: int


def lives(schedule: Schedule, allocation: Allocation) -> list[Life]:
    """What is in an allocation, and when: no two things at the same time in the same bytes.

    Cost:
        n log n for n slices.
    """
    found = [_life(schedule, group) for group in _same(schedule, allocation.slices)]
    found.sort(key=lambda life: (life.start, life.end, life.offset))
    return _apart(found)


def _same(schedule: Schedule, slices: Iterable[Slice]) -> list[list[tuple[Slice, list[Place]]]]:
    """Slices whose values are at the same place at some time, as those that a loop carries are.

    They are in the same bytes, too: what starts an operation, what ends it, and the computation in
    between have the same parts, and each has a table of its own with the addresses of these.
    """
    groups: list[list[tuple[Slice, list[Place]]]] = []
    owner: dict[tuple[Place, int], int] = {}
    parent: list[int] = []

    def find(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for n, piece in enumerate(slices):
        at = places(schedule, piece.made)
        groups.append([(piece, at)])
        parent.append(n)
        for place in at:
            other = find(owner.setdefault((place, piece.offset), n))
            mine = find(n)
            if other != mine:
                parent[mine] = other
                groups[other] += groups[mine]
                groups[mine] = []
    return [group for group in groups if group]


def _life(schedule: Schedule, group: list[tuple[Slice, list[Place]]]) -> Life:
    pieces = [piece for piece, _ in group]
    spans = [_span(schedule, piece, at) for piece, at in group]
    offset = min(piece.offset for piece in pieces)
    end = max(piece.offset + piece.nbytes for piece in pieces)
    return Life(pieces, min(s for s, _ in spans), max(e for _, e in spans), offset, end - offset)


def _span(schedule: Schedule, piece: Slice, at: Iterable[Place]) -> tuple[int, int]:
    start = end = schedule.at.get(piece.made[0], 0)
    for ident, _ in at:
        end = max(end, schedule.at.get(ident, 0))
        computation = schedule.module.instructions[ident].computation
        if schedule.module.computations[computation].root == ident:
            end = max(end, schedule.spans.get(computation, (0, 0))[1])
        for reader in schedule.readers.get(ident, ()):
            if reader.opcode not in _HANDING_ON:
                end = max(end, _read_at(schedule, reader))
    return start, end


def _read_at(schedule: Schedule, reader: Instruction) -> int:
    """A loop takes what it starts with into its first turn; it does not read it at its end."""
    if reader.opcode == "while":
        firsts = [schedule.spans[c][0] for c in reader.called if c in schedule.spans]
        if firsts:
            return max(firsts)
    return schedule.at[reader.id]


def _apart(found: list[Life]) -> list[Life]:
    """Lives of which no two have the same bytes at the same time.

    What begins inside the bytes of another that lives on is a part of it: the compiler changes it
    there, as where a row of an array is replaced. What else begins where another is takes its
    place, as a result takes the memory of an operand.
    """
    kept: dict[int, Life] = {}
    # Which life had these bytes last: starts of stretches in order, their ends and lives.
    starts: list[int] = []
    ends: list[int] = []
    owners: list[Life] = []
    for life in found:
        first, last = _overlapped(starts, ends, life)
        over = [o for o in dict.fromkeys(owners[first:last]) if o.end >= life.start]
        whole = next((o for o in over if _is_inside(life, o)), None)
        if whole is not None:
            whole.slices += life.slices
            whole.end = max(whole.end, life.end)
            continue
        for other in over:
            other.end = life.start - 1
            if other.end < other.start:
                life.slices += other.slices
                del kept[id(other)]
        _replace(starts, ends, owners, (first, last), life)
        kept[id(life)] = life
    return list(kept.values())


def _is_inside(life: Life, other: Life) -> bool:
    """Whether a life begins in bytes of another that is not over then."""
    if other.end == life.start > other.start:
        return False
    ends = life.offset + life.nbytes <= other.offset + other.nbytes
    return other.offset <= life.offset and ends


def _overlapped(starts: list[int], ends: list[int], life: Life) -> tuple[int, int]:
    """The stretches that a life's bytes touch: from the first, up to the last."""
    first = bisect_right(ends, life.offset)
    return first, max(first, bisect_left(starts, life.offset + life.nbytes))


def _replace(
    starts: list[int], ends: list[int], owners: list[Life], cut: tuple[int, int], life: Life
) -> None:
    """Put a life's bytes in place of what they overlap; what sticks out at the sides stays."""
    if not life.nbytes:
        return
    first, last = cut
    low, high = life.offset, life.offset + life.nbytes
    pieces = [(low, high, life)]
    if first < last and starts[first] < low:
        pieces.insert(0, (starts[first], low, owners[first]))
    if first < last and ends[last - 1] > high:
        pieces.append((high, ends[last - 1], owners[last - 1]))
    starts[first:last] = [p[0] for p in pieces]
    ends[first:last] = [p[1] for p in pieces]
    owners[first:last] = [p[2] for p in pieces]


def live_bytes(found: Iterable[Life], times: int) -> list[int]:
    """Bytes of these lives at each time."""
    change = [0] * (times + 1)
    for life in found:
        if life.end >= life.start:
            change[life.start] += life.nbytes
            change[life.end + 1] -= life.nbytes
    total, live = 0, []
    for step in change[:-1]:
        total += step
        live.append(total)
    return live
