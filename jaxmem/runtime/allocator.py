"""XLA's allocator on paper: which block of a device's memory each array is given."""

from __future__ import annotations

import bisect

# Blocks are multiples of this. One that is not twice what is asked for, and less than so much
# larger, goes out whole (``BFCAllocator`` in XLA).
_UNIT, _WHOLE_BYTES = 256, 128 * 2**20


class Allocator:
    """Best fit with coalescing. Its memory is as good as endless: no request is refused for holes.

    Attributes:
        used: bytes of the blocks that are out, and ``most`` the most there were: what
            ``memory_stats()["peak_bytes_in_use"]`` says.

    >>> memory = Allocator(3 * 2**20)
    >>> first, second = memory.take(2**20), memory.take(3 * 2**19)
    >>> memory.give(second), memory.take(2**20), memory.used / 2**20  # 2 MiB are free, 1 asked for
    (None, 1048576, 2.0)
    """

    def __init__(self, nbytes: int = 2**50):
        # The blocks by where they start, those starts in order, and the free ones by size.
        self._sizes, self._starts = {0: nbytes}, [0]
        self._free = [(nbytes, 0)]
        self.used = self.most = 0

    def take(self, nbytes: int) -> int:
        """Where the block for an array starts.

        Raises:
            MemoryError: no free block is large enough.
        """
        asked = max(_UNIT, -(-nbytes // _UNIT) * _UNIT)
        at = bisect.bisect_left(self._free, (asked, -1))
        if at == len(self._free):
            raise MemoryError(f"no free block has {asked} bytes")
        size, start = self._free.pop(at)
        if size >= 2 * asked or size - asked >= _WHOLE_BYTES:
            rest = start + asked
            self._sizes[start], self._sizes[rest] = asked, size - asked
            bisect.insort(self._starts, rest)
            bisect.insort(self._free, (size - asked, rest))
        self.used += self._sizes[start]
        self.most = max(self.most, self.used)
        return start

    def give(self, start: int) -> None:
        """Take a block back; it becomes one with the free ones beside it."""
        size = self._sizes[start]
        self.used -= size
        at = bisect.bisect_left(self._starts, start)
        if at + 1 < len(self._starts) and self._leaves(after := self._starts[at + 1]):
            del self._starts[at + 1]
            size += self._sizes.pop(after)
        if at and self._leaves(before := self._starts[at - 1]):
            del self._starts[at], self._sizes[start]
            start, size = before, size + self._sizes[before]
        self._sizes[start] = size
        bisect.insort(self._free, (size, start))

    def _leaves(self, start: int) -> bool:
        """Whether a block was free, and is not among those any more."""
        block = self._sizes[start], start
        at = bisect.bisect_left(self._free, block)
        free = at < len(self._free) and self._free[at] == block
        if free:
            del self._free[at]
        return free
