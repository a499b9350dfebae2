"""Copies to and from the host: in turn on each way, and slower while both are busy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.planner.links import Links
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Value

AVAL = jax.core.ShapedArray((), jnp.float32)
DUPLEX = Rates({"float32": 1.0}, 1.0, 2.0, 4.0, duplex_bytes_per_second=1.0)


def run(rates: Rates, *copies: tuple[str, int, float]) -> tuple[Links, list[float]]:
    links, values = Links(rates), [Value(AVAL) for _ in copies]
    for value, (way, nbytes, earliest) in zip(values, copies, strict=True):
        links.copy(way, value, nbytes, earliest)
    return links, [links.ended[v] for v in values]


def test_ways_that_share_nothing_are_as_fast_as_alone():
    rates = Rates({"float32": 1.0}, 1.0, 2.0, 4.0)
    assert run(rates, ("send", 8, 0), ("fetch", 8, 0), ("send", 8, 1))[1] == [4, 2, 8]


def test_both_ways_at_once_take_what_both_keep():
    assert run(DUPLEX, ("send", 8, 0), ("fetch", 8, 0))[1] == [8, 8]


def test_a_copy_is_alone_again_when_the_other_has_ended():
    """The send takes two seconds at half of its rate, beside two bytes of the fetch."""
    links, ended = run(DUPLEX, ("send", 2, 0), ("fetch", 8, 0))
    assert ended == pytest.approx([2, 2 + 6 / 4])
    assert links.free == {"send": ended[0], "fetch": ended[1]}


def test_a_copy_that_ends_before_the_other_way_starts_is_alone():
    assert run(DUPLEX, ("send", 8, 10), ("fetch", 8, 0))[1] == [14, 2]
    # Two seconds alone are 8 bytes of the fetch; the other 4 go in four seconds beside the send.
    assert run(DUPLEX, ("send", 8, 2), ("fetch", 12, 0))[1] == pytest.approx([2 + 4 + 2, 6])


copies = st.lists(
    st.tuples(st.sampled_from(["send", "fetch"]), st.integers(0, 50), st.floats(0, 30)),
    min_size=1,
    max_size=8,
)


@given(copies)
def test_sharing_costs_time_and_never_more_than_sharing_all_of_it(asked):
    fast = Rates({"float32": 1.0}, 1.0, 2.0, 4.0)
    slow = Rates({"float32": 1.0}, 1.0, 1.0, 1.0)
    alone, shared, always = (max(run(r, *asked)[1]) for r in (fast, DUPLEX, slow))
    assert alone - 1e-9 <= shared <= always + 1e-9


@given(copies)
def test_each_way_takes_one_copy_after_the_other(asked):
    _, ended = run(DUPLEX, *asked)
    for way in ("send", "fetch"):
        ends = [e for e, (its, *_) in zip(ended, asked, strict=True) if its == way]
        assert ends == sorted(ends)
    for end, (way, nbytes, earliest) in zip(ended, asked, strict=True):
        assert end >= earliest + nbytes / (2.0 if way == "send" else 4.0) - 1e-9
