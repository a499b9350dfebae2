"""The exact text of explanations, differences and frontiers, and that their HTML is inert."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from rich.cells import cell_len

from jaxmem.planner.frontier import Point
from jaxmem.show import shown
from jaxmem.show.curve import frontier_html
from jaxmem.show.terminal import bounded
from tests.show.samples import GIB, HOSTILE, decision, explained_plan, frontier, plan

EXPLAINED = """
train_step on h200
it uses 19.0GiB of the budget of 20.0GiB (95%)
greedy: the quickest of what was proposed and, once compiled, fits (2 compiles)
1.0GiB more would save 3.00ms a step
from a budget of 30.00GiB on nothing would be recomputed, and a step would take 100ms instead of
106ms
in host memory between steps: state.mu
planned for h200, which is not this machine.

8.0GiB  dot_general  4 x bf16[8,2048,2048]  train.py:30 (attn)  h0/attn … h3/attn
    recomputed in 3 of 4: the budget has room for 1, and a GiB of them costs 2.00ms to make again.
    All of it would be kept from a budget of about 26.0GiB on.

4.0GiB  scores (mul)  bf16[8,2048,2048]  train.py:41 (mlp)
    recomputed: making it again costs 500us per GiB, no more than anything that is kept (dot_general
    at train.py:41, 4.00ms per GiB).
    All of it would be kept from a budget of about 30.0GiB on.

2.0GiB  dot_general  4 x bf16[8,2048,2048]  train.py:41 (mlp)  h0/mlp … h3/mlp
    kept: making it again costs 4.00ms per GiB, more than dot_general at train.py:30 (2.00ms per
    GiB), the dearest that is recomputed.

1.0GiB  exp  bf16[8,2048,2048]  train.py:41 (mlp)  block/mlp
    in host memory from the forward to the backward pass: device memory is for what is read sooner,
    and making it again would cost 5.00ms per GiB.

what fills the predicted peak
   bytes  kind      name
  ────────────────────────
  4.0GiB  argument  params
  3.0GiB  residual  up
"""

ABOUT_H3 = """
train_step on h200: h3

2.0GiB  dot_general  bf16[8,2048,2048]  train.py:30 (attn)  h3/attn
    recomputed in 3 of 4: the budget has room for 1, and a GiB of them costs 2.00ms to make again.
    It is decided with 4 equal values; of them this one: kept.
    All of it would be kept from a budget of about 26.0GiB on.

512.0MiB  dot_general  bf16[8,2048,2048]  train.py:41 (mlp)  h3/mlp
    kept: making it again costs 4.00ms per GiB, more than dot_general at train.py:30 (2.00ms per
    GiB), the dearest that is recomputed.
    It is decided with 4 equal values; of them this one: kept.
"""

DIFF = """
train_step
recompute fewer: 1 group of values, 8.0GiB
recompute -> keep: 1 group of values, 4.0GiB
new: 1 group of values, 1.0GiB

figures and settings
  what    before   after
  ────────────────────────
  budget  20.0GiB  24.0GiB
  step    106ms    103ms

values treated differently
   bytes  change                          value        type              source            module
  ──────────────────────────────────────────────────────────────────────────────────────────────────
  8.0GiB  recompute -> recompute 4 of 16  dot_general  16 x bf16[8,204…  train.py:41 (ml…  block/mlp
  4.0GiB  recompute 2 of 16 -> keep       up (mul)     16 x bf16[8,204…  train.py:41 (ml…  block/mlp
  1.0GiB  new                             dot_general  16 x bf16[8,204…  train.py:41 (ml…  block/mlp
"""

FRONTIER = """
frontier of train_step on h200
predicted, not compiled: from 10.0GiB and 125ms a step to 20.0GiB and 100ms

best programs; per GiB: saved up to the next
     peak   step    time  per GiB  found by
  ───────────────────────────────────────────────────────
  10.0GiB  125ms  +25.0%   5.00ms  chain DP
  12.0GiB  115ms  +15.0%    167us  chain DP + greedy fill
  18.0GiB  114ms  +14.0%   7.00ms  greedy fill
  20.0GiB  100ms   +0.0%           keep-all

policies; faster: the frontier with no more bytes
  #     peak   step    time  faster  policy
  ────────────────────────────────────────────────
  a  20.0GiB  100ms   +0.0%      0%  keep-all
  b  12.0GiB  130ms  +30.0%     12%  dots_saveable
"""


def other():
    """What the plan of the samples could be with 4 GiB more."""
    return plan(
        budget_bytes=24 * GIB,
        predicted_seconds=0.103,
        decisions=(
            decision(1, nbytes=2 * GIB, count=10),
            decision(2, nbytes=8 * GIB, recomputed=4, action="recompute", seconds=1e-3),
            decision(3, nbytes=4 * GIB, checkpoint_name="up", primitive="mul"),
            decision(4),
        ),
    )


def test_an_explanation():
    assert shown.text(explained_plan().explain(), width=100) == EXPLAINED.strip("\n")


def test_an_explanation_of_one_module():
    assert shown.text(explained_plan().explain("h3"), width=100) == ABOUT_H3.strip("\n")


def test_a_difference():
    assert shown.text(plan().diff(other()), width=100) == DIFF.strip("\n")


def test_no_difference():
    assert str(plan().diff(plan())) == "train_step\nno difference"


def test_different_programs_are_called_that():
    text = shown.text(plan().diff(plan(fingerprint="g", function="step")), width=100)
    assert text.splitlines()[:2] == [
        "train_step -> step",
        "the fingerprints differ: these plans are for different programs or shapes, and values are "
        "matched by",
    ]


def test_a_frontier():
    assert shown.text(frontier(), width=100) == FRONTIER.strip("\n")


def test_a_compiled_frontier_has_the_compilers_figures():
    points = tuple(
        dataclasses.replace(p, compiled_bytes=p.peak_bytes + GIB) for p in frontier().points
    )
    text = shown.text(frontier(points=points, stock=(), compiled=True), width=100)
    assert "predicted and compiled: from 10.0GiB" in text
    assert re.search(r"10\.0GiB +11\.0GiB +125ms", text)


def test_many_points_are_thinned_and_counted():
    points = tuple(Point((100 + n) * GIB, 1 - n / 100, 0.0, "x") for n in range(60))
    text = shown.text(frontier(points=points), width=100)
    rows = len(re.findall(r"GiB .* x$", text, re.MULTILINE))
    assert rows <= 16
    assert f"… and {60 - rows} more between" in text
    assert "100.0GiB" in text
    assert "159.0GiB" in text


def hostile():
    """Every text of an explanation, a difference and a frontier is as bad as it can be."""
    names = [
        decision(n, checkpoint_name=h, primitive=h, source=h, module=h, dtype=h, again_seconds=n)
        for n, h in enumerate(HOSTILE)
    ]
    bad = explained_plan(
        function="".join(HOSTILE[:2]),
        target=HOSTILE[5],
        decisions=tuple(names),
        notes=HOSTILE,
        hosted=HOSTILE,
    )
    changed = plan(function=HOSTILE[4], target=HOSTILE[6], solver=HOSTILE[0], hosted=HOSTILE)
    points = tuple(dataclasses.replace(p, solver=HOSTILE[0]) for p in frontier().points)
    stock = tuple(Point(GIB * 11 + n, 0.2, 0.1, h) for n, h in enumerate(HOSTILE))
    curve = frontier(function=HOSTILE[1], target=HOSTILE[0], points=points, stock=stock)
    return bad.explain(), bad.diff(changed), curve


@pytest.mark.parametrize("width", [1, 40, 57, 100, 1000])
def test_nothing_is_wider_than_asked_and_nothing_steers(width):
    explanation, diff, curve = hostile()
    for text in (
        shown.text(explanation, width=width),
        shown.text(diff, width=width),
        shown.text(curve, width=width),
    ):
        assert max(map(cell_len, text.splitlines())) <= bounded(width)
        assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f\ud800\u202e\u2066\u200f\u2028]", text) == []
        assert "x" * 401 not in text


class Tags(HTMLParser):
    """Collects the tags and checks that each is closed."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.names: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.names |= {name for name, _ in attrs}
        if tag not in ("line", "rect", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_whole_and_escaped():
    explanation, diff, curve = hostile()
    for html in (shown.html(explanation), shown.html(diff), frontier_html(curve)):
        tags = Tags()
        tags.feed(html)
        assert tags.open == []
        assert not {"script", "img"} & tags.seen
        assert not {name for name in tags.names if name.startswith("on")}
        assert "&lt;script&gt;" in html
        html.encode("utf-8")


def test_html_says_the_same_as_the_text():
    """The chart has a dot for each point and a letter for each policy."""
    html = frontier_html(frontier())
    assert frontier()._repr_html_() == html
    assert html.count("<circle") == 4
    assert re.findall(r">([ab])</text>", html) == ["a", "b"]
    assert "dots_saveable: 12.0GiB, 130ms" in html
    whole = explained_plan().explain()
    assert whole._repr_html_() == shown.html(whole)
    for reason in whole.reasons:
        assert reason.why in shown.html(whole)
    diff = plan().diff(other())
    assert diff._repr_html_() == shown.html(diff)
    assert "recompute 2 of 16 -&gt; keep" in shown.html(diff)
    assert "no difference" in shown.html(plan().diff(plan()))


def test_the_letters_of_policies_that_are_alike_do_not_lie_on_each_other():
    one = frontier().stock[1]
    stock = tuple(dataclasses.replace(one, solver=f"p{n}") for n in range(6))
    stock += (dataclasses.replace(one, seconds=one.seconds * 2),)
    found = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)" dx="6" dy="(-\d+)">', frontier_html(frontier(stock=stock))
    )
    places = [(float(x), float(y) + int(raised)) for x, y, raised in found]
    assert len(places) == 7
    for n, (x, y) in enumerate(places):
        assert all(abs(x - a) >= 10 or abs(y - b) >= 11 for a, b in places[:n])
    assert found[-1][2] == "-4", "one that stands alone is beside its point"


def test_str_is_the_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    whole = explained_plan().explain()
    assert str(whole) == shown.text(whole, width=80)
    assert str(frontier()) == shown.text(frontier(), width=80)
    diff = plan().diff(other())
    assert str(diff) == shown.text(diff, width=80)
