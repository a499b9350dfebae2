"""Operations that jaxmem makes itself: arrays to fill, and loops written out in pieces."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import core as jex

from jaxmem.program.ir import Op, Value

_INDEX = ShapedArray((), np.uint32)


def index_number(number: int) -> jex.Literal:
    """The index ``number``, unsigned: JAX then adds nothing for indices below zero."""
    return jex.Literal(np.uint32(number), _INDEX)


def index_value() -> Value:
    """A new index."""
    return Value(_INDEX)


def empty(result: Value, place: jex.JaxprEqn) -> Op:
    """The operation that makes ``result``, an array to be filled, where ``place`` is."""
    (eqn,) = _empty(result.aval.shape, result.aval.dtype).eqns
    return Op(eqn.replace(source_info=place.source_info, ctx=place.ctx), (), (result,))


@functools.lru_cache(maxsize=1024)
def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.make_jaxpr(lambda: lax.empty(shape, dtype))()


def in_pieces(ops: Iterable[Op]) -> tuple[Op, ...]:
    """``ops`` with the pieces of each loop that has any in its place."""
    written: list[Op] = []
    for op in ops:
        pieces = None if op.loop is None else op.loop.pieces
        if pieces is None:
            written.append(op)
            continue
        now: dict[Value, Any] = dict(zip(pieces.inputs, op.inputs, strict=True))
        results = zip(pieces.outputs, op.outputs, strict=True)
        now.update((v, result) for v, result in results if isinstance(v, Value))
        for piece in pieces.ops:
            inputs = [now.get(a, a) if isinstance(a, Value) else a for a in piece.inputs]
            results = [now.setdefault(v, v.like()) for v in piece.outputs]
            tag = piece.recompute or op.recompute
            written.append(
                Op(piece.eqn, inputs, results, piece.loop, tag, piece.barrier, piece.origin)
            )
    return tuple(written)
