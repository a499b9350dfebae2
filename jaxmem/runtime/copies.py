"""Copies to and from the host that run beside computations.

A copy is an array put elsewhere (``jax.device_put``), not part of a program. It is given memory
that computations in the device's queue may still use, so it waits for all of these, and looks for
them only when a thread of its own gets to it: it may find a computation there that Python started
later, the one it was meant to run beside. A program marks the end of the queue as it was, and
copies asked for before it wait for that mark and no more (``LocalDeviceState`` in XLA's client:
"sync points"). So a tiny program goes between copies and the next computation, 0.04 ms on the host
of an H200.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem import processes
from jaxmem.program.ir import Value


@dataclass(frozen=True, eq=False)
class Send:
    """A copy to the host.

    Attributes:
        values: what is copied; ``sources`` on the device, ``arrays`` on the host.
        way_bytes: device memory that is free when it has ended.
        old: the arrays in whose place the new ones are.
        stage: how many stages were started before it.
    """

    values: Sequence[Value]
    sources: list[Any]
    arrays: list[Any]
    way_bytes: int
    old: Sequence[Any]
    stage: int

    def has_ended(self) -> bool:
        return all(array.is_ready() for array in self.arrays)

    def delete_old(self) -> None:
        delete(self.old)


def delete(arrays: Sequence[Any]) -> None:
    for array in arrays:
        if not array.is_deleted():
            array.delete()


class Copier:
    """Starts copies to and from the devices of this process that a step runs on."""

    def __init__(self, devices: Collection[Any]):
        self.devices = tuple(sorted(devices, key=lambda device: device.id))
        self.unmarked = False

    def put(self, arrays: Sequence[Any], places: Sequence[Any]) -> list[Any]:
        """The arrays in other memory; returns before they are there.

        Of arrays over several processes each copies the parts that it has, and none waits for
        another.
        """
        found = processes.put_parts(arrays, places)
        self.unmarked = True
        return found

    def mark(self) -> None:
        """Let the copies wait for nothing that is started from now on."""
        if self.unmarked:
            self.end()

    def end(self) -> jax.Array:
        """An array that is ready when the devices have done all they were given.

        Results themselves may be donated to what comes next before anybody waits for them.
        """
        self.unmarked = False
        return _marker(self.devices)()

    def wait(self, arrays: Any) -> Any:
        """The arrays, once they are there."""
        return jax.block_until_ready(arrays)


@functools.lru_cache(maxsize=64)
def _marker(devices: Sequence[Any]) -> Callable[[], Any]:
    """A program that does next to nothing, on each of ``devices``."""
    mesh = Mesh(np.array(devices), ("device",))
    number = jax.device_put(jnp.int32(0), NamedSharding(mesh, PartitionSpec()))
    program = jax.jit(lambda n: n + 1).lower(number).compile()
    return functools.partial(program, number)
