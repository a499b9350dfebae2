"""Saves 3 GiB, or restores them and prints what that took beside. See test_restored_size.py."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem

NUMBER, SHAPE = 12, (1024, 65536)
NBYTES = NUMBER * 4 * SHAPE[0] * SHAPE[1]


def place(kind: str) -> NamedSharding:
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    return NamedSharding(mesh, PartitionSpec("d"), memory_kind=kind)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(directory: Path, what: str) -> None:
    if what == "save":
        state = {str(n): np.full(SHAPE, n, np.float32) for n in range(NUMBER)}
        jaxmem.save(directory, state, step=0, wait=True)
        return
    if what == "numpy":
        like = {str(n): np.zeros(SHAPE, np.float32) for n in range(NUMBER)}
    else:
        shape = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=place(what))
        like = {str(n): shape for n in range(NUMBER)}
    before = resident_bytes()
    state = jaxmem.restore(directory, like)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for n, array in state.items():
        part = array if what == "numpy" else np.asarray(array.addressable_shards[-1].data)
        assert (part[:, ::1024] == int(n)).all()
    print((peak - before - NBYTES) / NBYTES)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
