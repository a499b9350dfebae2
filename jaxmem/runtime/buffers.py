"""Arrays in host memory that a step keeps for itself from call to call."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem.program.cut import Cut
from jaxmem.program.ir import Value, kind_of_array


class Buffers:
    """What holds the gradients of a step until all of them are there, one set for each call.

    The first call makes them, and the next one is given what it left: new host memory would be
    pinned anew each time. What a call that failed had is gone with it.

    Args:
        cut: the step.
        homes: where each result that goes to the host lives there.
    """

    def __init__(self, cut: Cut, homes: Mapping[Value, Any]):
        results = dict(cut.hosted_results)
        self._made_of = [(kind_of_array(v), homes[results[n]]) for n, v in cut.buffers]
        self._free: list[list[Any]] = []
        self._lock = threading.Lock()

    def taken(self) -> list[Any]:
        """A set that no other call has."""
        with self._lock:
            if self._free:
                return self._free.pop()
        # Pages of zeros take no memory before they are written.
        return [jax.device_put(np.zeros(*kind), home) for kind, home in self._made_of]

    def split_off(self, results: Sequence[Any]) -> list[Any]:
        """The results of a call without its buffers, which come last and are kept."""
        count = len(results) - len(self._made_of)
        if self._made_of:
            with self._lock:
                self._free.append([*results[count:]])
        return [*results[:count]]
