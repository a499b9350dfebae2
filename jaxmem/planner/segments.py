"""Which scan pairs may run in segments, and in how many it is worth trying."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxmem.program.ir import Block
from jaxmem.program.loops import Nest, Pair
from jaxmem.program.making import is_typed
from jaxmem.program.primitives import may_repeat

Segments = Mapping[str, tuple[int, ...]]
"""For the path of a pair's joint block the numbers of segments, outermost first."""

# Two segments of two iterations each.
_SHORTEST = 4
# From here on segments within segments are worth offering: three levels of four.
_SHORTEST_NESTED = 64


def segment_choices(length: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of segments worth trying for a scan of ``length`` iterations, coarse to fine.

    For one level those around the square root, where segments and iterations in a segment are
    about as many; for two, from 64 iterations on, those around the cube root.

    >>> segment_choices(64)
    ((4,), (8,), (16,), (4, 4))
    >>> segment_choices(47)
    ((3,), (7,), (14,))
    >>> segment_choices(3)
    ()
    """
    root = math.sqrt(length)
    found: list[tuple[int, ...]] = [(_near(length, root * scale),) for scale in (0.5, 1.0, 2.0)]
    if length >= _SHORTEST_NESTED:
        outer = _near(length, length ** (1 / 3))
        found.append((outer, _near(length // outer, math.sqrt(length // outer))))
    fitting = [counts for counts in found if not misfit(length, counts)]
    return tuple(dict.fromkeys(fitting))


def _near(length: int, wanted: float) -> int:
    """A divisor of ``length`` not far from ``wanted`` if there is one, else what is nearest."""
    near = range(max(2, math.ceil(wanted * 0.75)), math.floor(wanted * 1.34) + 1)
    divisors = [n for n in near if length % n == 0]
    return min(divisors, key=lambda n: abs(n - wanted), default=max(2, round(wanted)))


def misfit(length: int, counts: Sequence[int]) -> str:
    """Why ``length`` iterations cannot be cut into ``counts``; ``""`` if they can."""
    left = length
    for count in counts:
        if count < 2 or left // count < 2:
            return f"{length} iterations cannot be cut into segments {tuple(counts)}"
        left //= count
    return ""


def why_whole(block: Block, pair: Pair) -> str:
    """Why a pair of ``block`` cannot run in segments, in words; ``""`` if it can."""
    first, second = block.ops[pair.forward], block.ops[pair.backward]
    assert first.loop is not None and second.loop is not None
    if first.loop.length < _SHORTEST:
        return f"it has {first.loop.length} iterations"
    if first.loop.reverse == second.loop.reverse:
        return "its backward scan starts at the same end as the forward scan"
    fixed = next((op for op in pair.joint.ops[: pair.cut] if not may_repeat(op)), None)
    if fixed is not None:
        return f"its body has an operation that may not be run again: {fixed.name}"
    if any(is_typed(v) for op in (first, second) for v in (*op.values, *op.outputs)):
        return "its arrays are sharded over explicit mesh axes"
    return ""


def can_split(block: Block, pair: Pair) -> bool:
    """Whether a pair of ``block`` can run in segments."""
    return not why_whole(block, pair)


def splittable(nest: Nest) -> dict[str, int]:
    """The pairs of a program that can run in segments: length by path, outermost first."""
    return {
        pair.joint.path: loop.length
        for inner in nest.walk()
        for pair, _ in inner.pairs
        if (loop := inner.block.ops[pair.forward].loop) is not None and can_split(inner.block, pair)
    }


def refusal(nest: Nest, segments: Segments) -> str:
    """Why a program cannot run in these segments, in words; ``""`` if it can."""
    pairs = {pair.joint.path: (n.block, pair) for n in nest.walk() for pair, _ in n.pairs}
    for path, counts in segments.items():
        if path not in pairs:
            return f"there is no pair of scans {path!r}"
        block, pair = pairs[path]
        loop = block.ops[pair.forward].loop
        assert loop is not None
        why = (
            why_whole(block, pair) or misfit(loop.length, counts) or ("" if counts else "no counts")
        )
        if why:
            return f"the pair of scans {path!r} stays whole: {why}"
    return ""
