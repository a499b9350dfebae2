"""What the page's script reads: reports and frontiers as columns of numbers, and text interned.

A program has thousands of buffers of few kinds (one line of many layers), so a buffer is four
numbers and its kind is written once. All text went through ``clean``: it is at most ``TEXT_LIMIT``
characters and cannot steer what shows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any

from jaxmem.planner.frontier import Frontier, Point, pareto
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import Buffer, MemoryReport
from jaxmem.show.rows import clean, type_text
from jaxmem.units import format_bytes

# Beyond that many the smallest are drawn as one: nobody would see them. The table has them all.
MOST_BUFFERS = 20_000
TEXT_LIMIT = 400
_SEEN = 1000  # a share of the peak smaller than one in that many cannot be seen in a chart
KIND_FIELDS = ("name", "category", "type", "source", "module", "path", "primitive")


def json_text(data: Any) -> str:
    r"""Returns JSON that can stand in an HTML ``<script>`` of data: nothing in it ends that.

    >>> json_text(["</script>", "<!--", "é"])
    '["\\u003c/script\\u003e","\\u003c!--","\\u00e9"]'
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_data(
    reports: Sequence[tuple[str, MemoryReport]],
    plan: Plan | None = None,
    frontier: Frontier | None = None,
    *,
    most: int = MOST_BUFFERS,
) -> dict[str, Any]:
    """Returns everything the script draws.

    Args:
        reports: each with its label, in the order in which they stand side by side.
        plan: its budget is drawn as a line.
        frontier: drawn with its policies.
        most: how many buffers of each report are drawn one by one, the largest ones.
    """
    return {
        "kind_fields": KIND_FIELDS,
        "reports": [report_data(label, report, plan, most) for label, report in reports],
        "frontier": None if frontier is None else _frontier_data(frontier, plan),
    }


def report_data(
    label: str, report: MemoryReport, plan: Plan | None, most: int = MOST_BUFFERS
) -> dict[str, Any]:
    """Returns one report: figures, and its buffers as columns, those that are drawn as one last."""
    operations = max(1, len(report.timeline))
    timeline = report.timeline or (report.peak_bytes,)
    away = [b for b in report.buffers if not on_device(b)]
    ordered = sorted(filter(on_device, report.buffers), key=lambda b: -b.nbytes)
    drawn = sorted(ordered[:most], key=lambda b: (b.start, -b.end, -b.nbytes))
    small = ordered[most:]
    rest = [t - n for t, n in zip(timeline, live_bytes(ordered, operations), strict=True)]
    limit = ("budget", plan.budget_bytes) if plan else ("device", report.device_bytes)
    return {
        "label": label,
        "title": f"{clean(report.function, TEXT_LIMIT)} on {clean(report.target, TEXT_LIMIT)}",
        "limit": {"name": limit[0], "bytes": limit[1]},
        "figure": figure(report),
        "peak": report.peak_bytes,
        "peak_index": min(max(report.peak_index, 0), operations - 1),
        "compiled": report.compiled_bytes,
        "operations": operations,
        "phases": [
            (clean(name, 24), min(max(start, 0), operations - 1))
            for name, start in sorted(report.phases, key=lambda phase: phase[1])
        ],
        **_columns([*drawn, *small], operations),
        "small": {"count": len(small), "largest": small[0].nbytes if small else 0},
        "rest": runs(rest),
        "notes": _notes(report, rest, away),
    }


def on_device(buffer: Buffer) -> bool:
    """Returns whether a buffer counts in the timeline: what is in pinned host memory does not."""
    return buffer.memory == "device"


def figure(report: MemoryReport) -> str:
    """Returns whose lifetimes a report has: ``"predicted"`` by the simulator, or ``"compiled"``."""
    return report.source


def _notes(report: MemoryReport, rest: Sequence[int], away: Sequence[Buffer]) -> list[str]:
    """What somebody who adds up the chart has to know."""
    notes = [clean(note, TEXT_LIMIT) for note in report.notes]
    if (most := -min(rest)) > 0:
        notes.append(
            f"At operation {rest.index(-most) + 1:,} the buffers add up to {format_bytes(most)} "
            "more than the live bytes: on several devices they are whole arrays."
        )
    nbytes = sum(b.nbytes for b in away)
    if nbytes * _SEEN > report.peak_bytes:
        size = format_bytes(nbytes)
        notes.append(f"In host memory, and not in the chart: {len(away):,} of the buffers, {size}.")
    return notes


def live_bytes(buffers: Iterable[Buffer], operations: int) -> list[int]:
    """Returns the sum of the buffers that are live at each operation."""
    changes = [0] * (operations + 1)
    for buffer in buffers:
        start, end = lifetime(buffer, operations)
        changes[start] += buffer.nbytes
        changes[end + 1] -= buffer.nbytes
    return list(accumulate(changes[:-1]))


def lifetime(buffer: Buffer, operations: int) -> tuple[int, int]:
    """Returns the first and the last operation of a buffer, within the schedule."""
    start = min(max(buffer.start, 0), operations - 1)
    return start, min(max(buffer.end, start), operations - 1)


def runs(values: Iterable[int]) -> list[int]:
    """Returns run lengths and values in turn.

    >>> runs([0, 0, 0, 7, 7, 1])
    [3, 0, 2, 7, 1, 1]
    """
    return [n for value, run in groupby(values) for n in (len(list(run)), value)]


def _columns(listed: Sequence[Buffer], operations: int) -> dict[str, Any]:
    strings: dict[str, int] = {}
    kinds: dict[tuple[int, ...], int] = {}
    columns: dict[str, list[int]] = {"bytes": [], "start": [], "span": [], "kind": []}
    cleaned: dict[str, str] = {}
    for buffer in listed:
        words = _kind(buffer)
        for word in words:
            if word not in cleaned:
                cleaned[word] = clean(word, TEXT_LIMIT)
        kind = tuple(strings.setdefault(cleaned[word], len(strings)) for word in words)
        start, end = lifetime(buffer, operations)
        columns["bytes"].append(buffer.nbytes)
        columns["start"].append(start)
        columns["span"].append(end - start)
        columns["kind"].append(kinds.setdefault(kind, len(kinds)))
    return {"strings": list(strings), "kinds": list(kinds), "columns": columns}


def _kind(buffer: Buffer) -> tuple[str, ...]:
    """What :data:`KIND_FIELDS` names."""
    name, primitive = buffer.name, buffer.primitive
    if buffer.checkpoint_name and buffer.checkpoint_name not in name:
        name = f"{buffer.checkpoint_name} ({name})"
    form = type_text(buffer.dtype, buffer.shape)
    return name, buffer.category, form, buffer.source, buffer.module, buffer.path, primitive


def _frontier_data(frontier: Frontier, plan: Plan | None) -> dict[str, Any]:
    def point(p: Point) -> dict[str, Any]:
        return {
            "bytes": p.needed_bytes,
            "seconds": p.seconds if math.isfinite(p.seconds) else None,
            "name": clean(p.solver, TEXT_LIMIT),
            "problem": clean(p.problem, TEXT_LIMIT),
        }

    return {
        "figure": "compiled" if frontier.compiled else "predicted",
        "device": frontier.device_bytes,
        "budget": plan.budget_bytes if plan else None,
        "points": [point(p) for p in pareto(frontier.points)],
        "stock": [point(p) for p in frontier.stock],
    }
