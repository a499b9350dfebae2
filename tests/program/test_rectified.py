"""Gradients of rectified values are masked by these, not by what they were before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on

from jaxmem.planner.simulate import Simulator
from jaxmem.program.calling import Caller
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.rates import rates_of
from jaxmem.targets.target import Target

ODD = [0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45]


def traced(step, *args):
    caller = Caller(step, ())
    return caller.trace(caller.take(args, {})).program


def outputs_of(program, *args):
    return as_function(program.block)(*program.consts, *args)


def ops_of(program, name):
    return [op for op in program.block.ops if op.eqn.primitive.name == name]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_of_odd_numbers_it_is_the_same_to_the_bit(dtype):
    x = jnp.array(ODD, dtype)

    def step(x, g):
        return jax.vjp(lambda x: jax.nn.relu(-x), x)[1](g)

    program = traced(step, x, x)
    (mask,), (made,) = ops_of(program, "gt"), ops_of(program, "max")
    assert mask.inputs[0] is made.outputs[0]
    (found,) = outputs_of(program, x, x)
    (wanted,) = jax.jit(step)(x, x)
    bits = jnp.uint32 if dtype == jnp.float32 else jnp.uint16
    np.testing.assert_array_equal(
        jax.lax.bitcast_convert_type(found, bits), jax.lax.bitcast_convert_type(wanted, bits)
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.where(x > 1, jnp.maximum(x, 0), x),
        lambda x: jnp.where(x > 0, jnp.maximum(x, 1), x),
        lambda x: jnp.where(x >= 0, jnp.maximum(x, 0), x),
        lambda x: jnp.where(x < 0, jnp.maximum(x, 0), x),
        lambda x: jnp.where(0 > x, jnp.maximum(x, 0), x),
        lambda x: jnp.where(x > x[::-1], jnp.maximum(x, 0), x),
        lambda x: jnp.where(x > 0, jnp.minimum(x, 0), x),
        lambda x: jnp.where(2 * x > 0, jnp.maximum(x, 0), x),
    ],
)
def test_other_comparisons_read_what_they_read(function):
    x = jnp.array(ODD)
    program = traced(lambda x: function(-x), x)
    made = {v for name in ("max", "min") for op in ops_of(program, name) for v in op.outputs}
    compared = [op for name in ("gt", "ge", "lt") for op in ops_of(program, name)]
    assert compared
    assert not made.intersection(v for op in compared for v in op.values)
    np.testing.assert_array_equal(outputs_of(program, x)[0], function(-x))


def test_an_argument_is_read_as_it_is():
    """It is there in any case, and in host memory it would be fetched to be rectified."""
    program = traced(lambda w: jax.grad(lambda w: jax.nn.relu(w).sum())(w), jnp.array(ODD))
    (mask,) = ops_of(program, "gt")
    assert mask.inputs[0] is program.block.inputs[0]


def test_numbers_that_are_known_are_compared_as_they_are():
    helper = jax.jit(lambda slope, x: jnp.where(slope > 0, slope * x, x), inline=False)
    x = jnp.array(ODD)
    program = traced(lambda x: helper(0.5, x) + helper(-0.5, x), x)
    np.testing.assert_array_equal(outputs_of(program, x)[0], helper(0.5, x) + helper(-0.5, x))


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="compute_on is an operation of its own there"
)
def test_what_the_host_rectifies_is_not_read_on_the_device():
    def step(x):
        x = x + 1
        with compute_on("device_host"):  # pyright: ignore
            y = jnp.maximum(x, 0)
        return y, jnp.where(x > 0, 1.0, 2.0)

    (mask,) = ops_of(program := traced(step, jnp.array(ODD)), "gt")
    (made,) = ops_of(program, "max")
    assert mask.inputs[0] is made.inputs[0]


def test_what_is_rectified_in_a_loop_is_not_read_outside_of_it():
    def step(x):
        def body(x, _):
            return jax.nn.relu(x - 1), jnp.where(x > 0, 1.0, 2.0)

        return jax.lax.scan(body, x, length=3), jnp.where(x > 0, 3.0, 4.0)

    x = jnp.array(ODD)
    program = traced(step, x)
    for found, wanted in zip(
        outputs_of(program, x), jax.tree.leaves(jax.jit(step)(x)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_what_comes_before_is_not_kept():
    """Of each layer the product of its input is all that the backward pass reads."""
    layers, nbytes = 12, 4 * 512 * 512

    def step(weights, x):
        def loss_of(weights):
            y = x
            for w in weights:
                y = jax.nn.relu(y @ w + 1.0)
            return y.sum()

        return jax.grad(loss_of)(weights)

    program = traced(step, [jnp.ones((512, 512))] * layers, jnp.ones((512, 512)))
    temp = Simulator(rates_of(Target("h200"))).step(program.block).temp_bytes
    assert (layers - 1) * nbytes < temp < (layers + 3) * nbytes
