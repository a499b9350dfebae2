"""Operations that jaxmem makes itself: rows of an array, and loops written out in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from jaxmem.program.ir import Atom, Op, Value

_INDEX = jax.ShapeDtypeStruct((), np.uint32)


def index_number(number: int) -> jex.Literal:
    """The index ``number``, unsigned: JAX then adds nothing for indices below zero."""
    return jex.Literal(np.uint32(number), jax.core.ShapedArray((), np.uint32))


def index_value() -> Value:
    """A new index."""
    return Value(jax.core.ShapedArray((), np.uint32))


class Line:
    """Operations in the making, at the place in the user's code where ``eqn`` is."""

    def __init__(self, eqn: jex.JaxprEqn):
        self.eqn = eqn
        self.ops: list[Op] = []

    def row(self, array: Value, index: Atom, result: Value) -> None:
        """``result`` is ``array[index]``."""
        self._add(_row(array.aval.shape, array.aval.dtype), [array, index], result)

    def put(self, array: Value, row: Atom, index: Atom, result: Value) -> None:
        """``result`` is ``array`` with ``row`` at ``index``."""
        self._add(_put(array.aval.shape, array.aval.dtype), [array, row, index], result)

    def step(self, index: Value, down: bool) -> Value:
        """The next index."""
        result = index_value()
        self._add(_step(down), [index], result)
        return result

    def empty(self, like: Value) -> Value:
        """An array to be filled."""
        result = like.like()
        self._add(_empty(like.aval.shape, like.aval.dtype), [], result)
        return result

    def _add(self, closed: Any, atoms: Sequence[Atom], result: Value) -> None:
        env: dict[Any, Atom] = dict(zip(closed.jaxpr.invars, atoms, strict=True))
        last = len(closed.jaxpr.eqns) - 1
        for number, eqn in enumerate(closed.jaxpr.eqns):
            inputs = tuple(v if isinstance(v, jex.Literal) else env[v] for v in eqn.invars)
            (made,) = eqn.outvars
            env[made] = result if number == last else Value(made.aval)
            placed = eqn.replace(source_info=self.eqn.source_info, ctx=self.eqn.ctx)
            self.ops.append(Op(placed, inputs, (env[made],)))


def _traced(function: Callable[..., Any], *avals: Any) -> Any:
    return jax.make_jaxpr(function)(*avals)


@functools.lru_cache(maxsize=1024)
def _row(shape: tuple[int, ...], dtype: Any) -> Any:
    zeros = [np.uint32(0)] * (len(shape) - 1)

    def row(array, index):
        return lax.squeeze(lax.dynamic_slice(array, (index, *zeros), (1, *shape[1:])), (0,))

    return _traced(row, jax.ShapeDtypeStruct(shape, dtype), _INDEX)


@functools.lru_cache(maxsize=1024)
def _put(shape: tuple[int, ...], dtype: Any) -> Any:
    zeros = [np.uint32(0)] * (len(shape) - 1)

    def put(array, row, index):
        return lax.dynamic_update_slice(array, lax.expand_dims(row, (0,)), (index, *zeros))

    row = jax.ShapeDtypeStruct(shape[1:], dtype)
    return _traced(put, jax.ShapeDtypeStruct(shape, dtype), row, _INDEX)


@functools.lru_cache(maxsize=1024)
def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    return _traced(lambda: lax.empty(shape, dtype))


@functools.cache
def _step(down: bool) -> Any:
    return _traced(lambda i: i - np.uint32(1) if down else i + np.uint32(1), _INDEX)


def in_pieces(ops: Iterable[Op]) -> tuple[Op, ...]:
    """``ops`` with the pieces of each loop that has any in its place."""
    written: list[Op] = []
    for op in ops:
        pieces = None if op.loop is None else op.loop.pieces
        if pieces is None:
            written.append(op)
            continue
        now: dict[Value, Any] = dict(zip(pieces.inputs, op.inputs, strict=True))
        now.update(zip(pieces.outputs, op.outputs, strict=True))  # pyright: ignore
        for piece in pieces.ops:
            inputs = [now.get(a, a) if isinstance(a, Value) else a for a in piece.inputs]
            results = [now.setdefault(v, v.like()) for v in piece.outputs]
            tag = piece.recompute or op.recompute
            written.append(
                Op(piece.eqn, inputs, results, piece.loop, tag, piece.barrier, piece.origin)
            )
    return tuple(written)
