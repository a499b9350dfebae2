"""A step in pieces rehearsed: its own bookkeeping, with arrays that hold nothing.

``stream`` runs as it is; programs and copies only take time, and memory of a device with XLA's
allocator. None of the plan's figures is used: a buffer is free when nobody has its array any more
and no copy from it or to it is under way.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from jaxmem.program.ir import Block, Value
from jaxmem.runtime.allocator import Allocator
from jaxmem.runtime.stream import Run, Stream


class Device:
    """Clocks of Python, the device's queue and both directions of the link; bytes in use.

    Attributes:
        most: the most bytes of arrays at once; what the allocator gave out for them is
            ``allocator.most``.
    """

    def __init__(self, bytes_per_second: float):
        self.speed = bytes_per_second
        self.python = self.queue = self.inwards = self.outwards = 0.0
        self.live = self.most = 0
        self.allocator = Allocator()
        self._leaving: list[tuple[float, int, _Block]] = []
        self._count = itertools.count()

    def take(self, nbytes: int) -> _Block:
        self.live += nbytes
        self.most = max(self.most, self.live)
        return _Block(nbytes, self.allocator.take(nbytes))

    def give(self, block: _Block) -> None:
        self.live -= block.nbytes
        self.allocator.give(block.start)

    def give_later(self, block: _Block, when: float) -> None:
        heapq.heappush(self._leaving, (when, next(self._count), block))
        self.settle()

    def restart(self) -> None:
        """Forget the most that there was."""
        self.settle()
        self.most, self.allocator.most = self.live, self.allocator.used

    def settle(self) -> None:
        """Take back what is free by now."""
        while self._leaving and self._leaving[0][0] <= self.python:
            self.give(heapq.heappop(self._leaving)[-1])


@dataclasses.dataclass(frozen=True)
class _Block:
    nbytes: int
    start: int


class _Buffer:
    """Memory of an array, until that is forgotten and what goes ``until`` then has ended."""

    def __init__(self, device: Device, nbytes: int):
        device.settle()
        self.device, self.block, self.until = device, device.take(nbytes), 0.0

    def __del__(self) -> None:
        self.device.give_later(self.block, self.until)


@dataclasses.dataclass(frozen=True)
class _Place:
    memory_kind: str

    def with_memory_kind(self, kind: str) -> _Place:
        return _Place(kind)


class _Array:
    """``buffer`` is none for what is on the host."""

    def __init__(
        self, device: Device, value: Value, ready: float = 0.0, buffer: _Buffer | None = None
    ):
        self.device = device
        self.value, self.nbytes, self.ready, self.buffer = value, value.nbytes, ready, buffer
        self.sharding = _Place("device" if buffer else "pinned_host")
        self.gone = False

    def moved(self, place: _Place) -> _Array:
        """The array there, which results are that are arguments or other results as they are."""
        if place == self.sharding:
            return self
        here = place.memory_kind == "device"
        buffer = _Buffer(self.device, self.nbytes) if here else None
        return _Array(self.device, self.value, self.ready, buffer)

    def is_ready(self) -> bool:
        return self.ready <= self.device.python

    def is_deleted(self) -> bool:
        return self.gone

    def delete(self) -> None:
        self.gone, self.buffer = True, None


@dataclasses.dataclass(frozen=True)
class _Mark:
    ready: float


class _Copier:
    """Copies wait for what was in the device's queue, and for each other."""

    def __init__(self, device: Device):
        self.device = device

    def put(self, arrays: Sequence[_Array], places: Sequence[Any]) -> list[_Array]:
        return [self._one(a, p) for a, p in zip(arrays, places, strict=True)]

    def _one(self, array: _Array, place: Any) -> _Array:
        device = self.device
        earliest = max(device.queue, device.python, array.ready)
        if isinstance(place, _Place):  # The layouts of results are real ones.
            assert array.buffer is None and not array.gone
            device.inwards = max(device.inwards, earliest) + array.nbytes / device.speed
            buffer = _Buffer(device, array.nbytes)
            buffer.until = device.inwards
            return _Array(device, array.value, device.inwards, buffer)
        assert array.buffer is not None
        device.outwards = max(device.outwards, earliest) + array.nbytes / device.speed
        array.buffer.until = device.outwards
        return _Array(device, array.value, device.outwards)

    def mark(self) -> None:
        pass

    def end(self) -> _Mark:
        return _Mark(self.device.queue)

    def wait(self, tree: Any) -> Any:
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, _Array | _Mark))
        ready = [leaf.ready for leaf in leaves if isinstance(leaf, _Array | _Mark)]
        self.device.python = max([self.device.python, *ready])
        self.device.settle()
        return tree


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A program on the device: results take the buffers of what is donated, if shapes agree.

    Attributes:
        block: what it takes and gives; ``donated`` of that.
        hosted: results that are written to host memory.
        temp_bytes: of the executable.
        seconds: that it computes.
    """

    device: Device
    block: Block
    donated: Sequence[int]
    hosted: Collection[Any]
    temp_bytes: int
    seconds: float

    def __call__(self, *arrays: _Array) -> list[Any]:
        device = self.device
        assert not any(array.gone for array in arrays)
        waited = [device.queue, device.python, *(a.ready for a in arrays)]
        device.queue = max(waited) + self.seconds
        given: dict[Any, list[_Array]] = {}
        for n in self.donated:
            given.setdefault(_form(arrays[n].value), []).append(arrays[n])
        found = [self._result(v, given) for v in self.block.outputs]
        device.give(device.take(self.temp_bytes))
        return found

    def _result(self, value: Any, given: dict[Any, list[_Array]]) -> Any:
        if not isinstance(value, Value):
            return value
        free = given.get(_form(value))
        old = free.pop(0) if free else None
        buffer = old.buffer if old else None
        if old:
            old.delete()
        if buffer is None and value not in self.hosted:
            buffer = _Buffer(self.device, value.nbytes)
        return _Array(self.device, value, self.device.queue, buffer)


def _form(value: Value) -> tuple[Any, ...]:
    """Equal for arrays of which one may take the other's memory."""
    return value.aval.shape, value.aval.dtype, value.nbytes


def rehearsed(
    stream: Stream,
    bytes_per_second: float,
    seconds: Callable[[int], float],
    steps: int,
    made: Callable[[list[Value]], Sequence[Value]] | None = None,
) -> Device:
    """A device after steps in a row, each started as the one before is.

    Args:
        stream: whose executables say what they take.
        bytes_per_second: of the link, in each direction.
        seconds: how long each part computes, by its number; the first one comes last.
        steps: how many.
        made: gives the order in which all arguments were made on the device, from where those that
            wait on the host then left; they were never there without it.
    """
    device = Device(bytes_per_second)

    def program(run: Any, block: Block, donated: Any, hosted: Any, number: int) -> _Program:
        temp_bytes = run.memory_analysis().temp_size_in_bytes
        return _Program(device, block, donated, hosted, temp_bytes, seconds(number))

    items = tuple(
        dataclasses.replace(item, run=program(item.run, part.block, part.donated, part.hosted, n))
        for n, (item, part) in enumerate((item, item.part) for item in stream.items)
    )
    first = stream.cut.first
    line = dataclasses.replace(
        stream,
        items=items,
        first=program(stream.first, first.block, first.donated, (), len(items)),
    )
    inputs, hosted = stream.cut.program.block.inputs, stream.cut.hosting.inputs
    # What is lent is the leaves themselves.
    given = {v: n in hosted for n, v in enumerate(inputs) if v not in stream.cut.lent}
    # The step's own buffers are never there.
    theirs = [v for v in given if v not in {v for _, v in stream.cut.buffers}]
    order = made(theirs) if made else [v for v in given if not given[v]]
    buffers = {v: _Buffer(device, v.nbytes) for v in order}
    arrays = {v: _Array(device, v, 0.0, None if given[v] else buffers[v]) for v in given}
    buffers.clear()
    device.restart()
    for _ in range(steps):
        run = Run(line, list(arrays.values()), _Copier(device))
        run.begin()
        run.go_on()
        arrays = _next(stream, run, arrays)
        del run
    return device


def _next(stream: Stream, run: Run, arrays: dict[Value, _Array]) -> dict[Value, _Array]:
    """The arrays of the next step: results in the places of what they replace."""
    block, places = stream.cut.program.block, stream.cut.program.places
    # As atoms some are literals, which nothing has made.
    back, env, on_host = (dict[Any, Any](d) for d in (run.back, run.env, run.on_host))
    found = dict(arrays)
    for n, place in places.items():
        atom, given = block.outputs[n], run.given.get(n)
        if n in stream.cut.hosting.results:
            array = back.get(atom, on_host.get(atom, given))
        else:
            array = env.get(atom, on_host.get(atom)) if given is None else given
        if array is not None:
            found[block.inputs[place]] = array
    now = {v: on_host.get(v, a) if a.gone else a for v, a in found.items()}
    return {v: now[v].moved(arrays[v].sharding) for v in now}
