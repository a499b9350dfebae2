"""What Perfetto and chrome://tracing ask of a trace: the Trace Event Format, held strictly.

Of the phases of the format (https://perfetto.dev/docs, "Trace Event Format") jaxmem writes complete
events (``X``), counters (``C``) and metadata (``M``); anything else is refused here.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

_TOP = {"traceEvents", "displayTimeUnit", "otherData"}
_REQUIRED = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "M": {"ph", "name", "pid", "args"},
}
_ALLOWED = {
    "X": _REQUIRED["X"] | {"args"},
    "C": _REQUIRED["C"] | {"cat", "tid", "id"},
    "M": _REQUIRED["M"] | {"tid"},
}
_NAMING = {"process_name", "thread_name"}


def checked(text: str) -> list[dict[str, Any]]:
    """Returns the events of a trace; fails where it breaks a rule of the format."""
    trace = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    assert set(trace) <= _TOP and trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    events = trace["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        _check(event)
    _check_names(events)
    _check_counters([e for e in events if e["ph"] == "C"])
    _check_slices([e for e in events if e["ph"] == "X"])
    return events


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), f"one of {keys} is there twice"
    return dict(pairs)


def _check(event: dict[str, Any]) -> None:
    phase = event["ph"]
    assert phase in _REQUIRED, f"phase {phase!r}"
    assert _REQUIRED[phase] <= set(event) <= _ALLOWED[phase], sorted(event)
    for key in ("name", "cat"):
        text = event.get(key, "")
        assert isinstance(text, str)
        text.encode("utf-8")  # A lone surrogate is none of Unicode's characters.
    assert event["name"]
    for key in ("pid", "tid"):
        assert type(event.get(key, 0)) is int and event.get(key, 0) >= 0
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        assert type(value) in (int, float) and math.isfinite(value) and value >= 0
    assert isinstance(event.get("args", {}), dict)
    json.dumps(event, ensure_ascii=False).encode("utf-8")


def _check_names(events: list[dict[str, Any]]) -> None:
    """Each process and each thread that something happens on has one name, said beforehand."""
    named: set[tuple[int, ...]] = set()
    for event in events:
        process, thread = (event["pid"],), (event["pid"], event.get("tid", 0))
        if event["ph"] == "M":
            assert event["name"] in _NAMING and list(event["args"]) == ["name"]
            assert isinstance(event["args"]["name"], str) and event["args"]["name"]
            which = process if event["name"] == "process_name" else thread
            assert which not in named, f"{which} is named twice"
            named.add(which)
        else:
            assert process in named
            assert event["ph"] == "C" or thread in named


def _check_counters(events: list[dict[str, Any]]) -> None:
    """Series are numbers, the same ones each time, and time goes forward."""
    tracks: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for event in events:
        tracks.setdefault((event["pid"], event["name"], event.get("id")), []).append(event)
    for track in tracks.values():
        assert len({tuple(event["args"]) for event in track}) == 1
        for event in track:
            assert event["args"]
            for value in event["args"].values():
                assert type(value) in (int, float) and math.isfinite(value) and value >= 0
        assert all(a["ts"] < b["ts"] for a, b in pairwise(track))


def _check_slices(events: list[dict[str, Any]]) -> None:
    """On one thread they lie in each other or apart, begin in order, and never overlap in part."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread in threads.values():
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(thread))
        open_until: list[float] = []
        for event in thread:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{event['name']} overlaps"
            open_until.append(end)
