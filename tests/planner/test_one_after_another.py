"""Nets of one step that do not need each other run one after the other, as they are written."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.planner.search import Search
from jaxmem.program.ir import Block, Hosting, Op, Value
from jaxmem.program.loops import is_backward
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from tests.planner.lines import program
from tests.planner.test_segments_together import with_workspaces
from tests.planner.test_stacks import generative, twins
from tests.rewrite.test_transfers import compiled

H200 = Target("h200")


def loss(weights, x):
    def layer(y, w):
        return y + jnp.tanh(y @ w), None

    return jnp.square(jax.lax.scan(layer, x, weights)[0]).mean()


def told(a, b, x, z):
    """Each takes a step, and says how far it was; both gradients are there before the first."""
    first, grad_a = jax.value_and_grad(loss)(a, x)
    second, grad_b = jax.value_and_grad(loss)(b, z)
    return a - grad_a, b - grad_b, first, second


def at_once(a, b, x, z):
    """Each takes a step as soon as its gradient is there."""
    a = a - jax.grad(loss)(a, x)
    return a, b - jax.grad(loss)(b, z)


def chained(a, b, x, z):
    """The second needs what the first step made."""
    a = a - jax.grad(loss)(a, x)
    return a, b - jax.grad(loss)(b, z + a[0].sum())


def together(a, b, x, z):
    """Both forward passes come first."""
    grads = jax.grad(lambda a, b: loss(a, x) + loss(b, z), (0, 1))(a, b)
    return a - grads[0], b - grads[1]


def summed(a, b, x, z):
    """What is made of the first gradient's sum is not made before the second net needs it."""
    grad_a = jax.grad(loss)(a, x)
    total = jnp.tanh(grad_a.sum((0, 1)))
    grad_b = jax.grad(loss)(b, z)
    return b - grad_b * total, x


STEPS = (told, at_once, chained, together, twins, generative)


def arguments(layers: int = 24, width: int = 512, rows: int = 4096):
    shapes = [(layers, width, width), (layers, width, width), (rows, width), (rows, width)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def search_of(step, *sizes) -> Search:
    return Search(program(step, *arguments(*sizes), donate=(0, 1)), rates_of(H200))


def ties(block: Block) -> list[Op]:
    return [op for op in block.ops if op.recompute == "jaxmem.before"]


def needed_for(op: Op, block: Block) -> set[Op]:
    """By definition: all operations that run before ``op`` in any order."""
    makers = {v: one for one in block.ops for v in one.outputs}
    found: set[Op] = set()
    waiting = [op]
    while waiting:
        made = [makers[v] for v in waiting.pop().values if v in makers]
        waiting += [one for one in made if one not in found]
        found.update(made)
    return found


def written_out(search: Search) -> Iterator[Block]:
    for solution in (search.smallest(), *search.bodies.in_segments()):
        yield search.schedule(solution)


@pytest.mark.parametrize("step", STEPS)
def test_every_loop_needs_the_backward_loop_before_it(step):
    for block in written_out(search_of(step, 9, 8, 16)):
        loops = [op for op in block.ops if op.loop is not None and not op.recompute]
        before = None
        for op in loops:
            if is_backward(op):
                before = op
            elif before is not None:
                assert before in needed_for(op, block)


def test_where_each_loop_needs_the_one_before_nothing_is_tied():
    for block in written_out(search_of(chained, 9, 8, 16)):
        assert not ties(block)


@pytest.mark.parametrize("step", [told, at_once])
def test_a_tie_keeps_nothing_alive_and_copies_nothing(step):
    """What is waited for is returned or read later anyway, and what waits are the weights."""
    search = search_of(step, 9, 8, 16)
    block = search.program.block
    weights, start = block.inputs[1], block.inputs[3]
    (second,) = [n for n, op in enumerate(block.ops) if op.loop is not None and start in op.values]
    later = {v for op in block.ops[second:] for v in op.values}
    later |= {v for v in block.outputs if isinstance(v, Value)}
    for written in written_out(search):
        (tie,) = [op for op in ties(written) if weights in op.values]
        assert start not in tie.values
        assert set(tie.values) - {weights} < later


@pytest.mark.parametrize("step", [*(step for step in STEPS if step is not chained), summed])
def test_every_result_of_a_tie_is_read(step):
    """Or XLA drops it, and the order with it."""
    blocks = [*written_out(search_of(step, 9, 8, 16))]
    assert any(map(ties, blocks))
    for written in blocks:
        read = {v for op in written.ops for v in op.values}
        read |= {v for v in written.outputs if isinstance(v, Value)}
        assert all(v in read for op in ties(written) for v in op.outputs)


@pytest.mark.parametrize("step", STEPS)
def test_results_are_the_same(step):
    given = arguments(9, 8, 16)
    rng = np.random.default_rng(0)
    args = [jnp.asarray(0.3 * rng.normal(size=s.shape), s.dtype) for s in given]
    expected = jax.jit(step)(*args)
    search = search_of(step, 9, 8, 16)
    least = min(search.bodies.in_segments(), key=lambda s: s.temp_bytes)
    found = jax.jit(as_function(search.schedule(least)))(*args)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_in_segments_both_compile_to_what_is_simulated():
    """Twins took an eighth more: both began before the first had ended (jax 0.12)."""
    search = with_workspaces(search_of(at_once))
    both = [s for s in search.bodies.in_segments() if len(s.segments) == 2]
    least = min(both, key=lambda s: s.temp_bytes)
    block = search.schedule(least)
    assert ties(block)
    made = compiled(H200, search.program, block, Hosting()).memory.temp_bytes
    assert 0.98 <= least.temp_bytes / made <= 1.02
