"""What is shown is right and inert before any renderer sees it."""

import dataclasses
import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.errors import BudgetInfeasibleError, Holder
from jaxmem.planner.decisions import Streamed
from jaxmem.show.rows import (
    clean,
    column_of,
    infeasible_grid,
    plan_rows,
    report_rows,
    resampled,
    type_text,
)
from tests.show.samples import GIB, HOSTILE, MIB, buffer, decision, plan, report


@given(st.text(), st.integers(3, 200))
def test_clean_leaves_nothing_that_steers_and_stays_short(text, limit):
    shown = clean(text, limit)
    assert {unicodedata.category(c) for c in shown} & {"Cc", "Cs", "Zl", "Zp"} == set()
    assert {c for c in shown if unicodedata.category(c) == "Cf"} <= {"\u200d"}
    assert len(shown) <= 10 * limit  # the longest escape is \UXXXXXXXX
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers/3/mlp", "layers/3/mlp"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("\ud800", "\\ud800"),
        ("👩\u200d🔬", "👩\u200d🔬"),
        ("[red]hot[/red]", "[red]hot[/red]"),
        (7, "7"),
    ],
)
def test_clean_examples(text, shown):
    assert clean(text) == shown


@pytest.mark.parametrize(
    ("changes", "verdict", "tone"),
    [
        ({}, "recomputes 18 of 42 values, +6.1% predicted time (106ms a step)", "changed"),
        ({"solver": "keep-all", "decisions": ()}, "unchanged: keep-all fits", "good"),
        (
            {"solver": "keep-all", "decisions": (), "streamed": Streamed(1, 4, 1, GIB, GIB, MIB)},
            "recomputes nothing, +6.1% predicted time (106ms a step)",
            "changed",
        ),
        ({"decisions": (decision(),)}, "recomputes none of 16 values", "good"),
        (
            {"predicted_seconds": 0.09},
            "recomputes 18 of 42 values, -10.0% predicted time (90.0ms a step)",
            "changed",
        ),
        (
            {"keep_all_seconds": 0.0, "predicted_seconds": 0.002},
            "recomputes 18 of 42 values, +2.00ms predicted time (2.00ms a step)",
            "changed",
        ),
        (
            {"microbatches": 4},
            "4 microbatches, recomputes 18 of 42 values, +6.1% predicted time (106ms a step)",
            "changed",
        ),
        (
            {"microbatches": 8, "decisions": (), "solver": "keep-all"},
            "8 microbatches, nothing recomputed, +6.1% predicted time (106ms a step)",
            "changed",
        ),
        (
            {"predicted_seconds": math.inf},
            "recomputes 18 of 42 values, predicted time unknown",
            "changed",
        ),
        (
            {"compiled_bytes": 21 * GIB},
            "over budget: recomputes 18 of 42 values, +6.1% predicted time (106ms a step) "
            "(1.0GiB too much)",
            "bad",
        ),
        (
            {"compiled_bytes": 21 * GIB, "decisions": (), "solver": "keep-all"},
            "over budget (1.0GiB too much)",
            "bad",
        ),
    ],
)
def test_plan_verdict(changes, verdict, tone):
    rows = plan_rows(plan(**changes))
    assert (rows.verdict, rows.tone) == (verdict, tone)


def test_decisions_are_largest_first_and_the_rest_is_counted():
    many = [decision(i, nbytes=(i + 1) * MIB, checkpoint_name=f"v{i}") for i in range(43)]
    grid = plan_rows(plan(decisions=tuple(many))).decisions
    assert [row[0] for row in grid.rows[:3]] == ["43.0MiB", "42.0MiB", "41.0MiB"]
    assert len(grid.rows) == 12
    assert grid.more == "… and 31 more (496.0MiB)"  # 1 + 2 + ... + 31


def test_equal_sizes_come_in_the_order_of_their_keys():
    grid = plan_rows(
        plan(decisions=tuple(decision(i, source=f"s{i}") for i in (2, 0, 1)))
    ).decisions
    assert [row[5] for row in grid.rows] == ["s0", "s1", "s2"]


def test_keep_all_that_was_not_compiled_is_called_predicted():
    bars = plan_rows(plan(keep_all_compiled_bytes=None)).bars
    assert (bars[-1].label, bars[-1].size) == ("keep-all, predicted", "29.0GiB")


def test_rounds_say_why_they_were_not_taken():
    first = plan().rounds[1]
    rounds = (plan().rounds[0], type(first)("search", 1, 1, 1, True, problem="undone: up"))
    outcomes = [row[-1] for row in plan_rows(plan(rounds=rounds)).rounds.rows]
    assert outcomes == ["over by 10.0GiB", "undone: up"]


def test_what_was_measured_is_a_column_of_its_own():
    assert "measured" not in plan_rows(plan()).rounds.header
    first, second = plan().rounds
    timed = type(first)(*dataclasses.astuple(second)[:-1], measured_seconds=0.0123)
    rows = plan_rows(plan(rounds=(first, timed), measured_seconds=0.0123))
    column = rows.rounds.header.index("measured")
    assert [row[column] for row in rows.rounds.rows] == ["", "12.3ms"]
    assert [row[-1] for row in rows.rounds.rows] == ["over by 10.0GiB", "fits"]
    assert rows.verdict.endswith("(106ms a step); measured 12.3ms a step")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"why": "", "bound_seconds": None}, "solver: greedy"),
        ({"bound_seconds": None}, "solver: greedy: a chain of 16 stages, of which 3 are distinct"),
        ({"why": "", "bound_seconds": 0.1061}, "greedy; the optimum on paper without nesting"),
        ({"why": "", "bound_seconds": 0.2}, "greedy; the optimum on paper without nesting"),
        ({"bound_seconds": 0.1}, "distinct; at most 6.1% from the paper optimum without nesting"),
        ({"why": "", "bound_seconds": 0.0}, "solver: greedy"),
        ({"why": "", "predicted_seconds": math.inf}, "solver: greedy"),
    ],
)
def test_the_solver_its_reason_and_its_bound(changes, shown):
    assert plan_rows(plan(**changes)).solver.endswith(shown)


def test_host_bytes_are_named_only_when_there_are_some():
    assert "host" not in plan_rows(plan()).makeup
    shown = plan_rows(plan(host_bytes=GIB, exposed_seconds=0.25)).makeup
    assert shown.endswith("donated arguments), host 1.0GiB, copies not hidden 250ms")
    found = plan(
        host_bytes=GIB,
        exposed_seconds=0.25,
        compiled_exposed_seconds=0.5,
        measured_exposed_seconds=0.75,
    )
    assert plan_rows(found).makeup.endswith("hidden 250ms (compiled 500ms, measured 750ms)")
    streamed = Streamed(3, 20, 2, 2 * GIB, GIB, GIB // 4)
    shown = plan_rows(plan(host_bytes=GIB, streamed=streamed)).makeup
    assert "host 1.0GiB (2.0GiB each way in 20 updates), copies not hidden" in shown


def test_a_compiled_report_has_one_figure():
    told = report(source="compiled", compiled_bytes=32 * GIB, notes=("a note",))
    rows = report_rows(told)
    assert rows.verdict == "peak 32.0GiB at operation 8 of 12 (backward), 25% of the device"
    assert rows.notes == ("a note",)
    assert [bar.label for bar in rows.bars] == ["compiled"], "nothing was predicted"


def test_report_says_where_the_peak_is():
    assert report_rows(report()).verdict == (
        "predicted peak 32.0GiB at operation 8 of 12 (backward); "
        "compiled 33.0GiB, 26% of the device"
    )
    small = report_rows(report(device_bytes=30 * GIB, phases=()))
    assert small.verdict == (
        "predicted peak 32.0GiB at operation 8 of 12; "
        "compiled 33.0GiB, 3.0GiB more than the device has"
    )
    assert small.tone == "bad"


def test_report_tables():
    rows = report_rows(report())
    assert [(b.label, b.size, b.share) for b in rows.categories] == [
        ("residual", "24.0GiB", 0.75),
        ("argument", "4.0GiB", 0.125),
        ("temporary", "4.0GiB", 0.125),
    ]
    assert rows.arguments.rows == (("3.0GiB", "9%", "params.w"), ("1.0GiB", "3%", "opt.mu"))
    assert rows.buffers.rows[0][-1] == "block/mlp: up"
    named = report_rows(report(buffers=(buffer(1, "residual", module="", checkpoint_name="up"),)))
    assert named.buffers.rows[0][-1] == "up"


def test_buffers_that_only_live_at_other_times_share_a_row():
    layers = tuple(buffer(3 * GIB, "residual", start=i) for i in range(4))
    grid = report_rows(report(buffers=(buffer(4 * GIB, "output"), *layers))).buffers
    assert [(row[0], row[1], row[2], row[4]) for row in grid.rows] == [
        ("12.0GiB", "38%", "residual", "4 x bf16[8,2048,2048]"),
        ("4.0GiB", "12%", "output", "bf16[8,2048,2048]"),
    ]


def test_an_empty_report_has_empty_tables():
    rows = report_rows(report(buffers=(), timeline=(), phases=(("forward", 0),), peak_bytes=0))
    assert (rows.categories, rows.buffers.rows, rows.phases) == ((), (), ())


def test_infeasible_grid_is_largest_first():
    holders = (Holder("params", GIB, "argument"), Holder(HOSTILE[6], 2 * GIB, "residual"))
    error = BudgetInfeasibleError("no", budget_bytes=1, smallest_bytes=4 * GIB, holders=holders)
    grid = infeasible_grid(error)
    assert [row[:3] for row in grid.rows] == [
        ("2.0GiB", "50%", "residual"),
        ("1.0GiB", "25%", "argument"),
    ]
    assert "\x1b" not in grid.rows[0][3]
    assert grid.title == "what fills the smallest peak found, 4.00GiB"


@pytest.mark.parametrize(
    ("dtype", "shape", "count", "text"),
    [
        ("float32", (), 1, "f32[]"),
        ("bfloat16", (2, 3), 4, "4 x bf16[2,3]"),
        ("uint8", (7,), 1, "u8[7]"),
        ("complex64", (7,), 1, "c64[7]"),
        ("bool", (7,), 1, "bool[7]"),
        ("float8_e4m3fn", (7,), 1, "f8_e4m3fn[7]"),
        ("key<fry>", (2,), 1, "key<fry>[2]"),
    ],
)
def test_type_text(dtype, shape, count, text):
    assert type_text(dtype, shape, count) == text


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 40))
def test_every_operation_is_in_the_column_it_is_said_to_be_in(timeline, columns):
    values = resampled(timeline, columns)
    assert len(values) <= columns
    assert max(values) == max(timeline)
    for index, live in enumerate(timeline):
        column = column_of(index, len(timeline), columns)
        assert values[column] >= live
        if len(timeline) <= columns:
            assert values[column] == live
