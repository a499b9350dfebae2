"""A scan that stacks into arrays which are made for it alone, where JAX's stacks into zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxmem._compat import weakly_typed
from jaxmem.program.ir import Value

_Step = Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]


def scan_apart(
    step: _Step,
    init: Sequence[Any],
    slices: Sequence[Any],
    stacks: Sequence[Value],
    length: int,
    *,
    reverse: bool,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """What ``jax.lax.scan`` gives: what is carried out of the last iteration, and the stacks.

    It counts as ``jax.lax.scan`` does: where the place of a row is anything but the counter, or
    the counter from the end, XLA copies rows with a kernel.

    Args:
        step: from what is carried and a row of each of ``slices`` to what is carried on and a row
            of each of ``stacks``.
        init: what the first iteration is handed.
        slices: arrays of ``length`` rows.
        stacks: what the stacked results are.
        length: the number of iterations.
        reverse: whether the last rows come first.
    """

    def turn(state: tuple[Any, Sequence[Any], Sequence[Any]]) -> tuple[Any, Any, Any]:
        counter, carry, filled = state
        place = length - 1 - counter if reverse else counter
        rows = [
            lax.dynamic_index_in_dim(a, place, keepdims=False, allow_negative_indices=False)
            for a in slices
        ]
        carry, made = step(carry, rows)
        filled = [
            lax.dynamic_update_index_in_dim(a, row, place, 0, allow_negative_indices=False)
            for a, row in zip(filled, made, strict=True)
        ]
        return counter + 1, list(carry), filled

    arrays = [lax.empty(v.aval.shape, v.aval.dtype) for v in stacks]
    start = (jax.numpy.int32(0), list(init), arrays)
    _, carry, filled = lax.while_loop(lambda state: state[0] < length, turn, start)
    weak = [getattr(v.aval, "weak_type", False) for v in stacks]
    return carry, [weakly_typed(a) if w else a for a, w in zip(filled, weak, strict=True)]
