"""How much pinned host memory a process may use: what a plan that offloads stands on."""

from __future__ import annotations

import os
import platform
from typing import Any, NamedTuple

from jaxmem import _before_jax
from jaxmem._before_jax import DEFAULT_LIMIT, LIMIT_VARIABLE
from jaxmem.units import format_bytes

DEFAULT_BYTES = DEFAULT_LIMIT * 2**30
# Windows gives its Linux subsystem little memory to pin, whatever the machine has: allocations
# failed above 500 MB (microsoft/WSL#14078) and near 1 GB (NVIDIA/nvidia-docker#1725).
WSL_BYTES = 500 * 10**6


class Pinned(NamedTuple):
    """Pinned host memory of one process.

    Attributes:
        limit_bytes: the most of it that the process can have; 0 where there is none.
        source: where the limit comes from.
    """

    limit_bytes: int
    source: str


def pinned(device: Any, host_bytes: int) -> Pinned:
    """What pinned memory the process of ``device`` may have.

    Args:
        device: a device of this process.
        host_bytes: bytes of memory that the process may use.
    """
    if "pinned_host" not in [memory.kind for memory in device.addressable_memories()]:
        return Pinned(0, f"pinned host memory: {device.device_kind} has none")
    if device.platform == "cpu":
        return Pinned(host_bytes, "pinned host memory: that of the host")
    if in_wsl():
        return Pinned(min(host_bytes, WSL_BYTES), "pinned host memory assumed: what WSL allows")
    given = os.environ.get(LIMIT_VARIABLE, "")
    if given.strip().isdigit():
        limit = int(given) * 2**30
        source = "raised by jaxmem" if _before_jax.raised else LIMIT_VARIABLE
    else:
        limit, source = DEFAULT_BYTES, "XLA's default"
    if host_bytes < limit:
        return Pinned(host_bytes, "pinned host memory: all that the process may use")
    return Pinned(limit, f"pinned host memory: {source}, {format_bytes(limit)}")


def in_wsl() -> bool:
    """Whether this is Linux under Windows."""
    return "microsoft" in platform.release().lower()
