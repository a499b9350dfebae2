"""What memory is in use, on each device and on the host, and how each figure came about."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxmem.units import format_bytes

# allocator: the device's allocator says so now. allocator peak: its own maximum, complete.
# sampled: the largest of what was seen at some moments, so the truth may be more. estimated: the
# sum of the live arrays; what compiled programs use while they run is not in it. inferred: follows
# from what failed. process: the operating system's.
How = Literal["allocator", "allocator peak", "sampled", "estimated", "inferred", "process"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Figure:
    """An amount of memory.

    Attributes:
        nbytes: how much.
        how: where it comes from, which is what it can be trusted for.

    >>> print(Figure(3 * 2**20, "sampled"))
    3.0MiB (sampled)
    """

    nbytes: int
    how: How

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)} ({self.how})"


@dataclass(frozen=True)
class DeviceMemory:
    """What one device has in use; ``None`` where its allocator does not say.

    Attributes:
        device: such as ``"cuda:0"``.
        in_use: bytes that are taken.
        peak: the most that was taken since the process started.
        reserved: what the allocator holds of the device, in use or not.
        largest_free: the largest block that could be had without moving anything.
        limit: what may be allocated.
    """

    device: str
    in_use: Figure
    peak: Figure | None = None
    reserved: Figure | None = None
    largest_free: Figure | None = None
    limit: Figure | None = None

    @property
    def free_bytes(self) -> int | None:
        """What is left below the limit, in however many pieces; ``None`` without a limit."""
        return None if self.limit is None else max(0, self.limit.nbytes - self.in_use.nbytes)


@dataclass(frozen=True)
class HostMemory:
    """What this process has of its host.

    Attributes:
        rss: resident memory of the process.
        pinned: arrays in pinned host memory.
    """

    rss: Figure | None
    pinned: Figure


def stats_of(device: Any) -> dict[str, int] | None:
    """What the allocator of a device says; ``None`` on CPUs and of allocators that say nothing."""
    try:
        return device.memory_stats() or None
    except jax.errors.JaxRuntimeError:  # Not implemented by this backend.
        return None


def devices_now(estimated: Sequence[int], devices: Sequence[Any]) -> tuple[DeviceMemory, ...]:
    """What each device has in use now.

    Args:
        estimated: bytes of live arrays on each device, for those that cannot say.
        devices: devices of this process.

    >>> (cpu,) = devices_now([4096], jax.local_devices()[:1])
    >>> cpu.in_use.how in ("estimated", "allocator")
    True
    """
    return tuple(map(_device_now, devices, estimated))


def _device_now(device: Any, estimated: int) -> DeviceMemory:
    stats = stats_of(device)
    name = name_of(device)
    if stats is None or "bytes_in_use" not in stats:
        return DeviceMemory(name, Figure(estimated, "estimated"))
    # XLA's BFC allocator has 0 where it does not keep a figure. Of a pool the part that is free
    # counts; without one nothing is reserved.
    reserved = stats.get("pool_bytes") or stats.get("bytes_reserved")
    largest, limit = stats.get("largest_free_block_bytes"), stats.get("bytes_limit")
    peak = stats.get("peak_bytes_in_use")
    return DeviceMemory(
        name,
        Figure(stats["bytes_in_use"], "allocator"),
        peak=None if peak is None else Figure(peak, "allocator peak"),
        reserved=Figure(reserved, "allocator") if reserved else None,
        largest_free=Figure(largest, "allocator") if largest else None,
        limit=Figure(limit, "allocator") if limit else None,
    )


def name_of(device: Any) -> str:
    """How a device is named here.

    >>> name_of(jax.devices("cpu")[0])
    'cpu:0'
    """
    platform = "cuda" if device.platform == "gpu" else device.platform
    return f"{platform}:{device.id}"


def rss_now() -> Figure | None:
    """Resident memory of this process; ``None`` where there is no ``/proc``."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 a third of pathlib's time
            return Figure(int(file.read().split()[1]) * _PAGE_BYTES, "process")
    except OSError:
        return None
