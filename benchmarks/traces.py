"""How long a program computes, copies to and from the host, and waits for that, of a profile."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

_HOST_COPIES = ("MemcpyH2D", "MemcpyD2H", "MemcpyHtoD", "MemcpyDtoH")
Span = tuple[float, float]


def profiled(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of one call on the device.

    ``computing`` is when any stream runs anything but copies to or from the host, ``copying`` when
    such a copy runs, ``exposed`` when only copies run, ``idle`` when nothing does, and ``all`` from
    the first to the last.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (found,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(found.read_bytes()))["traceEvents"]
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and "Stream" in str(e["args"].get("name"))
    }
    ran = [
        (e["name"], (e["ts"], e["ts"] + e["dur"]))
        for e in events
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams
    ]
    copies = [span for name, span in ran if name.startswith(_HOST_COPIES)]
    others = [span for name, span in ran if not name.startswith(_HOST_COPIES)]
    busy = covered([*copies, *others])
    first, last = min(s[0] for _, s in ran), max(s[1] for _, s in ran)
    return {
        "all": (last - first) / 1e3,
        "computing": covered(others) / 1e3,
        "copying": covered(copies) / 1e3,
        "exposed": (busy - covered(others)) / 1e3,
        "idle": (last - first - busy) / 1e3,
    }


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
