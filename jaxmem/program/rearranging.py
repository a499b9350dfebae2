"""Reshapes that no layout absorbs: axes are taken apart, put in another order, and joined.

A transposition has no bytes as a rule: what makes its operand, or reads its result, does so in the
order of the other. That ends where an axis of the result has parts of several axes of the operand
in it that cannot stand beside each other in memory: depth to space, the windows of an image. XLA
writes those out: of a 3D U-Net's transposed convolutions 3 GiB each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem.program.ir import Op, Value
from jaxmem.program.primitives import RESHAPES


@dataclass(frozen=True)
class _Piece:
    """Part of an axis in memory: ``size`` places, each ``stride`` places of the axis apart."""

    axis: int
    stride: int
    size: int


_Axis = tuple[_Piece, ...]


def rearranged(ops: Sequence[Op]) -> frozenset[Op]:
    """The reshapes whose results have no layout in which they are their operand, in a line."""
    if not any(op.name == "transpose" for op in ops):
        return frozenset()
    found: set[Op] = set()
    known: dict[Value, tuple[_Axis, ...]] = {}
    for op in ops:
        if op.name not in RESHAPES and op.name != "transpose":
            continue
        (given,), (result,) = op.inputs, op.outputs
        if not isinstance(given, Value):
            continue
        axes = known.get(given) or _whole(given.aval.shape)
        if op.name == "transpose":
            known[result] = tuple([axes[n] for n in op.eqn.params["permutation"]])
            continue
        regrouped = _regrouped([p for axis in axes for p in axis], result.aval.shape)
        if regrouped is None:
            continue
        if _has_layout(regrouped):
            known[result] = regrouped
        else:
            found.add(op)
    return frozenset(found)


def _whole(shape: Sequence[int]) -> tuple[_Axis, ...]:
    return tuple([(_Piece(n, 1, size),) for n, size in enumerate(shape)])


def _has_layout(axes: Sequence[_Axis]) -> bool:
    """Whether all pieces can stand in one order that takes no axis apart, old or new.

    What follows what in an axis must do so in memory: no piece has two that follow it or that it
    follows, and none follows itself.
    """
    old: dict[int, list[_Piece]] = {}
    for piece in (p for axis in axes for p in axis):
        old.setdefault(piece.axis, []).append(piece)
    ordered = [sorted(pieces, key=lambda p: -p.stride) for pieces in old.values()]
    follows = {pair for axis in (*ordered, *axes) for pair in itertools.pairwise(axis)}
    after = dict(follows)
    if len(after) < len(follows) or len({second for _, second in follows}) < len(follows):
        return False
    for first in after:
        at = after.get(first)
        while at is not None and at != first:
            at = after.get(at)
        if at == first:
            return False
    return True


def _regrouped(pieces: Sequence[_Piece], shape: Sequence[int]) -> tuple[_Axis, ...] | None:
    """The axes of a reshape's result; ``None`` where it cuts across what is in them."""
    left = [p for p in pieces if p.size != 1]
    axes: list[_Axis] = []
    for length in reversed(shape):
        axis: list[_Piece] = []
        wanted = length
        while wanted > 1:
            if not left:
                return None
            piece = left.pop()
            size = math.gcd(piece.size, wanted)
            if size != min(piece.size, wanted):
                return None
            axis.append(_Piece(piece.axis, piece.stride, size))
            if size < piece.size:
                rest = piece.size // size
                left.append(_Piece(piece.axis, piece.stride * size, rest))
            wanted //= size
        axes.append(tuple(reversed(axis)))
    return tuple(reversed(axes))
