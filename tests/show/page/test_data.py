"""What the page's script reads: nothing is lost, sums are exact, text cannot leave its place."""

import json
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jaxmem.show.page.data import KIND_FIELDS, TEXT_LIMIT, json_text, page_data, report_data
from jaxmem.show.rows import clean, type_text
from tests.show.samples import GIB, HOSTILE, buffer, frontier, plan, report

OPERATIONS = 12
lifetimes = st.tuples(st.integers(-2, OPERATIONS + 3), st.integers(0, 8), st.integers(0, 1 << 40))


def made(found, timeline=tuple(range(OPERATIONS))):
    buffers = tuple(buffer(n, "temporary", start=a, end=a + span) for a, span, n in found)
    return report(buffers=buffers, timeline=timeline)


def unrolled(runs):
    return [v for n, v in zip(runs[::2], runs[1::2], strict=True) for _ in range(n)]


def stacked(data):
    """Bytes of buffers and others at each operation, as the script adds them up."""
    columns, total = data["columns"], [0] * data["operations"]
    for nbytes, start, span in zip(*(columns[c] for c in ("bytes", "start", "span")), strict=True):
        for operation in range(start, start + span + 1):
            total[operation] += nbytes
    return [a + b for a, b in zip(total, unrolled(data["rest"]), strict=True)]


@given(st.text() | st.lists(st.text()))
def test_data_keeps_its_text_and_cannot_end_its_element(value):
    text = json_text(value)
    assert json.loads(text) == value
    assert not set("<>&") & set(text)
    assert text.isascii()


@given(st.lists(lifetimes, max_size=20), st.integers(0, 20))
def test_what_is_drawn_adds_up_to_the_timeline_however_many_are_merged(found, most):
    shown = made(found)
    data = report_data("x", shown, None, most)
    assert stacked(data) == list(shown.timeline)
    assert len(data["columns"]["bytes"]) == len(found)
    assert data["small"]["count"] == max(0, len(found) - most)


@given(st.lists(lifetimes, max_size=20), st.integers(0, 20))
def test_the_largest_come_first_as_they_start_and_the_others_after_them(found, most):
    data = report_data("x", made(found), None, most)
    sizes = sorted((n for _, _, n in found), reverse=True)
    listed = data["columns"]["bytes"]
    assert sorted(listed[:most], reverse=True) == sizes[:most]
    assert listed[most:] == sizes[most:]
    assert data["small"]["largest"] == max(sizes[most:], default=0)
    starts = data["columns"]["start"][:most]
    assert starts == sorted(starts), "the script draws them in this order"


def test_every_field_of_a_buffer_is_there():
    shown = report(
        buffers=(
            buffer(5, "residual", start=2, end=4, checkpoint_name="up"),
            buffer(7, "argument", name="p.w", path="p.w", source="", module="", primitive=""),
        )
    )
    data = report_data("x", shown, None)
    found = []
    for i, kind in enumerate(data["columns"]["kind"]):
        words = (data["strings"][n] for n in data["kinds"][kind])
        numbers = tuple(data["columns"][c][i] for c in ("bytes", "start", "span"))
        found.append((numbers, dict(zip(KIND_FIELDS, words, strict=True))))
    numbers, kind = found[1]
    assert numbers == (5, 2, 2)
    assert kind == {
        "name": "up (dot_general)",
        "category": "residual",
        "type": type_text("bfloat16", (8, 2048, 2048)),
        "source": "train.py:41 (mlp)",
        "module": "block/mlp",
        "path": "",
        "primitive": "dot_general",
    }
    assert found[0][0] == (7, 0, OPERATIONS - 1)
    assert (found[0][1]["path"], found[0][1]["category"]) == ("p.w", "argument")


def test_kinds_and_text_are_written_once():
    many = tuple(buffer(n, "temporary", start=n % 12, end=n % 12) for n in range(1000))
    data = report_data("x", report(buffers=many), None)
    assert len(data["kinds"]) == 1
    assert len(set(data["strings"])) == len(data["strings"])


def test_all_text_is_short_and_cannot_steer():
    buffers = tuple(buffer(1, n, name=n, source=n, module=n, path=n, dtype=n) for n in HOSTILE)
    data = report_data("x", report(buffers=buffers, phases=((HOSTILE[4], 0),)), None)
    allowed = {clean(n, TEXT_LIMIT) for n in HOSTILE}
    assert allowed <= set(data["strings"])
    assert max(map(len, data["strings"])) <= TEXT_LIMIT
    assert data["phases"] == [(clean(HOSTILE[4], 24), 0)]


def test_an_empty_program_is_one_operation_of_its_peak():
    empty = report(timeline=(), phases=(), buffers=(), peak_bytes=3, peak_index=0)
    data = report_data("x", empty, None)
    assert (data["operations"], stacked(data), data["peak_index"]) == (1, [3], 0)
    kept = replace(empty, buffers=(buffer(2, "argument", end=0),))
    assert stacked(report_data("x", kept, None)) == [3]


def test_what_is_in_host_memory_is_not_drawn_and_a_note_says_so():
    here, away = (
        replace(buffer(3 * GIB, "argument", end=11), memory=memory) for memory in ("device", "host")
    )
    shown = report(buffers=(here, away), timeline=(3 * GIB,) * 12)
    data = report_data("x", shown, None)
    assert data["columns"]["bytes"] == [3 * GIB]
    assert data["notes"] == ["In host memory, and not in the chart: 1 of the buffers, 3.0GiB."]


def test_buffers_that_add_up_to_more_than_is_live_are_noted():
    shown = report(
        buffers=(buffer(3 * GIB, "argument", end=11),), timeline=(4 * GIB,) * 11 + (GIB,)
    )
    (note,) = report_data("x", shown, None)["notes"]
    assert note.startswith("At operation 12 the buffers add up to 2.0GiB more than the live bytes")
    assert report_data("x", replace(shown, timeline=(4 * GIB,) * 12), None)["notes"] == []


def test_the_limit_is_the_budget_of_the_plan_or_the_device():
    planned = page_data([("a", report()), ("b", report())], plan())
    assert [r["limit"] for r in planned["reports"]] == [{"name": "budget", "bytes": 20 * GIB}] * 2
    (alone,) = page_data([("a", report())])["reports"]
    assert alone["limit"] == {"name": "device", "bytes": 128 * GIB}


def test_a_frontier_brings_its_points_policies_and_budget():
    data = page_data([], plan(), frontier())["frontier"]
    assert [p["bytes"] for p in data["points"]] == [n * GIB for n in (10, 12, 18, 20)]
    assert [p["name"] for p in data["stock"]] == ["keep-all", "dots_saveable"]
    assert (data["budget"], data["figure"]) == (20 * GIB, "predicted")


def test_seconds_that_are_no_number_are_left_out():
    (point,) = frontier().points[:1]
    data = page_data([], None, frontier(points=(replace(point, seconds=math.inf),)))
    assert data["frontier"]["points"][0]["seconds"] is None
    assert "Infinity" not in json_text(data)
