"""Read from a compiled program how its values are split, where that can be in several ways.

XLA's partitioner writes the program of one device: a value of 16 x 2048 that is split over its rows
on two devices is an array of 8 x 2048 there, and one of 16 x 1024 where its columns are split. So
the shapes that the program names say which of several layouts a value has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxmem.program.ir import Value
from jaxmem.program.layout import Layout

_SHAPE = re.compile(r"\b[a-z]\w*\[[\d,]*\]")
# NumPy's names of types, and XLA's.
_TYPES = {
    "bool": "pred",
    "bfloat": "bf",
    "float": "f",
    "uint": "u",
    "int": "s",
    "complex": "c",
}


def chosen(values: Sequence[Value], ways: Sequence[Sequence[Layout]], text: str) -> list[Layout]:
    """For each value the one of its layouts with which it is in a compiled program.

    Where that has the arrays of none of them, as they are fused or have another shape there, or of
    several, the value is split in the way of most bytes of the others; without any, the first way.

    Args:
        values: arrays of the program before it was partitioned.
        ways: of each way to split them the layouts of all of them.
        text: the compiled program's.

    Returns:
        One layout for each value.
    """
    shapes = set(_SHAPE.findall(text))
    votes = [0] * len(ways)
    found: list[Layout | None] = []
    for value, layouts in zip(values, zip(*ways, strict=True), strict=True):
        there = [shape_of(value.aval, layout) in shapes for layout in layouts]
        only = there.index(True) if sum(there) == 1 else None
        found.append(None if only is None else layouts[only])
        if only is not None:
            votes[only] += layouts[only].part_bytes(value.aval)
    usual = ways[votes.index(max(votes))]
    return [its or layout for its, layout in zip(found, usual, strict=True)]


def shape_of(aval: Any, layout: Layout) -> str:
    """An array's part on one device, as XLA writes its shape.

    >>> from jax.core import ShapedArray
    >>> shape_of(ShapedArray((16, 2048), "bfloat16"), Layout(((("data", 2),), ())))
    'bf16[8,2048]'
    """
    name = aval.dtype.name
    for long, short in _TYPES.items():
        if name.startswith(long):
            name = short + name.removeprefix(long).replace("_", "")
            break
    sizes = [-(-size // parts) for size, parts in zip(aval.shape, layout.parts, strict=True)]
    return f"{name}[{','.join(map(str, sizes))}]"
