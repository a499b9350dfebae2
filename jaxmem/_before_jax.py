"""What has to be set before JAX starts its backend: how much host memory XLA may pin.

XLA:GPU pins at most 64 GiB for a process, whatever the host has, unless a variable says otherwise
when the backend starts. The moments of seven billion parameters are more. The figure is a limit and
takes nothing itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# `GetGpuHostAllocator` of openxla/xla: one pool for each process, of 64 GiB unless this variable,
# a whole number of GiB read when the backend starts, says otherwise.
LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_LIMIT = 64
# Of a host's memory; data loading, the program itself and other processes need the rest. XLA's pool
# doubles until it is at its limit: with all of a host's memory as the limit it was killed.
USABLE_SHARE = 0.8
# Whether this process raised it.
raised = False


def raise_limit() -> None:
    """Let XLA pin most of the host's memory, unless a limit was set or JAX has started."""
    global raised
    if sys.platform != "linux" or LIMIT_VARIABLE in os.environ or _has_started():
        return
    try:
        limit = int(host_bytes() * USABLE_SHARE) // 2**30
    except (OSError, ValueError):
        return  # XLA's own limit stays, and doctor tells it; an import must not fail for it.
    if limit > DEFAULT_LIMIT:
        os.environ[LIMIT_VARIABLE] = str(limit)
        raised = True


def host_bytes() -> int:
    """Bytes of memory this process may use: physical memory, or a lower cgroup limit."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _cgroup_limits(memberships: Path, root: Path) -> list[int]:
    """Limits of the process's cgroup and of every one above it, for cgroup versions 1 and 2."""
    folders = [root / "memory"]
    if memberships.is_file():
        for line in memberships.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root if not controllers else root / "memory"
            if not controllers or "memory" in controllers.split(","):
                own = base / path.lstrip("/")
                folders += [own, *(f for f in own.parents if f.is_relative_to(base))]
    files = [f / name for f in folders for name in ("memory.max", "memory.limit_in_bytes")]
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text.isdigit()]


def _has_started() -> bool:
    """Whether JAX has a backend already: it then has read the variable."""
    if "jax" not in sys.modules:
        return False
    from jaxmem import _compat

    return _compat.has_started()
