"""What can be decided: real buffers of the forward pass, and the valleys between its blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.planner.candidates import low_positions, valley_positions
from jaxmem.planner.search import Search
from jaxmem.program.fusion import fuse
from jaxmem.program.primitives import may_repeat
from tests.planner.lines import search
from tests.problems import PROBLEMS, pure

LAYERS = 6
NAMES = ("mlp", "transformer_scan", "lstm_nested", "adversarial", "effects", "mixed_leaves")


def net(w, x):
    """Blocks that widen to four times the width and narrow again: a valley between any two."""
    for up, down in zip(*w, strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return jnp.square(x).mean()


@pytest.fixture(scope="module")
def blocks() -> Search:
    w = [[jnp.zeros((32, 128))] * LAYERS, [jnp.zeros((128, 32))] * LAYERS]
    return search(jax.grad(net), w, jnp.zeros((256, 32)))


@pytest.fixture(scope="module", params=NAMES)
def found(request) -> Search:
    step = pure(PROBLEMS[request.param])
    return search(step.function, *step.args)


def test_candidates_are_buffers_made_before_the_turn_that_may_be_made_again(found: Search):
    assert found.choices
    nests = {nest.block.path: nest for nest in found.nest.walk()}
    for choice in found.choices:
        path, turn = choice.turn
        block = nests[path].block
        fusion = fuse(block.inputs, block.ops, block.outputs)
        early = {v for op in block.ops[:turn] for v in op.outputs}
        for candidate in choice.candidates:
            assert candidate.value in early
            assert fusion.is_buffer(candidate.value)
            assert may_repeat(candidate.op)
            assert candidate.nbytes >= candidate.value.nbytes > 0
            assert candidate.seconds >= 0


def test_names_are_unique_and_valleys_name_candidates(found: Search):
    for choice in found.choices:
        names = [c.name for c in choice.candidates]
        assert len(names) == len(set(names))
        for some in (*choice.valleys, *choice.tails, choice.loops):
            assert some <= set(names)
        assert len(choice.tails) == len(choice.valleys)
    assert len({choice.turn for choice in found.choices}) == len(found.choices)


def test_a_group_holds_values_of_one_shape_and_operation(found: Search):
    for members in found.groups.values():
        assert len({(c.op.name, c.value.aval.str_short(), turn) for turn, c in members}) == 1


def test_equal_layers_are_decided_together(blocks: Search):
    counts = {(m[0][1].op.name, m[0][1].value.aval.shape): len(m) for m in blocks.groups.values()}
    assert counts[("dot_general", (256, 128))] == LAYERS
    assert counts[("tanh", (256, 128))] == LAYERS


def test_the_valleys_are_between_the_blocks(blocks: Search):
    (choice,) = blocks.choices
    by_name = {c.name: c.value.aval.shape for c in choice.candidates}
    assert LAYERS - 1 <= len(choice.valleys) <= LAYERS + 1
    for valley in choice.valleys:
        assert {by_name[name] for name in valley} == {(256, 32)}


def test_a_loop_counts_every_iteration():
    """What a scan keeps for one layer it keeps for all."""
    step = pure(PROBLEMS["transformer_scan"])
    found = search(step.function, *step.args)
    inside = [c for c in found.choices if "+" in c.turn[0]]
    assert inside
    (loop,) = {op.loop.length for op in found.program.block.ops if op.loop is not None}
    for choice in inside:
        assert all(c.nbytes == loop * c.value.nbytes for c in choice.candidates)


def test_without_a_gradient_there_is_no_turn():
    assert (
        search(net, [[jnp.zeros((32, 128))], [jnp.zeros((128, 32))]], jnp.zeros((8, 32))).choices
        == ()
    )


# --- valleys -----------------------------------------------------------------------------------

widths = st.lists(st.integers(0, 50), max_size=30)


@given(widths)
def test_a_valley_stands_out_on_both_sides(heights: list[int]):
    positions = list(valley_positions(heights))
    assert positions == sorted(set(positions))
    for before, at, after in zip([-1, *positions], positions, [*positions[1:], None], strict=False):
        low = heights[at]
        assert low > 0
        assert max(heights[before + 1 : at]) >= 1.2 * low
        assert max(heights[at + 1 : after]) >= 1.2 * low


@given(st.integers(1, 9), st.integers(2, 9))
def test_every_valley_of_a_row_of_equal_hills_is_found(low: int, count: int):
    heights = [2 * low, low] * count + [2 * low]
    assert list(valley_positions(heights)) == list(range(1, 2 * count, 2))


@given(widths)
def test_low_positions_are_no_wider_than_half_of_all(heights: list[int]):
    held = [(str(n),) if width else () for n, width in enumerate(heights)]
    lows = list(low_positions(heights, held))
    real = sorted(width for width in heights if width)
    assert bool(lows) == bool(real)
    assert all(heights[at] <= real[(len(real) - 1) // 2] for at in lows)


def test_what_is_next_to_nothing_is_kept_by_every_simple_answer():
    """To make the value of a loss again, all that it sums up would have to stay."""
    w = [[jnp.zeros((32, 128))] * LAYERS, [jnp.zeros((128, 32))] * LAYERS]
    told = search(jax.value_and_grad(net), w, jnp.zeros((256, 32)))
    (choice,) = told.choices
    assert {c.nbytes for c in choice.candidates if c.name in choice.trifles} == {4}
    bases = told.bases()
    simple = [s for s in bases if s.solver == "recompute per block"]
    assert len(simple) > 4
    assert all(choice.trifles <= s.keep[choice.turn] for s in simple)
    untold = search(jax.grad(net), w, jnp.zeros((256, 32)))
    assert bases[0].temp_bytes <= untold.bases()[0].temp_bytes + 8


def test_many_trifles_are_none():
    """All of them together are next to nothing beside the largest, too: as many as that allows."""

    def net(w, x):
        y = x[:8]
        for row in w:
            y = jnp.tanh(jnp.sort(y) * row)
        return (jnp.sort(jnp.tile(y, 1024)) ** 2).sum() + (x**2).sum()

    (choice,) = search(jax.grad(net), list(jnp.zeros((300, 8))), jnp.zeros(1024)).choices
    small = [c.nbytes for c in choice.candidates if c.nbytes < 100]
    largest = max(c.nbytes for c in choice.candidates)
    assert sum(small) > largest / 100
    kept = sum(c.nbytes for c in choice.candidates if c.name in choice.trifles)
    assert largest / 200 < kept <= largest / 100
