"""What a step does on the device while it runs: it computes, it copies, it waits for copies.

The profiler of JAX tells when each kernel and each copy ran. What is asked of a step that keeps
something in host memory is how long nothing but copies ran: that time is what they cost.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax

from jaxmem.displayed import Displayed
from jaxmem.errors import ArgumentError
from jaxmem.units import format_seconds

_HOST_COPIES = ("MemcpyH2D", "MemcpyD2H", "MemcpyHtoD", "MemcpyDtoH")
_MICRO = 1e-6
Span = tuple[float, float]


@dataclass(frozen=True)
class StepProfile(Displayed):
    """How long one step took on one device, and what ran meanwhile; all in seconds.

    Attributes:
        step_seconds: from the first kernel or copy to the end of the last.
        computing_seconds: something ran that is no copy to or from the host.
        copying_seconds: a copy to or from the host ran.
        exposed_seconds: of these, nothing else ran: what the copies cost.
        idle_seconds: nothing ran.
    """

    step_seconds: float
    computing_seconds: float
    copying_seconds: float
    exposed_seconds: float
    idle_seconds: float

    def __str__(self) -> str:
        told = ((f.name.removesuffix("_seconds"), getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in told)


def profiled(run: Callable[[], Any]) -> StepProfile:
    """What one call did on the first GPU.

    Args:
        run: starts the work and returns its results, which are waited for.

    Raises:
        ArgumentError: the device is no GPU: a CPU has no copies of which to tell.
    """
    if jax.default_backend() != "gpu":
        raise ArgumentError(
            f"a profile tells which copies a GPU waits for, and {jax.devices()[0].device_kind} is "
            "none. Plan.exposed_seconds says what is predicted for a GPU that is not there."
        )
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (found,) = Path(folder).rglob("*.trace.json.gz")
        return read(json.loads(gzip.decompress(found.read_bytes()))["traceEvents"])


def read(events: Iterable[dict[str, Any]]) -> StepProfile:
    """A profile from the events of a trace, in the format of Chrome's trace viewer.

    Raises:
        ArgumentError: nothing ran on a GPU.
    """
    events = list(events)
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and "Stream" in str(e["args"].get("name"))
    }
    first = min((pid for pid, _ in streams), default=None)
    ran = [
        (e["name"], (e["ts"], e["ts"] + e["dur"]))
        for e in events
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams and e["pid"] == first
    ]
    if not ran:
        raise ArgumentError("the profile shows nothing that ran on a GPU: there is no step in it.")
    copies = [span for name, span in ran if name.startswith(_HOST_COPIES)]
    others = [span for name, span in ran if not name.startswith(_HOST_COPIES)]
    busy = covered([*copies, *others])
    whole = max(s[1] for _, s in ran) - min(s[0] for _, s in ran)
    computing = covered(others)
    told = (whole, computing, covered(copies), busy - computing, whole - busy)
    return StepProfile(*(microseconds * _MICRO for microseconds in told))


def covered(spans: Iterable[Span]) -> float:
    """The length of the union of spans.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
