"""Numbers that repeat are computed where they are read, by bodies of loops as well."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxmem._compat import checkpoint_name_of
from jaxmem.planner.search import Search
from jaxmem.program.ir import Block, Op, Value
from jaxmem.program.sinking import repeated_numbers
from jaxmem.program.trace import _all_ops
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from tests.planner.lines import program

SHAPE = (8, 16, 16)
NUMBERS = [-1e9, np.float32(-1e9), jnp.finfo(jnp.float32).min]


def outside(x, w, number):
    """A layer masks with what the step made once."""
    masked = jnp.broadcast_to(jnp.asarray(number, jnp.float32), SHAPE)

    def layer(x, w):
        return x + softmax(jnp.where(mask(), x @ w, masked)), None

    return jax.lax.scan(layer, x, w)[0]


def inside(x, w, number):
    """A layer masks with what it makes itself."""

    def layer(x, w):
        masked = jnp.broadcast_to(jnp.asarray(number, jnp.float32), SHAPE)
        return x + softmax(jnp.where(mask(), x @ w, masked)), None

    return jax.lax.scan(layer, x, w)[0]


def mask() -> jax.Array:
    return jnp.tril(jnp.ones(SHAPE[1:], bool))


def softmax(x: jax.Array) -> jax.Array:
    weights = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


def trained(layers, number):
    def step(x, w):
        def loss(w):
            return jnp.square(layers(x, w, number)).sum()

        return w - jax.grad(loss)(w)

    return step


def arguments():
    return jax.ShapeDtypeStruct(SHAPE, jnp.float32), jax.ShapeDtypeStruct((6, 16, 16), jnp.float32)


def search_of(step) -> Search:
    return Search(program(step, *arguments()), rates_of(Target("h200")))


def is_masked(value: Value) -> bool:
    return value.aval.shape == SHAPE and value.aval.dtype == jnp.float32


def loops(ops) -> list[Op]:
    return [op for op in ops if op.loop is not None]


@pytest.mark.parametrize("number", NUMBERS)
def test_it_is_the_same_wherever_a_number_is_made(number):
    """Without derivatives, of which JAX takes out of loops what is known."""
    found = [
        search_of(lambda x, w, layers=layers: layers(x, w, number)).keep_all
        for layers in (outside, inside)
    ]
    assert found[0].temp_bytes == found[1].temp_bytes
    assert found[0].seconds == found[1].seconds


@pytest.mark.parametrize("number", NUMBERS)
def test_a_loop_that_is_given_one_reads_its_own(number):
    forward = loops(program(trained(outside, number), *arguments()).block.ops)[0].loop
    given = [v for v in forward.body.inputs[: forward.num_consts] if is_masked(v)]
    assert given and not any(v in op.values for v in given for op in forward.body.ops)
    assert any(is_masked(v) for v in repeated_numbers(forward.body.ops))


@pytest.mark.parametrize("layers", [outside, inside])
def test_it_is_never_stacked(layers):
    """What a backward iteration computes again with it makes it again, too."""
    search = search_of(trained(layers, -1e9))
    written = search.schedule(search.smallest())
    forward, backward = loops(written.ops)
    assert forward.loop.rewritten
    assert repeated_numbers(backward.loop.body.ops) & {
        v for op in backward.loop.body.ops if op.name == "select_n" for v in op.values
    }
    stacks = forward.outputs[forward.loop.num_carry :]
    assert sum(v.nbytes for v in stacks) <= 6 * np.prod(SHAPE) * 4, "the inputs of the layers"


@pytest.mark.parametrize("layers", [outside, inside])
def test_results_are_the_same(layers):
    step = trained(layers, -1e9)
    search = search_of(step)
    rng = np.random.default_rng(0)
    args = [jnp.asarray(0.1 * rng.normal(size=s.shape), s.dtype) for s in arguments()]
    (found,) = jax.jit(as_function(search.schedule(search.smallest())))(*args)
    np.testing.assert_allclose(found, jax.jit(step)(*args), rtol=1e-5, atol=1e-6)


def test_what_repeats_no_number_is_given():
    """A mask, an array of numbers, a number that is an argument."""

    def step(x, w, scale):
        ramp = jnp.arange(SHAPE[-1], dtype=jnp.float32)
        scaled = jnp.broadcast_to(scale, SHAPE)

        def layer(x, w):
            return jnp.tanh(x @ w) * ramp + scaled, None

        return jax.lax.scan(layer, x, w)[0]

    x, w = arguments()
    made = program(step, x, w, jax.ShapeDtypeStruct((), jnp.float32))
    (op,) = loops(made.block.ops)
    consts = op.loop.body.inputs[: op.loop.num_consts]
    assert consts and all(any(v in inner.values for inner in op.loop.body.ops) for v in consts)


def test_a_name_stays_with_what_is_named():
    """A policy that saves it is about the number outside, not about one in each iteration."""

    def step(x, w):
        scale = checkpoint_name(jnp.sqrt(jnp.float32(2)), "scale")

        def layer(x, w):
            return jnp.tanh(x @ w / scale), None

        return jax.lax.scan(layer, x, w)[0]

    made = program(step, *arguments())
    named = [op.name for op in made.block.ops]
    (loop,) = loops(made.block.ops)
    inside = [op.name for op in loop.loop.body.ops]
    assert "sqrt" in named
    assert "sqrt" in inside
    names = {checkpoint_name_of(op.eqn) for op in loop.loop.body.ops}
    assert names == {None}
    assert "scale" in {checkpoint_name_of(op.eqn) for op in made.block.ops}


def test_loops_in_loops_numbers_that_are_handed_on_and_returned():
    """One is a constant twice over, a carry, and a result of the inner loop and of the outer."""

    def step(x, w):
        number = jnp.full(SHAPE, 0.5, jnp.float32)

        def layer(carry, w):
            def inner(carry, scale):
                y, handed = carry
                return (jnp.tanh(y @ w * scale) + number, number), (number, handed.sum())

            carry, rows = jax.lax.scan(inner, carry, jnp.arange(3.0), reverse=True)
            return carry, (rows, number)

        return jax.lax.scan(layer, (x, number), w)

    made = program(step, *arguments())
    keys = [v.key for op in _all_ops(made.block) for v in op.outputs]
    assert len(set(keys)) == len(keys)
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in arguments()]
    found = jax.jit(as_function(made.block))(*args)
    rewritten = jax.jit(as_function(_all_rewritten(made.block)))(*args)
    for one, other, again in zip(
        jax.tree.leaves(jax.jit(step)(*args)), found, rewritten, strict=True
    ):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, again, rtol=1e-6)
        assert one.dtype == again.dtype


def _all_rewritten(block: Block) -> Block:
    """``block`` with its loops as the planner writes them out, from their bodies' operations."""
    ops = []
    for op in block.ops:
        loop = op.loop
        if loop is not None:
            loop = dataclasses.replace(loop, body=_all_rewritten(loop.body), rewritten=True)
        ops.append(Op(op.eqn, op.inputs, op.outputs, loop, origin=op.origin))
    return dataclasses.replace(block, ops=tuple(ops))
