"""For each primitive: which axis of an operand runs along with an axis of its result.

A row of ``x + y`` needs that row of each; a row of ``x @ w`` that row of ``x`` and all of ``w``; a
sum over all rows has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.program.ir import Atom, Op

# For each operand the axis that runs along, or None where all rows need all of it.
Axes = Sequence[int | None]


class AcrossRowsError(Exception):
    """A row of a result needs other rows of an operand, or no rule says that it does not."""


def along(op: Op, axis: int) -> Axes:
    """The axis of each operand that runs along with an axis of what ``op`` gives.

    Raises:
        AcrossRowsError: rows are mixed, or there is no rule for the primitive.
    """
    rule = _RULES.get(op.eqn.primitive.name)
    if rule is None:
        raise AcrossRowsError
    return rule(op, axis)


def resized(op: Op, axis: int, count: int) -> dict[str, Any]:
    """The parameters of ``op`` where there are ``count`` rows along an axis of what it gives."""
    name = _SIZES.get(op.eqn.primitive.name)
    if name is None:
        return op.eqn.params
    sizes = list(op.eqn.params[name])
    sizes[axis] = count
    return {**op.eqn.params, name: tuple(sizes)}


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _elementwise(op: Op, axis: int) -> Axes:
    """An operand may be a scalar, or have one element along an axis where the result has more."""
    shape = _shape(op.outputs[0])
    return [_own_axis(_shape(a), shape, axis) for a in op.inputs]


def _own_axis(own: tuple[int, ...], shape: tuple[int, ...], axis: int) -> int | None:
    if own and len(own) != len(shape):
        raise AcrossRowsError
    return axis if own and own[axis] == shape[axis] else None


def _each_its_own(op: Op, axis: int) -> Axes:
    """Operations of several arrays that are not mixed."""
    return [axis if _shape(a) == _shape(op.outputs[0]) else _across() for a in op.inputs]


def _across() -> None:
    raise AcrossRowsError


def _broadcast(op: Op, axis: int) -> Axes:
    where = op.eqn.params["broadcast_dimensions"]
    if axis not in where:
        return [None] * len(op.inputs)
    own = where.index(axis)
    size = _shape(op.inputs[0])[own]
    return [own if size == _shape(op.outputs[0])[axis] else None]


def _reshape(op: Op, axis: int) -> Axes:
    before, after = _shape(op.inputs[0]), _shape(op.outputs[0])
    if op.eqn.params.get("dimensions") is not None or len(op.inputs) != 1:
        _across()
    first = math.prod(after[:axis])
    for own, size in enumerate(before):
        if size == after[axis] and math.prod(before[:own]) == first:
            return [own]
    raise AcrossRowsError


def _transpose(op: Op, axis: int) -> Axes:
    return [op.eqn.params["permutation"][axis]]


def _squeeze(op: Op, axis: int) -> Axes:
    return [_left_over(op, op.eqn.params["dimensions"])[axis]]


def _reduce(op: Op, axis: int) -> Axes:
    return [_left_over(op, op.eqn.params["axes"])[axis]]


def _left_over(op: Op, gone: Sequence[int]) -> list[int]:
    rank = len(_shape(op.inputs[0]))
    gone = [n % rank for n in gone]
    return [n for n in range(rank) if n not in gone]


def _dot(op: Op, axis: int) -> Axes:
    (left_sum, right_sum), (left_batch, right_batch) = op.eqn.params["dimension_numbers"]
    if axis < len(left_batch):
        return [left_batch[axis], right_batch[axis]]
    axis -= len(left_batch)
    left = [n for n in range(len(_shape(op.inputs[0]))) if n not in (*left_sum, *left_batch)]
    right = [n for n in range(len(_shape(op.inputs[1]))) if n not in (*right_sum, *right_batch)]
    return [left[axis], None] if axis < len(left) else [None, right[axis - len(left)]]


def _but_along(name: str) -> Callable[[Op, int], Axes]:
    """Operations along one axis, or several, that leave the others alone."""

    def rule(op: Op, axis: int) -> Axes:
        along = op.eqn.params[name]
        if axis in (along if isinstance(along, tuple | list) else (along,)):
            _across()
        return [axis] * len(op.inputs)

    return rule


def _pad(op: Op, axis: int) -> Axes:
    if op.eqn.params["padding_config"][axis] != (0, 0, 0):
        _across()
    return [axis, None]


def _slice(op: Op, axis: int) -> Axes:
    if _shape(op.inputs[0])[axis] != _shape(op.outputs[0])[axis]:
        _across()
    return [axis]


def _iota(op: Op, axis: int) -> Axes:
    if op.eqn.params["dimension"] == axis or op.inputs:
        _across()
    return []


_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne "
    "neg nextafter not or population_count pow real reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor"
).split()
_REDUCTIONS = (
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
).split()
_RULES: dict[str, Callable[[Op, int], Axes]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _but_along("axis")),
    "broadcast_in_dim": _broadcast,
    "concatenate": _but_along("dimension"),
    "dot_general": _dot,
    "iota": _iota,
    "optimization_barrier": _each_its_own,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _but_along("dimensions"),
    "slice": _slice,
    "sort": _but_along("dimension"),
    "split": _but_along("axis"),
    "squeeze": _squeeze,
    "transpose": _transpose,
}
# The parameter that says how large the result is.
_SIZES = {
    "broadcast_in_dim": "shape",
    "iota": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
}
