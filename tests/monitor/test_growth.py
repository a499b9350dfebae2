"""What has grown between two points of a run is named, with who holds it."""

from __future__ import annotations

import gc
from typing import Any

import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import TrackError

KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    KEPT.clear()


def test_what_leaks_is_named_with_its_bytes_and_holder():
    with jaxmem.track("epoch", publish=False) as t:
        t.point("warm")
        for n in range(7):
            KEPT.append(jnp.full((32, 33), float(n)))
    growth = t.growth("warm", "end")
    (grown,) = growth.grown
    assert (grown.count, grown.nbytes, growth.nbytes) == (7, 7 * 32 * 33 * 4, 7 * 32 * 33 * 4)
    assert (grown.kind.shape, grown.kind.dtype) == ((32, 33), "float32")
    (holding,) = grown.holdings
    assert (holding.name.split(".")[-1], holding.count) == ("KEPT", 7)
    assert holding.source.startswith("test_growth.py:")
    for shown in (str(growth), growth._repr_html_(), str(t.summary())):
        assert "KEPT" in shown and "+7" in shown and "test_growth.py:" in shown


def test_what_was_there_before_is_not_what_grew():
    KEPT.append(jnp.ones((9, 9)))
    with jaxmem.track("block", publish=False) as t:
        KEPT.append({"mine": jnp.ones((9, 9))})
    (grown,) = t.growth().grown
    (holding,) = grown.holdings
    assert grown.count == 1
    assert holding.largest.endswith("KEPT[1]['mine']")


def test_nothing_grows_where_nothing_stays():
    with jaxmem.track("block", publish=False) as t:
        jnp.ones((17, 19)).sum().block_until_ready()
    gc.collect()
    t.point("after")
    assert not [g for g in t.growth("start", "after").grown if g.kind.shape == (17, 19)]


def test_points_of_one_name_span_the_loop():
    t = jaxmem.track("loop", publish=False)
    with t:
        for n in range(5):
            KEPT.append(jnp.full((3, 5), float(n)))
            t.point("step")
    assert t.growth("step", "step").nbytes == 4 * 3 * 5 * 4


def test_a_long_run_keeps_its_first_and_last_points():
    t, kept = jaxmem.track("long", publish=False), jnp.ones(3)
    for n in range(300):
        t.point(str(n))
    labels = [point.label for point in t._points.kept]
    assert len(labels) == 256 and labels[0] == "0" and labels[-1] == "299"
    assert t._points.dropped == 300 - 256
    assert kept[0] == 1
    assert sum(bool(point.live.ids) for point in t._points.kept) == 2 * 4


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("start", "nowhere"), r"there is no point 'nowhere': taken were 'start', 'mid', 'end'"),
        (("end", "start"), "'end' was taken after 'start'"),
        (("mid", "mid"), "growth needs two points, and 'mid' is the only one"),
    ],
)
def test_points_that_are_not_there_are_refused(names: tuple[str, str], message: str):
    with jaxmem.track("block", publish=False) as t:
        t.point("mid")
    with pytest.raises(TrackError, match=message):
        t.growth(*names)
    with pytest.raises(TrackError, match="nothing was tracked yet"):
        jaxmem.track("new", publish=False).growth()
