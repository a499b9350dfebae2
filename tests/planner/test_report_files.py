"""Reports as files: JSON both ways, CSV, and traces that viewers of the format take."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem
from jaxmem.errors import PlanMismatchError, ReportError
from jaxmem.planner.report import Buffer, MemoryReport
from jaxmem.planner.tracing import trace_of
from tests.show import samples
from tests.trace_format import checked


def report(**changes) -> MemoryReport:
    """The sample, with buffers inside the schedule."""
    made = samples.report(**changes)
    return replace(
        made, buffers=tuple(replace(b, start=min(b.start, 9), end=11) for b in made.buffers)
    )


def named(name: str) -> MemoryReport:
    made = report(function=name)
    buffers = tuple(replace(b, name=name, source=name, module=name) for b in made.buffers)
    return replace(made, buffers=buffers)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_json_both_ways():
    inner = report()
    whole = replace(report(), source="compiled", predicted=inner, notes=("a",))
    assert MemoryReport.from_json(whole.to_json()) == whole


def test_a_plan_and_a_report_that_were_mixed_up_are_told_apart():
    plan = jaxmem.plan(jnp.sin, jnp.ones(8), progress=False)
    with pytest.raises(ReportError, match="this is a plan, and not a report: jaxmem analyze"):
        MemoryReport.from_json(plan.to_json())
    with pytest.raises(PlanMismatchError, match=r"this is a report, .* jaxmem plan"):
        jaxmem.Plan.from_json(report().to_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("timeline"), "report file is damaged: timeline is missing"),
        (lambda d: d.update(more=1), "more is not a field of a report"),
        (lambda d: d["buffers"][0].update(nbytes="x"), r"buffers\[0\].nbytes is 'x'"),
        (lambda d: d.update(source="guessed"), "source is 'guessed', not one of"),
        (lambda d: d.update(peak_index=99), "peak_index is 99, not below 12"),
        (lambda d: d.update(schema_version=99), "report has schema version 99"),
    ],
)
def test_damaged_json_is_refused_by_the_fields_name(change, message):
    data = json.loads(report().to_json())
    change(data)
    with pytest.raises(ReportError, match=message):
        MemoryReport.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{", "1"])
def test_what_is_no_report_is_refused(text: str):
    with pytest.raises(ReportError, match="report"):
        MemoryReport.from_json(text)


@pytest.mark.parametrize("name", samples.HOSTILE)
def test_csv_has_names_as_they_are(name: str, tmp_path):
    made = named(name)
    made.to_csv(tmp_path / "buffers.csv")
    data = (tmp_path / "buffers.csv").read_bytes().decode("utf-8", "surrogatepass")
    rows = list(csv.DictReader(data.splitlines(keepends=True)))
    if not set(name) & set("\r\n\x00\u2028\x1c\x1d\x1e\x85"):
        assert [row["name"] for row in rows] == [b.name for b in made.buffers]
        assert [int(row["nbytes"]) for row in rows] == [b.nbytes for b in made.buffers]


def test_every_table_can_be_written(tmp_path):
    made, path = report(), tmp_path / "t.csv"
    for table, columns in {
        "buffers": "name,nbytes,category,start,end,path",
        "timeline": "index,operation,nbytes",
        "phases": "name,start",
        "by_category": "name,nbytes",
        "by_source": "name,nbytes",
        "by_module": "name,nbytes",
        "by_checkpoint_name": "name,nbytes",
        "by_argument": "name,nbytes",
    }.items():
        made.to_csv(path, table)
        assert path.read_text().startswith(columns)
    made.to_csv(path, "timeline")
    rows = rows_of(path)
    assert [int(row["nbytes"]) for row in rows] == list(made.timeline)
    with pytest.raises(ReportError, match="no table is called 'x': there are buffers, timeline"):
        made.to_csv(path, "x")
    with pytest.raises(ReportError, match="only compiled ones"):
        made.to_csv(path, "unfused")


def test_plans_and_frontiers_too(tmp_path):
    path = tmp_path / "t.csv"
    plan = samples.plan()
    plan.to_csv(path)
    rows = rows_of(path)
    assert [row["key"] for row in rows] == [d.key for d in plan.decisions]
    plan.to_csv(path, "rounds")
    assert path.read_text().count("\n") == len(plan.rounds) + 1
    frontier = samples.frontier()
    frontier.to_csv(path)
    rows = rows_of(path)
    assert [int(row["peak_bytes"]) for row in rows] == [p.peak_bytes for p in frontier.points]
    frontier.to_csv(path, "stock")
    assert path.read_text().count("\n") == len(frontier.stock) + 1


@pytest.mark.parametrize("name", ["step", *samples.HOSTILE])
def test_a_trace_is_one_of_the_format(name: str, tmp_path):
    made = named(name)
    made.to_trace(tmp_path / "t.json")
    events = checked((tmp_path / "t.json").read_text())
    data = json.loads((tmp_path / "t.json").read_text())
    drawn = [e for e in events if e["ph"] == "X" and e["cat"] != "phase"]
    assert len(drawn) == len(made.buffers)
    assert data["otherData"]["peak_bytes"] == made.peak_bytes


def test_the_counters_add_up_to_the_timeline(tmp_path):
    buffers = tuple(
        Buffer(f"b{n}", n + 1, "temporary" if n % 2 else "residual", n % 9, min(11, n % 9 + n % 4),
               "", "", "", "", "", (), "uint8")
        for n in range(40)
    )  # fmt: skip
    live = [sum(b.nbytes for b in buffers if b.start <= t <= b.end) for t in range(12)]
    made = report(timeline=tuple(live), buffers=())
    made = replace(made, buffers=buffers)
    made.to_trace(tmp_path / "t.json", least_bytes=30)
    events = checked((tmp_path / "t.json").read_text())
    now = {e["ts"]: sum(e["args"].values()) for e in events if e["ph"] == "C"}
    last = 0
    for at, nbytes in enumerate(live):
        last = now.get(at, last)
        assert last == nbytes
    drawn = [e for e in events if e["ph"] == "X" and e["cat"] != "phase"]
    assert sorted(e["args"]["nbytes"] for e in drawn) == list(range(30, 41))


lifetimes = st.tuples(st.integers(0, 14), st.integers(0, 9), st.integers(0, 1 << 40))


@given(
    st.lists(lifetimes, max_size=20),
    st.lists(st.integers(0, 1 << 41), min_size=1, max_size=12),
    st.integers(0, 1 << 40),
)
def test_a_trace_of_any_report_is_one_of_the_format(found, timeline, least):
    """Buffers that end after the schedule, are empty, or do not add up to what is live, too."""
    buffers = tuple(
        samples.buffer(n, "temporary" if n % 2 else "residual", start=a, end=a + span)
        for a, span, n in found
    )
    made = replace(report(buffers=()), timeline=tuple(timeline), phases=(), buffers=buffers)
    events = checked(json.dumps(trace_of(made, least)))
    now = {e["ts"]: sum(e["args"].values()) for e in events if e["ph"] == "C"}
    last = 0
    for at, live in enumerate(timeline):
        last = now.get(at, last)
        assert last == max(live, sum(b.nbytes for b in buffers if b.start <= at <= b.end))


@pytest.mark.parametrize("target", [None, "h100"])
def test_the_trace_of_a_real_step_is_one_of_the_format(target, tmp_path):
    """Compiled for the CPU and for a GPU that is not there: the counters reach the peak."""

    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return (jax.lax.scan(layer, x, w)[0] ** 2).sum()

    args = (jnp.ones((4, 64, 64)), jnp.ones((256, 64)))
    made = jaxmem.analyze(jax.grad(loss), *args, target=target)
    made.to_trace(tmp_path / "t.json")
    events = checked((tmp_path / "t.json").read_text())
    sums = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(sums) == pytest.approx(made.peak_bytes, rel=0.01)
    names = {e["name"] for e in events if e["ph"] == "X" and e["cat"] == "phase"}
    assert names == {name for name, _ in made.phases}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ph": "B"}, "phase 'B'"),
        ({"ts": -1}, None),
        ({"ts": float("nan")}, "NaN is no JSON"),
        ({"dur": None}, None),
        ({"tid": 7}, None),
        ({"pid": "1"}, None),
        ({"dur": 8}, "overlaps"),
        ({"name": "\ud800"}, None),
        ({"extra": 1}, None),
    ],
)
def test_what_breaks_the_format_is_found(change, message):
    """The check itself: each of these must not pass it."""
    trace = trace_of(report(), 1)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "phase"]
    slices[0].update(change)
    with pytest.raises((AssertionError, UnicodeEncodeError), match=message):
        checked(json.dumps(trace))


def test_a_file_that_cannot_be_written_says_so(tmp_path):
    for write in (report().to_csv, report().to_trace):
        with pytest.raises(OSError, match="nowhere"):
            write(tmp_path / "nowhere" / "t")
