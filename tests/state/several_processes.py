"""Checkpoints of several processes; prints what holds. See test_checkpoint_processes.py."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.state import together, writing
from tests import cluster

W = np.random.default_rng(0).random((16, 24)).astype(np.float32)


def split(*axes: str | None, host: bool = False) -> NamedSharding:
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"))
    found = NamedSharding(mesh, PartitionSpec(*axes))
    return found.with_memory_kind("pinned_host") if host else found


def put(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def places() -> list[NamedSharding]:
    return [
        split("a"),
        split("b"),
        split(("b", "a")),
        split("b", "a"),
        split(None, "b"),
        split(),
        split("b", host=True),
    ]


def state() -> dict:
    """Every kind of leaf that processes share, or have each for itself."""
    return {
        "split": [put(W + n, place) for n, place in enumerate(places())],
        "key": put(np.asarray(jax.random.key_data(jax.random.key(7))), split()),
        "empty": put(np.zeros((0, 4), np.float32), split()),
        "alone": jnp.arange(5.0),
        "weak": jnp.asarray(0.5),
        "numpy": np.arange(3.0),
        "scalar": np.float32(0.1),
        "epoch": 3,
        "name": "run one",
    }


def same(found: dict, expected: dict) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b), (a, b)
        if isinstance(a, jax.Array):
            assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
            assert a.sharding == b.sharding, (a.sharding, b.sharding)
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                np.testing.assert_array_equal(x.data, y.data)
        else:
            np.testing.assert_array_equal(a, b)


def blank(found: dict) -> dict:
    def other(x):
        if isinstance(x, jax.Array) and x.committed:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        return x * 0 if hasattr(x, "dtype") else type(x)()

    return jax.tree.map(other, found)


class Slow:
    """What is being written, and takes longer than process 0 takes to fail and to delete.

    ``found`` is told whether its directory is there to the end.
    """

    def __init__(self, future: Any, place: Path, found: list[bool]):
        self.future, self.place, self.found = future, place, found

    def result(self) -> None:
        time.sleep(0.5)
        self.found.append(self.place.is_dir())
        self.future.result()


def failing_while_others_write(run: Path, me: int, large: jax.Array) -> None:
    """What is half-written is deleted when nobody writes there: TensorStore may hang otherwise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    begin, there = together._begin, list[bool]()
    together._begin = lambda split, place: [Slow(f, place, there) for f in begin(split, place)]
    if me == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))
    text = cluster.said(lambda: jaxmem.save(run, {"w": large}, step=3, wait=True))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    together._begin = begin
    assert "could not be written by process 0: " in text, text
    assert all(there), "its directory went while it wrote"
    assert bool(there) == (me > 0)
    left = [p.name for p in run.iterdir() if p.name.startswith("3.")]
    assert left == [], left


def failing_meanwhile(run: Path, me: int, large: jax.Array) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, pause in (
        (4, 0.0),
        (7, 2.0),
    ):  # Until the next save it is known to one of them, or to both.
        if me:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))
        jaxmem.save(run, {"w": large}, step=step)
        time.sleep(pause * me)
        text = cluster.said(lambda number=step + 1: jaxmem.save(run, {"w": large}, step=number))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "could not be written by process 1: " in text, text
        jaxmem.save(run, {"w": large}, step=step + 2, keep=1, wait=True)
    if me:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))
    jaxmem.save(run, {"w": large}, step=20)
    time.sleep(2 * me)
    text = cluster.said(lambda: jaxmem.restore(run, {"w": large}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "could not be written by process 1: " in text, text
    same(jaxmem.restore(run, {"w": large}), {"w": large})
    print("a save that failed meanwhile is said once, on all: holds")


def damaged_anywhere(place: Path, me: int, expected: dict) -> None:
    """Each process looks at its share of the files, and all raise what one of them found."""
    files = sorted(p for p in place.rglob("*") if p.is_file())
    assert len(files) > 15
    for file in files:
        name, whole = file.relative_to(place).as_posix(), file.read_bytes()
        if me == 0:
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        text = cluster.said(lambda: jaxmem.restore(place.parent, blank(expected)))
        if me == 0:
            file.write_bytes(whole)
        assert "31 is damaged: " in text, (name, text)
        assert name in text or name == "jaxmem/metadata", (name, text)


def completing_slowly(run: Path, expected: dict) -> None:
    ends = writing.Directory.wait

    def slowly(directory) -> None:
        time.sleep(4 * (threading.current_thread() is not threading.main_thread()))
        ends(directory)

    writing.Directory.wait = slowly
    jaxmem.save(run, expected, step=31, keep=1, timeout=1.5).wait()
    writing.Directory.wait = ends
    same(jaxmem.restore(run, blank(expected)), expected)
    print("a process that takes long to complete it: holds")


def main(directory: Path) -> None:
    me = cluster.initialize()
    expected = state()

    # Of one process, which saved before.
    like = {
        str(n): jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=s) for n, s in enumerate(places())
    }
    found = jaxmem.restore(directory / "one", like)
    same(found, {str(n): put(W, place) for n, place in enumerate(places())})
    print("one to several: holds")

    run = directory / "several"
    for step in range(3):
        now = state()
        saving = jaxmem.save(run, now, step=step, keep=2)
        jax.jit(lambda x: x * 2, donate_argnums=0)(now["split"][0])
        now["numpy"][:] = -1
        for array in now["split"][1:]:
            array.delete()
    saving.wait()
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == ["1", "2"], [*run.iterdir()]
    same(jaxmem.restore(run, blank(expected)), expected)
    turned = {**expected, "split": [put(W + n, p) for n, p in enumerate(places()[::-1])]}
    same(jaxmem.restore(run, blank(turned), step=1), turned)
    print("several to several, another way of splitting: holds")

    other = {**expected, "epoch": 3 + me}
    text = cluster.said(lambda: jaxmem.save(run, other, step=3))
    assert "['epoch'] = 3, process 1 has ['epoch'] = 4" in text, text
    other = {**expected, "numpy": expected["numpy"] + me}
    text = cluster.said(lambda: jaxmem.save(run, other, step=3))
    assert "process 0 has ['numpy'] of each process alone" in text, text
    text = cluster.said(
        lambda: jaxmem.save(run, {**expected, **({"more": 1} if me else {})}, step=3)
    )
    assert "process 1 has ['more'] = 1" in text, text
    text = cluster.said(lambda: jaxmem.save(run, expected, step=3 + me))
    assert "process 0 is to save checkpoint 3" in text, text
    assert "process 1 to save checkpoint 4" in text, text
    text = cluster.said(
        lambda: jaxmem.save(run, {**expected, **({"epoch": print} if me else {})}, step=3)
    )
    assert "CheckpointError: ['epoch'] is a builtin_function" in text, text
    text = cluster.said(lambda: jaxmem.save(run, expected, step=2))
    assert "step 2 does not come after 2" in text, text
    text = cluster.said(lambda: jaxmem.restore(run, expected, step=0))
    assert "no complete checkpoint 0; there are: 1, 2" in text, text
    text = cluster.said(lambda: jaxmem.restore(run, {**blank(expected), "epoch": 0.5 if me else 1}))
    assert "['epoch'] (float, saved as int)" in text, text
    print("the same errors on all processes: holds")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    large = put(np.random.default_rng(0).random((64, 2**14)), split("a", "b"))
    for refused in (0, 1):
        if me == refused:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))
        text = cluster.said(lambda: jaxmem.save(run, {"w": large}, step=3, wait=True))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert text.startswith("CheckpointError: "), text
        assert f"could not be written by process {refused}: " in text, text
        assert "Its arrays take 4.0MiB; " in text, text
        assert "Complete checkpoints that are there: 1, 2." in text, text
    failing_while_others_write(run, me, large)
    same(jaxmem.restore(run, blank(expected)), expected)
    jaxmem.save(run, expected, step=3, keep=1, wait=True)
    assert [p.name for p in run.iterdir() if p.is_dir()] == ["3"], [*run.iterdir()]
    print("a process that cannot write: holds")

    failing_meanwhile(run, me, large)
    jaxmem.save(run, expected, step=30, keep=1, wait=True)
    completing_slowly(run, expected)

    torn = run / "31" / "state"
    data = max((p for p in torn.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole = data.read_bytes()
    if me == 0:
        raw = bytearray(whole)
        raw[len(raw) // 2] ^= 4
        data.write_bytes(raw)
    text = cluster.said(lambda: jaxmem.restore(run, blank(expected)))
    assert "31 is damaged: ['" in text, text
    if me == 0:
        data.write_bytes(whole)
    damaged_anywhere(run / "31", me, expected)
    same(jaxmem.restore(run, blank(expected)), expected)
    print("damage that one process reads: holds")


if __name__ == "__main__":
    main(Path(sys.argv[4]))
