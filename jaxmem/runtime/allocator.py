"""XLA's allocator on paper: which block of a device's memory each array is given."""

from __future__ import annotations

import bisect

# Blocks are multiples of this. One that is not twice what is asked for, and less than so much
# larger, goes out whole (``BFCAllocator`` in XLA).
_UNIT, _WHOLE_BYTES = 256, 128 * 2**20


class Allocator:
    """Best fit with coalescing.

    Attributes:
        used: bytes of the blocks that are out, and ``most`` the most there were: what
            ``memory_stats()["peak_bytes_in_use"]`` says.

    >>> memory = Allocator(3 * 2**20)
    >>> first, second = memory.take(2**20), memory.take(3 * 2**19)
    >>> memory.give(second), memory.take(2**20), memory.used / 2**20  # 2 MiB are free, 1 asked for
    (None, 1048576, 2.0)
    """

    def __init__(self, nbytes: int = 2**50):
        self._sizes, self._free, self._starts = {0: nbytes}, {0}, [0]
        self.used = self.most = 0

    def take(self, nbytes: int) -> int:
        """Where the block for an array starts.

        Raises:
            MemoryError: no free block is large enough.
        """
        asked = max(_UNIT, -(-nbytes // _UNIT) * _UNIT)
        large = [(self._sizes[start], start) for start in self._free if self._sizes[start] >= asked]
        if not large:
            raise MemoryError(f"no free block has {asked} bytes")
        size, start = min(large)
        if size >= 2 * asked or size - asked >= _WHOLE_BYTES:
            self._add(start + asked, size - asked)
            self._sizes[start] = size = asked
        self._free.discard(start)
        self.used += size
        self.most = max(self.most, self.used)
        return start

    def give(self, start: int) -> None:
        """Take a block back; it becomes one with the free ones beside it."""
        self.used -= self._sizes[start]
        self._free.add(start)
        at = bisect.bisect_left(self._starts, start)
        for left in (at, at - 1):
            pair = self._starts[max(left, 0) : left + 2]
            if len(pair) == 2 and self._free.issuperset(pair):
                self._sizes[pair[0]] += self._sizes.pop(pair[1])
                self._free.discard(pair[1])
                self._starts.remove(pair[1])

    def _add(self, start: int, size: int) -> None:
        self._sizes[start] = size
        self._free.add(start)
        bisect.insort(self._starts, start)
