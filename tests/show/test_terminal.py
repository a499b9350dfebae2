"""The exact text of plans and reports, at any width, with any name."""

import re
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from jaxmem.errors import BudgetInfeasibleError, Holder
from jaxmem.show.terminal import (
    bounded,
    infeasible_view,
    plan_text,
    plan_view,
    print_view,
    report_text,
)
from tests.show.samples import GIB, HOSTILE, buffer, decision, plan, report

PLAN = """
train_step on h200
recomputes 18 of 42 values, +6.1% predicted time (106ms a step)

  budget      20.0GiB ───────────────────────────────────────┤
  compiled    19.0GiB ██████████████████████████████████████
  predicted   18.0GiB ████████████████████████████████████
  keep-all    30.0GiB ████████████████████████████████████████▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
arguments 4.0GiB, outputs 4.0GiB (4.0GiB of them reuse donated arguments)
solver: greedy: a chain of 16 stages, of which 3 are distinct; at most 1.2% from the paper optimum
without nesting

values that live from forward to backward
   bytes  decision              cost  value        type                 source             module
  ──────────────────────────────────────────────────────────────────────────────────────────────────
  8.0GiB  recompute          +5.00ms  dot_general  16 x bf16[8,2048,2…  train.py:41 (mlp)  block/mlp
  4.0GiB  recompute 2 of 16  +1.10ms  up (mul)     16 x bf16[8,2048,2…  train.py:41 (mlp)  block/mlp
  2.0GiB  keep                        dot_general  10 x bf16[8,2048,2…  train.py:41 (mlp)  block/mlp

compiles
  #  compile     limit  predicted  compiled  outcome
  ──────────────────────────────────────────────────────────
  1  keep-all  20.0GiB    29.0GiB   30.0GiB  over by 10.0GiB
  2  search    20.0GiB    18.0GiB   19.0GiB  fits

note: planned for h200, which is not this machine.
"""

REPORT = """
train_step on h200
predicted peak 32.0GiB at operation 8 of 12 (backward); compiled 33.0GiB, 26% of the device

  device     128.0GiB ───────────────────────────────────────────────────────────┤
  compiled    33.0GiB ███████████████▌
  predicted   32.0GiB ███████████████
arguments 4.0GiB, outputs 4.0GiB (4.0GiB of them reuse donated arguments), temporaries 29.0GiB

live bytes over the step
                                                           ▼ peak
  32.0GiB                                           ▂▂▂▂▂▂▂███████
                                             ▄▄▄▄▄▄▄██████████████▄▄▄▄▄▄▄
                                      ▆▆▆▆▆▆▆████████████████████████████
                        ▂▂▂▂▂▂▂█████████████████████████████████████████████████
                 ▄▄▄▄▄▄▄████████████████████████████████████████████████████████▄▄▄▄▄▄▄
       0B ▆▆▆▆▆▆▆██████████████████████████████████████████████████████████████████████▆▆▆▆▆▆▆
          │forward                                         │backward            │update

at the peak
  residual    24.0GiB  75% ████████████████████████████████████████████████████████████
  argument     4.0GiB  12% ██████████
  temporary    4.0GiB  12% ██████████

largest buffers at the peak
    bytes  share  category   buffer       type               source             module or name
  ────────────────────────────────────────────────────────────────────────────────────────────
  24.0GiB    75%  residual   dot_general  bf16[8,2048,2048]  train.py:41 (mlp)  block/mlp: up
   4.0GiB    12%  temporary  mul          bf16[8,2048,2048]  train.py:41 (mlp)  block/mlp
   3.0GiB     9%  argument   params.w     f32[8,2048,2048]
   1.0GiB     3%  argument   opt.mu       f32[8,2048,2048]

arguments at the peak
   bytes  share  argument
  ───────────────────────
  3.0GiB     9%  params.w
  1.0GiB     3%  opt.mu
"""


def test_a_plan():
    assert plan_text(plan(), width=100) == PLAN.strip("\n")


def test_a_report():
    assert report_text(report(), width=100) == REPORT.strip("\n")


def test_an_infeasible_budget():
    error = BudgetInfeasibleError(
        'no plan fits budget=12.0GiB on h200: the smallest peak found is 16.0GiB.\n  Use "16GiB".',
        budget_bytes=12 * GIB,
        smallest_bytes=16 * GIB,
        holders=(Holder("params", 4 * GIB, "argument"),),
    )
    console = Console(file=StringIO(), width=60, color_system=None)
    with console.capture() as capture:
        print_view(console, infeasible_view(error, 60))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines == [
        "no plan fits budget=12.0GiB on h200: the smallest peak found",
        "is 16.0GiB.",
        '  Use "16GiB".',
        "",
        "  budget           12.0GiB ───────────────────┤",
        "  smallest found   16.0GiB ████████████████████▒▒▒▒▒▒",
        "",
        "what fills the smallest peak found, 16.00GiB",
        "   bytes  share  kind      name",
        "  ───────────────────────────────",
        "  4.0GiB    25%  argument  params",
    ]


def test_a_plan_without_changes_is_short():
    text = plan_text(plan(solver="keep-all", decisions=(), rounds=(), notes=()), width=80)
    assert "unchanged: keep-all fits" in text
    assert "values that live" not in text
    assert "compiles" not in text


def test_many_decisions_are_counted():
    decisions = tuple(decision(i) for i in range(43))
    assert "  … and 31 more (31.0GiB)\n" in plan_text(plan(decisions=decisions), width=100)


def test_str_is_the_text_at_the_width_of_the_terminal(monkeypatch):
    for columns in (70, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert str(plan()) == plan_text(plan(), width=columns)
        assert str(report()) == report_text(report(), width=columns)
    assert plan_text(plan(), width=70) != plan_text(plan(), width=120)


def hostile_plan():
    decisions = tuple(
        decision(
            i,
            nbytes=GIB + i,
            recomputed=i,
            source=name,
            module=name,
            checkpoint_name=name,
            primitive=name,
            dtype=name,
        )
        for i, name in enumerate(HOSTILE)
    )
    rounds = tuple(type(plan().rounds[0])(name, 1, 1, 1, False, name) for name in HOSTILE)
    return plan(
        function="".join(HOSTILE[:2]),
        target=HOSTILE[5],
        decisions=decisions,
        rounds=rounds,
        notes=HOSTILE,
    )


def hostile_report():
    buffers = tuple(
        buffer(GIB, name, name=name, path=name, source=name, module=name, dtype=name)
        for name in (*HOSTILE, "argument")
    )
    arguments = tuple(buffer(GIB, "argument", name=n, path=n, dtype=n) for n in HOSTILE)
    phases = tuple((name, i) for i, name in enumerate(HOSTILE))
    return report(
        function=HOSTILE[4], target=HOSTILE[6], phases=phases, buffers=buffers + arguments
    )


@pytest.mark.parametrize("width", [1, 40, 41, 57, 80, 100, 133, 1000])
def test_nothing_is_wider_than_asked(width):
    for text in (
        plan_text(plan(), width=width),
        plan_text(hostile_plan(), width=width),
        report_text(report(), width=width),
        report_text(hostile_report(), width=width),
    ):
        assert max(map(cell_len, text.splitlines())) <= bounded(width)


def test_hostile_names_are_shown_and_do_nothing():
    for text in (plan_text(hostile_plan(), width=140), report_text(hostile_report(), width=140)):
        assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f\ud800\u202e\u2066\u200f\u2028]", text) == []
        assert "[red]hot[/red]" in text
        assert ":fire:" in text
        assert "x" * 401 not in text
        text.encode("utf-8")


@pytest.mark.parametrize("colored", [True, False])
def test_color_unless_no_color(monkeypatch, colored):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colored:
        monkeypatch.setenv("NO_COLOR", "1")
    out = StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    print_view(console, plan_view(plan(), 100))
    codes = set(re.findall(r"\x1b\[([\d;]*)m", out.getvalue()))
    colors = {part for code in codes for part in code.split(";")} & {"31", "32", "33", "36"}
    assert colors == ({"31", "32", "33", "36"} if colored else set())
    plain = "\n".join(
        line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    )
    assert plain == plan_text(plan(), width=100)


def test_one_operation_and_none():
    one = report_text(report(timeline=(GIB,), peak_index=0, phases=()), width=60)
    assert one.count("█" * 50) == 6
    none = report_text(report(timeline=(), phases=(), buffers=()), width=60)
    assert "live bytes over the step" not in none
    assert "at the peak" not in none


def test_zero_bytes_everywhere_still_prints():
    zero = dict.fromkeys(("budget_bytes", "predicted_bytes", "compiled_bytes"), 0)
    assert "budget" in plan_text(plan(**zero, keep_all_compiled_bytes=0), width=60)
    text = report_text(report(timeline=(0, 0), peak_bytes=0, compiled_bytes=0, device_bytes=0))
    assert "peak 0B" in text
