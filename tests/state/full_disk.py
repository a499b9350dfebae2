"""Saves on a disk of 24 MiB that fills up meanwhile; prints what holds. See test_full_disk.py.

Alone, or as one of several processes, of which the first fills the disk.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem import processes
from jaxmem.errors import CheckpointError
from jaxmem.state import writing
from tests import cluster

MIB = 2**20
# No compression makes them smaller.
FIRST = np.random.default_rng(0).integers(0, 2**32, (4, 8, MIB // 16), dtype=np.uint32)
NBYTES = FIRST.nbytes


@functools.partial(jax.jit, donate_argnums=0)
def train(state: list[jax.Array]) -> list[jax.Array]:
    return [w * 1664525 + 1013904223 for w in state]


def after(steps: int) -> list[np.ndarray]:
    found = [*FIRST]
    for _ in range(steps):
        found = [w * np.uint32(1664525) + np.uint32(1013904223) for w in found]
    return found


def assert_is(state: list[jax.Array], steps: int) -> None:
    for found, expected in zip(state, after(steps), strict=True):
        for part in found.addressable_shards:
            np.testing.assert_array_equal(part.data, expected[part.index])


def together(phase: str) -> None:
    if processes.several():
        processes.meet(phase, 60)


class Disk:
    """A small one, and a file of somebody else's that fills it."""

    def __init__(self, path: Path):
        self.filler = path / "filler"
        self.run = path / "run"

    def fill(self, leave: int) -> None:
        if processes.number() == 0:
            with self.filler.open("wb") as file:
                file.write(bytes(shutil.disk_usage(self.filler.parent).free - leave))

    def empty(self) -> None:
        together("have all seen what there was")
        if processes.number() == 0:
            self.filler.unlink()
        together("have the disk emptied")

    def check(self, there: list[str]) -> None:
        """What is in the directory, when all have looked: no leftovers."""
        together("look at the directory")
        assert sorted(p.name for p in self.run.iterdir()) == there, [*self.run.rglob("*")]
        together("have looked at the directory")


def said(do: Callable[[], object], *parts: str) -> None:
    try:
        do()
    except CheckpointError as error:
        for part in parts:
            assert part in str(error), f"{part!r} is not in: {error}"
    else:
        raise AssertionError("it was written")


def filling_meanwhile(disk: Disk, leave: int) -> Callable[[], None]:
    """The disk fills up when the next save has seen that there is room; returns what ends that."""
    look = writing.Directory._check_room

    def then_fill(self: writing.Directory, nbytes: int) -> None:
        look(self, nbytes)
        disk.fill(leave)

    writing.Directory._check_room = then_fill
    return lambda: setattr(writing.Directory, "_check_room", look)


def main(directory: Path) -> None:
    if len(sys.argv) > 2:
        cluster.initialize()
    disk = Disk(directory)
    over = jax.make_mesh((jax.device_count(),), ("d",))
    place = NamedSharding(over, PartitionSpec("d"))
    state = [
        jax.make_array_from_callback(w.shape, place, lambda index, w=w: w[index]) for w in FIRST
    ]
    like = [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=place) for w in state]
    save = functools.partial(jaxmem.save, disk.run, timeout=60)
    save(state, step=0, wait=True)

    disk.fill(leave=NBYTES // 2)
    together("save on a disk that is half full")
    state = train(state)
    said(lambda: save(state, step=1), "takes up to 8.0MiB, and 4.0MiB are free", "Make room")
    disk.check(["0"])
    assert_is(jaxmem.restore(disk.run, like), 0)
    disk.empty()
    print("a disk without room: holds")

    steps = 1
    for leave, free in ((NBYTES // 2, "4.0MiB"), (0, "0B")):
        restored = filling_meanwhile(disk, leave)
        writes = save(state, step=1)
        restored()
        state = train(state)
        steps += 1
        needed = f"Its arrays take 8.0MiB; {free} are free there without it."
        told = ("No space left on device", needed, "that are there: 0. Make room there")
        said(writes.wait, "could not be written", *told)
        disk.check(["0"])
        assert_is(jaxmem.restore(disk.run, like), 0)
        again = functools.partial(save, state, step=1)
        said(again, f"takes up to 8.0MiB, and {free} are free there")
        disk.empty()
    print("a disk that fills up while it is written: holds")

    assert_is(state, steps)
    save(state, step=1, keep=1, wait=True)
    disk.check(["1"])
    assert_is(jaxmem.restore(disk.run, like), steps)
    print("training and saving go on: holds")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
