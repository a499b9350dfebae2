"""Saves until a process is lost, and prints what is said then. See test_checkpoint_processes.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.errors import JaxmemError
from jaxmem.state import together
from tests import cluster

TIMEOUT = 3.0
W = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def state(step: int) -> dict:
    mesh = NamedSharding(jax.make_mesh((jax.device_count(),), ("d",)), PartitionSpec("d"))
    w = jax.make_array_from_callback(W.shape, mesh, lambda index: W[index] + step)
    return {"w": w, "step": step}


def all_saved(directory: Path, me: int) -> None:
    """Wait until all have: one that is lost earlier is lost in the middle of that.

    By files, as the coordinator may be stopped before its last answer has left; whoever waits here
    for good is ended by the test, which then says so.
    """
    directory.with_name(f"saved-{me}").touch()
    while not all(directory.with_name(f"saved-{n}").exists() for n in range(2)):
        time.sleep(0.01)


def lose(what: str) -> None:
    """What a test does to this process, at a moment that it could not find from outside."""
    print("lost", flush=True)
    os.kill(os.getpid(), getattr(signal, what))


def main(directory: Path, lost: int, what: str, when: str) -> None:
    me = cluster.initialize(shutdown_timeout_seconds=2)
    jaxmem.save(directory, state(0), step=0, wait=True, timeout=20)
    all_saved(directory, me)
    if me == lost and when == "before":
        lose(what)
    if me == lost and when == "writing":
        together._begin = lambda split, place: lose(what)
    try:
        if when == "restoring":
            jaxmem.restore(directory, state(0), timeout=TIMEOUT)
            if me == lost:
                lose(what)
            jaxmem.restore(directory, state(0), timeout=TIMEOUT)
        jaxmem.save(directory, state(1), step=1, wait=True, timeout=TIMEOUT)
    except JaxmemError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    # JAX would wait for the lost one, and then end this with an error of its own.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6], sys.argv[7])
