"""Rows of an array along an axis, read and written at an index that is not negative.

JAX adds the length to an index below zero, in operations that keep XLA from seeing that an index is
the counter of a loop.
"""

from __future__ import annotations

from typing import Any

from jax import lax


def rows_of(array: Any, axis: int, start: Any, count: int) -> Any:
    """``count`` rows of ``array`` along ``axis``."""
    sizes = [count if n == axis else size for n, size in enumerate(array.shape)]
    return lax.dynamic_slice(array, _at(array, axis, start), sizes, allow_negative_indices=False)


def write_rows(array: Any, rows: Any, axis: int, start: Any) -> Any:
    """``array`` with ``rows`` in it."""
    where = _at(array, axis, start)
    return lax.dynamic_update_slice(array, rows, where, allow_negative_indices=False)


def not_seen_through(following: Any) -> Any:
    """The counter of a loop from one on, in a way that XLA does not see through.

    Where it does, the row to be fetched is that of the counter of the next turn, and that is made
    when all that reads this turn's is done: fetches would start late.
    """
    return lax.max(following, 1)


def _at(array: Any, axis: int, start: Any) -> list[Any]:
    return [start if n == axis else 0 for n in range(array.ndim)]
