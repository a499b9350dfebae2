"""Where little is live: the low places of a sequence of widths.

Between the blocks of a network little crosses from one operation to the next. Keeping what is live
there and nothing else is the classic checkpointing of blocks (Chen et al. 2016), found from the
program instead of being written by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence

# A valley must be this much lower than the hills on both sides of it.
_PROMINENCE = 1.2


def low_positions(widths: Sequence[int], held: Sequence[Collection]) -> Iterator[int]:
    """Positions no wider than half of all are, one for each set of live values.

    These are the cuts of a chain without valleys, such as layers of equal width.

    >>> list(low_positions([4, 4, 9, 4, 9], [("a",), ("a",), ("a", "b"), ("c",), ("c", "d")]))
    [0, 3]
    """
    low = statistics.median_low([w for w, names in zip(widths, held, strict=True) if names] or [0])
    before: Collection = ()
    for index, (width, names) in enumerate(zip(widths, held, strict=True)):
        if names and width <= low and names != before:
            before = names
            yield index


def valley_positions(widths: Sequence[int]) -> Iterator[int]:
    """Positions of local minima that stand out from the hills on both sides.

    >>> list(valley_positions([5, 1, 5, 2, 6]))
    [1, 3]
    >>> list(valley_positions([5, 5, 5]))
    []
    """
    low, low_at = None, -1
    hill = 0
    for index, width in enumerate(widths):
        if low is None:
            hill = max(hill, width)
            if width and width * _PROMINENCE <= hill:
                low, low_at = width, index
        elif width < low:
            low, low_at = width, index
        elif width >= low * _PROMINENCE:
            yield low_at
            low, hill = None, width
