"""How an array is split over a mesh: the axes of each dimension, and what a device has of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Axis = tuple[str, int]
"""Name and size of a mesh axis, or of a part of one."""


@dataclass(frozen=True)
class Layout:
    """The mesh axes that each dimension of an array is split over; the others repeat it.

    >>> from jax.core import ShapedArray
    >>> layout = Layout(((("data", 8),), ()))
    >>> layout.parts, layout.part_bytes(ShapedArray((12, 4), "float32"))
    ((8, 1), 32)
    """

    axes: tuple[tuple[Axis, ...], ...]

    @functools.cached_property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each dimension is split."""
        return tuple(size_of(axes) for axes in self.axes)

    @functools.cached_property
    def all_axes(self) -> frozenset[Axis]:
        """The axes of all dimensions."""
        return frozenset(axis for axes in self.axes for axis in axes)

    def of(self, dimension: int) -> frozenset[Axis]:
        """The axes of one dimension."""
        return frozenset(self.axes[dimension])

    def part_shape(self, aval: Any) -> tuple[int, ...]:
        """Shape of the largest part, which each device has room for."""
        pairs = zip(aval.shape, self.parts, strict=True)
        return tuple([-(-size // parts) for size, parts in pairs])

    def part_bytes(self, aval: Any) -> int:
        """Bytes of the largest part."""
        return math.prod(self.part_shape(aval)) * aval.dtype.itemsize

    def stacked(self) -> Layout:
        """That of a stack of such arrays: every device has its part of each."""
        return Layout(((), *self.axes))


def size_of(axes: Iterable[Axis]) -> int:
    """How many devices differ along ``axes``."""
    return math.prod(size for _, size in axes)
