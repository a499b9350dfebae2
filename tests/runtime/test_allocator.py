"""XLA's allocator on paper: blocks lie apart, come back together, and are little larger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.runtime.allocator import Allocator

MIB = 2**20
SIZES = st.integers(1, 400 * MIB)
# Take so many bytes, or give back one of those that are out.
CALLS = st.lists(st.one_of(SIZES, st.none()), max_size=40)


@given(CALLS, st.randoms(use_true_random=False))
def test_blocks_lie_apart_and_are_less_than_twice_as_large(calls, random):
    memory = Allocator(2**36)
    out: dict[int, tuple[int, int]] = {}
    most = 0
    for nbytes in calls:
        before = memory.used
        if nbytes is not None:
            start = memory.take(nbytes)
            size = memory.used - before
            asked = -(-nbytes // 256) * 256
            assert asked <= size < 2 * asked or size == asked
            assert size - asked < 128 * MIB
            assert all(start >= a + n or a >= start + size for a, (_, n) in out.items())
            out[start] = nbytes, size
        elif out:
            start = random.choice(sorted(out))
            memory.give(start)
            assert before - memory.used == out.pop(start)[1]
        most = max(most, memory.used)
        assert memory.used == sum(size for _, size in out.values())
    assert memory.most == most
    for start in out:
        memory.give(start)
    assert memory.used == 0
    # All of it is one block again.
    assert memory.take(2**36) == 0


def test_the_smallest_block_that_will_do_goes_out():
    memory = Allocator(2**30)
    starts = {mib: memory.take(mib * MIB) for mib in (64, 1, 32, 1, 48, 1)}
    for mib in (64, 32, 48):
        memory.give(starts[mib])
    assert memory.take(40 * MIB) == starts[48]
    assert memory.take(20 * MIB) == starts[32]


def test_no_room_is_an_error():
    with pytest.raises(MemoryError, match="no free block has 1024 bytes"):
        Allocator(512).take(1000)
