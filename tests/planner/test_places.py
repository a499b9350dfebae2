"""Temporaries that go where results will be: a place holds one thing at a time, as in XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planner import places
from jaxmem.planner.places import Place, Span, placed, temporary_bytes
from jaxmem.planner.simulate import Simulator
from jaxmem.rewrite.emit import as_function
from jaxmem.targets import compile_for
from tests.planner.lines import RATES, Line, lines, program

SPANS = st.builds(
    lambda start, length, nbytes: Span(start, start + length, nbytes),
    st.integers(0, 9),
    st.integers(0, 5),
    st.integers(1, 9),
)


def apart(first: Span, second: Span) -> bool:
    return first.end < second.start or second.end < first.start


@given(st.lists(SPANS, max_size=12), st.lists(SPANS, max_size=4))
def test_what_is_placed_fits_and_is_alone(temporaries, results):
    given_places = [Place(span.nbytes, span) for span in results]
    found = [temporaries[n] for n in placed(temporaries, given_places)]
    for place in given_places:
        assert all(span.nbytes <= place.nbytes for span in place.taken)
        pairs = [(a, b) for n, a in enumerate(place.taken) for b in place.taken[:n]]
        assert all(apart(a, b) for a, b in pairs)
    there = sorted(span for place in given_places for span in place.taken)
    assert there == sorted([*results, *found])
    # What is left fits nowhere, even now.
    left = list(temporaries)
    for span in found:
        left.remove(span)
    assert not any(place.has_room(span) for span in left for place in given_places)


@given(lines(), st.data())
@settings(max_examples=100)
def test_never_more_than_where_results_are_apart_nor_less_than_what_is_there_at_once(
    line: Line, data
):
    block = line.block
    donated = data.draw(st.lists(st.sampled_from(block.inputs), unique=True))
    simulator = Simulator(RATES)
    simulation = simulator.step(block)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(places, "_SMALL_BYTES", 1)
        found = temporary_bytes(simulator, block, donated)
    rooms = sum(v.nbytes for v in simulation.results)
    made = {v: n for n, op in enumerate(block.ops) for v in op.outputs}
    # Results from where they are made on: with the temporaries they cannot take less than this.
    live = [
        now + sum(v.nbytes for v in simulation.results if made[v] <= at)
        for at, now in enumerate(simulation.timeline)
    ]
    assert max(live) - rooms <= found <= simulation.temp_bytes


def stages(count: int):
    """A stage that hands over all that it has made, as those of a step in pieces do."""

    def run(x, last, *weights):
        kept = []
        for w in weights:
            x = jnp.tanh(x @ w)
            kept.append(x)
        return (*kept, jnp.sin(x @ last) @ last.T)

    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    last = jax.ShapeDtypeStruct((1024, 1024 * count), jnp.float32)
    return run, (x, last, *[w] * count)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_what_hands_over_much_compiles_to_about_what_is_predicted(count):
    fun, args = stages(count)
    made = program(fun, *args)
    compiled = compile_for("h100", as_function(made.block), made.avals())
    found = temporary_bytes(Simulator(RATES), made.block, [])
    assert found == pytest.approx(compiled.memory.temp_bytes, rel=0.05)


def updated(a, b, x):
    """The second argument is the first result, which is made last."""
    second = (a + 1.0) @ x
    return jnp.tanh(b @ second), second @ x


SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def test_a_donated_input_is_where_the_result_is_that_jax_gives_its_memory():
    """In order of arguments and results: not of what is made first."""
    block = program(updated, *[SQUARE] * 3).block
    given = list(block.inputs[:2])
    becomes = places._becomes(block, Simulator(RATES).step(block).fusion, given)
    assert becomes == dict(zip(block.outputs, given, strict=True))
    compiled = compile_for("h100", as_function(block), [SQUARE] * 3, donate=(0, 1))
    aliases = compiled.hlo_text().split("input_output_alias={")[1].split("entry_computation")[0]
    assert "{0}: (0," in aliases
    assert "{1}: (1," in aliases


def test_what_is_in_host_memory_has_no_place_to_give():
    block = program(updated, *[SQUARE] * 3).block
    simulation = Simulator(RATES).step(block)
    given = list(block.inputs[:2])
    before = places._places(block, simulation, given)
    given[0].host = True
    after = places._places(block, simulation, given)
    taken = [[len(place.taken) for place in found] for found in (before, after)]
    assert sorted(taken[0]) == [2, 2]
    assert sorted(taken[1]) == [1, 2], "one result has a place of its own"


def test_a_place_that_is_always_taken_is_not_looked_at():
    block = program(updated, *[SQUARE] * 3).block
    end = len(block.ops)
    assert not Place(8, Span(-1, 1, 8), Span(2, end, 8)).is_ever_free(block)
    assert not Place(8, Span(0, end, 8)).is_ever_free(block)
    assert Place(8, Span(-1, 0, 8), Span(2, end, 8)).is_ever_free(block)
    assert Place(8, Span(1, end, 8)).is_ever_free(block)
    assert Place(8, Span(-1, end - 2, 8)).is_ever_free(block)
