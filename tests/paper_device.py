"""A device on paper: arrays without data, programs and copies that take time, and a memory.

It runs the bookkeeping of ``jaxmem.runtime.stream`` as it is, and knows nothing of its figures:
a buffer is free when nobody has the array any more and no copy from it or to it is under way.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

from jaxmem.program.ir import Value
from jaxmem.runtime import stream


class Allocator:
    """Best fit with coalescing, as XLA's: a free block that is hardly larger goes out whole.

    Attributes:
        used: bytes of the blocks that are out, and ``most`` the most there were.
    """

    def __init__(self, nbytes: int = 2**40):
        self.sizes, self.free = {0: nbytes}, {0}
        self.starts = [0]
        self.used = self.most = 0

    def take(self, nbytes: int) -> int:
        asked = max(256, -(-nbytes // 256) * 256)
        size, start = min((self.sizes[a], a) for a in self.free if self.sizes[a] >= asked)
        if size >= 2 * asked or size - asked >= 128 * 2**20:
            self._add(start + asked, size - asked)
            self.sizes[start] = size = asked
        self.free.discard(start)
        self.used += size
        self.most = max(self.most, self.used)
        return start

    def give(self, start: int) -> None:
        self.used -= self.sizes[start]
        self.free.add(start)
        n = self.starts.index(start)
        for left in (n, n - 1):
            pair = self.starts[max(left, 0) : left + 2]
            if len(pair) == 2 and self.free.issuperset(pair):
                self.sizes[pair[0]] += self.sizes.pop(pair[1])
                self.free.discard(pair[1])
                self.starts.remove(pair[1])

    def _add(self, start: int, size: int) -> None:
        self.sizes[start] = size
        self.free.add(start)
        bisect.insort(self.starts, start)


class Device:
    """Clocks of Python, the device's queue and both directions of the link; bytes in use."""

    def __init__(self, bytes_per_second: float):
        self.speed = bytes_per_second
        self.python = self.queue = self.inwards = self.outwards = 0.0
        self.live = self.most = 0
        self.allocator = Allocator()
        self.leaving: list[tuple[float, int, Block]] = []
        self.count = itertools.count()

    def settle(self) -> None:
        while self.leaving and self.leaving[0][0] <= self.python:
            self.give(heapq.heappop(self.leaving)[-1])

    def take(self, nbytes: int) -> Block:
        self.live += nbytes
        self.most = max(self.most, self.live)
        return Block(nbytes, self.allocator.take(nbytes))

    def give(self, block: Block) -> None:
        self.live -= block.nbytes
        self.allocator.give(block.start)


@dataclasses.dataclass(frozen=True)
class Block:
    nbytes: int
    start: int


class Buffer:
    """Memory of an array, until that is forgotten and what goes ``until`` then has ended."""

    def __init__(self, device: Device, nbytes: int):
        device.settle()
        self.device, self.block, self.until = device, device.take(nbytes), 0.0

    def __del__(self) -> None:
        device = self.device
        heapq.heappush(device.leaving, (self.until, next(device.count), self.block))
        device.settle()


@dataclasses.dataclass(frozen=True)
class Place:
    memory_kind: str
    # Whoever copies is on paper as well, and asks for none.
    addressable_devices: frozenset[Any] = frozenset()

    def with_memory_kind(self, kind: str) -> Place:
        return Place(kind)


class Array:
    """``buffer`` is none for what is on the host."""

    def __init__(
        self, device: Device, value: Value, ready: float = 0.0, buffer: Buffer | None = None
    ):
        self.device = device
        self.value, self.nbytes, self.ready, self.buffer = value, value.nbytes, ready, buffer
        self.sharding = Place("device" if buffer else "pinned_host")
        self.gone = False

    def devices(self) -> set[int]:
        return {0}

    def is_ready(self) -> bool:
        return self.ready <= self.device.python

    def is_deleted(self) -> bool:
        return self.gone

    def delete(self) -> None:
        self.gone, self.buffer = True, None


def copier(device: Device) -> type:
    class Copier:
        def __init__(self, _: Any):
            pass

        def put(self, arrays: Sequence[Array], places: Sequence[Any]) -> list[Array]:
            return [self.one(a, p) for a, p in zip(arrays, places, strict=True)]

        def one(self, array: Array, place: Any) -> Array:
            if isinstance(place, Place):
                assert array.buffer is None and not array.gone
                start = max(device.inwards, device.queue, device.python, array.ready)
                device.inwards = start + array.nbytes / device.speed
                buffer = Buffer(device, array.nbytes)
                buffer.until = device.inwards
                return Array(device, array.value, device.inwards, buffer)
            assert array.buffer is not None
            start = max(device.outwards, device.queue, device.python, array.ready)
            device.outwards = start + array.nbytes / device.speed
            array.buffer.until = device.outwards
            return Array(device, array.value, device.outwards)

        def mark(self) -> None:
            pass

        def end(self) -> Any:
            return _Mark(device.queue)

    return Copier


@dataclasses.dataclass(frozen=True)
class _Mark:
    ready: float


def waiting(device: Device) -> Callable[[Any], Any]:
    def block_until_ready(tree: Any) -> Any:
        for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Array | _Mark)):
            device.python = max(device.python, getattr(leaf, "ready", 0.0))
        device.settle()
        return tree

    return block_until_ready


def run_of(device: Device, part: Any, temp_bytes: int, seconds: float) -> Callable[..., list[Any]]:
    """A program: results take the buffers of what is donated, as far as shapes agree."""

    def run(*arrays: Array) -> list[Any]:
        assert not any(a.gone for a in arrays)
        device.queue = max(device.queue, device.python, *(a.ready for a in arrays)) + seconds
        given: dict[Any, list[Array]] = {}
        for n in part.donated:
            aval = arrays[n].value.aval
            given.setdefault((aval.shape, aval.dtype), []).append(arrays[n])
        found: list[Any] = []
        for v in part.block.outputs:
            if not isinstance(v, Value):
                found.append(v)
                continue
            free = given.get((v.aval.shape, v.aval.dtype))
            buffer = free.pop(0) if free else None
            own = buffer.buffer if buffer else Buffer(device, v.nbytes)
            if buffer:
                buffer.delete()
            found.append(Array(device, v, device.queue, own))
        device.give(device.take(temp_bytes))
        return found

    return run


def most_bytes(
    planned: stream.Stream, device: Device, seconds: Callable[[int], float], steps: int
) -> int:
    """The most device memory that steps in a row take, without what the allocator adds.

    Args:
        planned: a stream whose executables say what they take.
        device: in its first state.
        seconds: how long each part computes.
        steps: how many, each started as the one before is.
    """

    def on_paper(part: Any, executable: Any, seconds: float) -> Callable[..., list[Any]]:
        return run_of(device, part, executable.memory_analysis().temp_size_in_bytes, seconds)

    items = tuple(
        dataclasses.replace(item, run=on_paper(item.part, item.run, seconds(n)))
        for n, item in enumerate(planned.items)
    )
    first = on_paper(planned.cut.first, planned.first, seconds(len(items)))
    line = dataclasses.replace(planned, items=items, first=first)
    block, hosted = planned.cut.program.block, planned.cut.hosting.inputs
    given = block.inputs[: len(block.inputs) - len(planned.cut.lent)]
    arrays = [Array(device, v) if n in hosted else _here(device, v) for n, v in enumerate(given)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax, "block_until_ready", waiting(device))
        patched.setattr(stream, "Copier", copier(device))
        for _ in range(steps):
            run = stream._Run(line, arrays)
            run.begin()
            run.go_on()
            arrays = _next(planned, run, given, arrays)
            del run
    return device.most


def _here(device: Device, value: Value) -> Array:
    return Array(device, value, 0.0, Buffer(device, value.nbytes))


def _next(planned: stream.Stream, run: Any, given: Any, arrays: list[Array]) -> list[Array]:
    """The arrays of the next step: results in the places of what they replace."""
    places, outputs = planned.cut.program.places, planned.cut.program.block.outputs
    made = {**run.back, **run.env}
    found = list(arrays)
    for n, place in places.items():
        if (array := made.get(outputs[n])) is not None:
            found[place] = array
    return [a if not a.gone else run.on_host.get(v, a) for v, a in zip(given, found, strict=True)]
