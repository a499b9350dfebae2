"""A memory report as a trace that Perfetto and Chrome open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmem.planner.report import Buffer, MemoryReport

_PROCESS, _PHASES, _FIRST_LANE = 1, 1, 2
_MOST_SLICES = 20_000
_UNLISTED = "not in the list"


def trace_of(report: MemoryReport, least_bytes: int) -> dict[str, Any]:
    """The trace: counters of live bytes by category, one slice for each large buffer.

    An operation of the schedule is a microsecond: the schedule has an order, and no times.

    Args:
        report: what to draw.
        least_bytes: smaller buffers are counted and have no slice of their own.
    """
    events = [
        _named("process_name", _PROCESS, 0, f"{report.function} on {report.target}"),
        _named("thread_name", _PROCESS, _PHASES, "phases"),
        *_phases(report),
        *_counters(report),
        *_slices(report, least_bytes),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "source": report.source,
            "peak_bytes": report.peak_bytes,
            "peak_index": report.peak_index,
            "compiled_bytes": report.compiled_bytes,
        },
    }


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": _text(name)}}


def _text(name: str) -> str:
    """A name that every reader of the format takes: there is one, and it is Unicode."""
    return name.encode("utf-8", "replace").decode("utf-8") or "(no name)"


def _phases(report: MemoryReport) -> Iterator[dict[str, Any]]:
    ends = [*(start for _, start in report.phases), len(report.timeline)][1:]
    for (name, start), end in zip(report.phases, ends, strict=True):
        yield {
            "ph": "X",
            "name": _text(name),
            "cat": "phase",
            "pid": _PROCESS,
            "tid": _PHASES,
            "ts": start,
            "dur": max(0, end - start),
            "args": {},
        }


def _counters(report: MemoryReport) -> Iterator[dict[str, Any]]:
    """One sample wherever the bytes of a category change; they are drawn on top of each other.

    Bytes that are live and belong to no buffer, such as those inside a loop, are a series of their
    own, so that all of them together are the timeline.
    """
    changes: dict[int, dict[str, int]] = {}
    for b in report.buffers:
        if b.memory != "device":
            continue
        category = _text(b.category)
        for at, nbytes in ((b.start, b.nbytes), (b.end + 1, -b.nbytes)):
            moved = changes.setdefault(max(0, at), {})
            moved[category] = moved.get(category, 0) + nbytes
    live = dict.fromkeys(sorted({c for moved in changes.values() for c in moved}), 0)
    told: dict[str, int] = {}
    samples = []
    for at, total in enumerate(report.timeline):
        for category, nbytes in changes.get(at, {}).items():
            live[category] += nbytes
        now = {**live, _UNLISTED: max(0, total - sum(live.values()))}
        if now != told:
            samples.append((at, now))
            told = now
    unlisted = not live or any(now[_UNLISTED] for _, now in samples)
    series = [*live, _UNLISTED] if unlisted else [*live]
    for at, now in samples:
        yield {
            "ph": "C",
            "name": "device memory (bytes)",
            "cat": "memory",
            "pid": _PROCESS,
            "tid": 0,
            "ts": at,
            "args": {name: now[name] for name in series},
        }


def _slices(report: MemoryReport, least_bytes: int) -> Iterator[dict[str, Any]]:
    """Buffers in as few lanes as do without an overlap, which the format does not allow."""
    large = sorted((b for b in report.buffers if b.nbytes >= least_bytes), key=lambda b: -b.nbytes)
    free: list[tuple[int, int]] = []
    lanes = 0
    for b in sorted(large[:_MOST_SLICES], key=lambda b: (b.start, -b.nbytes)):
        if free and free[0][0] <= b.start:
            lane = heapq.heappop(free)[1]
        else:
            lane = _FIRST_LANE + lanes
            lanes += 1
            yield _named("thread_name", _PROCESS, lane, f"buffers {lanes}")
        heapq.heappush(free, (b.end + 1, lane))
        yield {
            "ph": "X",
            "name": _text(b.name),
            "cat": _text(b.category),
            "pid": _PROCESS,
            "tid": lane,
            "ts": b.start,
            "dur": b.end + 1 - b.start,
            "args": _told(b),
        }


def _told(b: Buffer) -> dict[str, Any]:
    names = ("nbytes", "dtype", "source", "module", "path", "checkpoint_name", "primitive")
    told = {name: getattr(b, name) for name in (*names, "instruction", "memory")}
    kept = {k: _text(v) if isinstance(v, str) else v for k, v in told.items() if v != ""}
    return {**kept, "shape": list(b.shape)}
