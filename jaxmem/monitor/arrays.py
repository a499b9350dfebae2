"""The arrays of JAX that are alive: how many of each kind, and how many bytes on each device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax

from jaxmem import _compat
from jaxmem.errors import is_library
from jaxmem.monitor.figures import Figure, name_of

_HOST_KINDS = ("pinned_host", "unpinned_host")


@dataclass(frozen=True)
class Kind:
    """What arrays have in common.

    Attributes:
        shape: the array's, over all devices.
        dtype: its name.
        memory: ``"device"`` or the memory kind that it is in.
        device_bytes: bytes of one such array on each device that it is on.
        devices: their names.
    """

    shape: tuple[int, ...]
    dtype: str
    memory: str
    device_bytes: int
    devices: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one such array, with all of its copies."""
        return self.device_bytes * len(self.devices)


@dataclass(frozen=True)
class Live:
    """The arrays that are alive at one moment.

    Attributes:
        counts: how many there are of each kind.
        seconds: what looking took of its thread.
        ids: of the arrays, to tell new ones from old.
    """

    counts: dict[Kind, int]
    seconds: float
    ids: frozenset[int] = field(default=frozenset(), repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, host memory included."""
        return sum(kind.nbytes * count for kind, count in self.counts.items())

    def on(self, device: str) -> int:
        """Bytes in the memory of a device."""
        return sum(
            kind.device_bytes * count
            for kind, count in self.counts.items()
            if kind.memory == "device" and device in kind.devices
        )

    @property
    def pinned(self) -> Figure:
        """What is in pinned host memory; compiled programs may have more there."""
        kinds = ((k, n) for k, n in self.counts.items() if k.memory == "pinned_host")
        return Figure(sum(k.nbytes * n for k, n in kinds), "estimated")


def live_now(arrays: Sequence[Any] | None = None, *, remember: bool = False) -> Live:
    """The arrays that are alive now.

    Arrays that share a buffer count twice: JAX does not say which do.

    Args:
        arrays: the arrays; ``None`` for all that hold data.
        remember: keep which arrays these are.

    Cost:
        1 to 2 us of Python for each array.

    >>> x = jax.numpy.ones((16, 16))
    >>> live_now().nbytes >= x.nbytes
    True
    """
    started = time.thread_time()
    found: dict[tuple[Any, ...], int] = {}
    arrays = alive() if arrays is None else arrays
    for array in arrays:
        key = (array.shape, array.dtype, array.sharding)
        found[key] = found.get(key, 0) + 1
    counts: dict[Kind, int] = {}
    for (shape, dtype, sharding), count in found.items():
        kind = _kind(shape, dtype, sharding)
        counts[kind] = counts.get(kind, 0) + count
    ids = frozenset(map(id, arrays)) if remember else frozenset()
    return Live(counts, time.thread_time() - started, ids)


def alive() -> list[Any]:
    """The arrays that hold data; none before JAX has started, which this does not do."""
    if not _compat.has_started():
        return []
    arrays = [array for array in jax.live_arrays() if _compat.is_concrete(array)]
    return [array for array in arrays if not array.is_deleted()]


def has_failed(array: Any) -> bool:
    """Whether an array is the result of a program that failed, and holds nothing."""
    try:
        if array.is_ready():
            array.block_until_ready()
    except (RuntimeError, ValueError):
        return True
    return False


def kind_of(array: Any) -> Kind:
    """What kind an array is of."""
    return _kind(array.shape, array.dtype, array.sharding)


def _kind(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Kind:
    devices = sharding.addressable_devices
    default = next(iter(devices)).default_memory().kind if devices else None
    memory = sharding.memory_kind
    # The default memory of a CPU is called unpinned_host by some versions.
    memory = "device" if memory in (None, "device", default) else memory
    here = prod(sharding.shard_shape(shape)) * dtype.itemsize
    return Kind(tuple(shape), str(dtype), memory, here, tuple(sorted(map(name_of, devices))))


class Frame(NamedTuple):
    """A frame of the Python stack under which an array was made."""

    filename: str
    line: int
    function: str


def frames_of(array: Any) -> list[Frame]:
    """The stack under which an array was made, innermost first; empty where it is not kept."""
    kept = getattr(array, "traceback", None)
    return [
        Frame(frame.file_name, frame.line_num, frame.function_name)
        for frame in getattr(kept, "frames", ())
    ]


def made_at(array: Any) -> str:
    """``file.py:line (function)`` of the user's line that made an array; ``""`` if unknown."""
    for frame in frames_of(array):
        if not is_library(frame.filename):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.line} ({frame.function})"
    return ""


def bytes_on(live: Live, devices: Sequence[Any]) -> list[int]:
    """Bytes of live arrays on each device."""
    return [live.on(name_of(device)) for device in devices]
