"""Operations that jaxmem makes itself: arrays to fill, buffers kept apart, loops in pieces."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.sharding import AxisType

from jaxmem.program.ir import Op, Value

# Ends the name of what stands behind a barrier of ours.
BEHIND = ".behind"
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


def behind_barrier(value: Value, place: jex.JaxprEqn) -> Op:
    """The operation that gives ``value`` once it is made, and the compiler cannot look behind."""
    (eqn,) = _barrier(value.aval.shape, value.aval.dtype).eqns
    result = Value(value.aval, f"{value.key}{BEHIND}", layout=value.layout)
    return Op(eqn.replace(source_info=place.source_info, ctx=place.ctx), (value,), (result,))


@functools.lru_cache(maxsize=1024)
def _barrier(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.make_jaxpr(lax.optimization_barrier)(jax.ShapeDtypeStruct(shape, dtype))


def kept_apart(value: Value, other: Value, place: jex.JaxprEqn) -> tuple[tuple[Op, ...], Value]:
    """``value`` once more, in operations that make the compiler keep ``other`` until it is there.

    Otherwise XLA may write ``value`` over ``other`` and wait until a copy of that is done. What is
    computed is the first number of ``value``, or that of ``other`` where the last bit of a number
    is 2: never, which XLA finds out only when the buffers are settled.
    """
    traced = _apart(value.aval.shape, value.aval.dtype, jax.config.read("jax_enable_x64"))
    known: dict[Any, Value] = dict(zip(traced.jaxpr.invars, (value, other), strict=True))
    ops = []
    for eqn in traced.jaxpr.eqns:
        inputs = [a if isinstance(a, jex.Literal) else known[a] for a in eqn.invars]
        outputs = [known.setdefault(v, Value(v.aval)) for v in eqn.outvars]
        ops.append(
            Op(eqn.replace(source_info=place.source_info, ctx=place.ctx), inputs, tuple(outputs))
        )
    return tuple(ops), known[traced.jaxpr.outvars[0]]


def may_be_kept_apart(value: Value) -> bool:
    """Whether :func:`kept_apart` takes it: numbers of 8, 16, 32 or 64 bits, on one device.

    Of an array that is split over a mesh one device has the first number: all would wait for it.
    """
    dtype = value.aval.dtype
    mesh = getattr(getattr(value.aval, "sharding", None), "mesh", None)
    over_mesh = value.layout is not None or (mesh is not None and not mesh.empty)
    if over_mesh or not value.nbytes:
        return False
    if jnp.issubdtype(dtype, jnp.floating):
        width = jnp.finfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.integer):
        width = jnp.iinfo(dtype).bits
    else:
        return False
    return width == 8 * dtype.itemsize and dtype.itemsize in _BITS


def is_typed(value: Value) -> bool:
    """Whether the type of ``value`` says how it lies on a mesh (axes of the type Explicit)."""
    mesh = getattr(getattr(value.aval, "sharding", None), "mesh", None)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@functools.lru_cache(maxsize=1024)
def _apart(shape: tuple[int, ...], dtype: Any, x64: bool) -> Any:
    def apart(value: Any, other: Any) -> Any:
        one = (1,) * len(shape)
        first, its = (lax.slice(a, (0,) * len(shape), one) for a in (value, other))
        bits = lax.bitcast_convert_type(its, _BITS[np.dtype(dtype).itemsize])
        never = lax.eq(bits & np.array(1, bits.dtype), lax.full_like(bits, 2))
        return lax.dynamic_update_slice(value, lax.select(never, its, first), (0,) * len(shape))

    aval = jax.ShapeDtypeStruct(shape, dtype)
    return jax.make_jaxpr(apart)(aval, aval)


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
