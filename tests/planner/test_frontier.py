"""A frontier as data: what a budget buys, what one more byte saves, and what it says as JSON."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem
from jaxmem.errors import MissingExtraError
from jaxmem.planner.frontier import Point, pareto, spaced, thinned
from tests.show.samples import GIB, frontier

POINTS = st.lists(
    st.builds(Point, st.integers(1, 60), st.integers(1, 60).map(float), st.just(0.0), st.just("")),
    min_size=1,
)


@given(POINTS)
def test_no_point_is_dominated_and_every_other_is(points):
    best = pareto(points)
    assert set(best) <= set(points)
    for a in best:
        dominating = [b for b in points if b.peak_bytes <= a.peak_bytes and b.seconds <= a.seconds]
        assert {(b.peak_bytes, b.seconds) for b in dominating} == {(a.peak_bytes, a.seconds)}
    for p in points:
        assert any(b.peak_bytes <= p.peak_bytes and b.seconds <= p.seconds for b in best)


@given(POINTS, st.integers(2, 9))
def test_thinned_keeps_both_ends_and_the_count(points, count):
    best = pareto(points)
    few = thinned(best, count)
    assert len(few) <= max(count, 2)
    assert (few[0], few[-1]) == (best[0], best[-1])
    assert few == [p for p in best if p in few]


@given(st.integers(1, 10**12), st.integers(0, 10**12), st.integers(2, 20))
def test_limits_go_from_the_smallest_to_the_largest(smallest, more, count):
    limits = spaced(smallest, smallest + more, count)
    assert len(limits) == count
    assert limits == sorted(limits)
    assert limits[0] == smallest
    assert limits[-1] == pytest.approx(smallest + more, rel=1e-9)


@given(POINTS, st.integers(1, 80), st.integers(1, 80))
def test_a_larger_budget_is_never_slower_and_saves_less_per_byte(points, a, b):
    curve = frontier(points=tuple(pareto(points)))
    low, high = sorted(max(n, curve.points[0].peak_bytes) for n in (a, b))
    assert curve.at(low).seconds >= curve.at(high).seconds
    assert curve.marginal(low) >= curve.marginal(high) * (1 - 1e-12) >= 0


def test_what_a_budget_buys():
    curve = frontier()
    assert curve.at("10GiB") is curve.points[0]
    assert curve.at(18 * GIB - 1) is curve.points[1]
    assert curve.at("1TiB") is curve.at(None) is curve.at("50%") is curve.points[3]
    # 10 to 12 GiB saves 10 ms, 12 to 20 GiB 15 ms; the point at 18 GiB is above the hull.
    assert curve.marginal("11GiB") == pytest.approx(5e-3)
    assert curve.marginal("12GiB") == curve.marginal("19GiB") == pytest.approx(15e-3 / 8)
    assert curve.marginal("20GiB") == 0


def test_a_budget_below_the_smallest_point():
    with pytest.raises(jaxmem.BudgetInfeasibleError, match=r'Use "10.00GiB" or more') as caught:
        frontier().at("9GiB")
    assert caught.value.smallest_bytes == 10 * GIB
    assert caught.value.budget_bytes == 9 * GIB
    with pytest.raises(jaxmem.BudgetInfeasibleError):
        frontier().marginal("9GiB")
    with pytest.raises(jaxmem.BudgetError, match="is not a size"):
        frontier().at("9G")


def test_compiled_bytes_decide_where_they_are_known():
    points = (
        Point(10, 3.0, 0.0, "", compiled_bytes=15),
        Point(11, 2.0, 0.0, "", compiled_bytes=12, problem="undone"),
        Point(12, 1.0, 0.0, "", compiled_bytes=20),
    )
    curve = frontier(points=points, compiled=True)
    assert curve.at(19) is points[0]
    assert curve.at(20) is points[2]
    with pytest.raises(jaxmem.BudgetInfeasibleError, match="smallest compiled peak is 15B"):
        curve.at(14)


def test_json_says_all_of_it():
    data = json.loads(frontier().to_json())
    assert data["schema_version"] == 1
    assert [p["peak_bytes"] for p in data["points"]] == [p.peak_bytes for p in frontier().points]
    assert data["stock"][1]["solver"] == "dots_saveable"


class Axes:
    """Notes what is drawn."""

    def __init__(self):
        self.drawn: list[tuple] = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.drawn.append((name, args, kwargs))


def test_plot_draws_on_the_axes_that_are_given():
    axes = Axes()
    assert frontier().plot(axes) is axes
    (step,) = [args for name, args, _ in axes.drawn if name == "step"]
    assert step == ([10, 12, 18, 20], pytest.approx([125, 115, 114, 100]))
    labels = [kwargs["label"] for name, _, kwargs in axes.drawn if name == "plot"]
    assert labels == ["keep-all", "dots_saveable"]


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingExtraError, match=r'pip install "jaxmem\[notebook\]"'):
        frontier().plot()


def test_plot_with_matplotlib(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("matplotlib", reason="only the notebook extra brings matplotlib")
    axes = frontier().plot()
    assert axes.get_xlabel() == "peak on each device, predicted (GiB)"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "frontier",
        "keep-all",
        "dots_saveable",
    ]
    assert frontier().plot(axes) is axes
