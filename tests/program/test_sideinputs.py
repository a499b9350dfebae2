"""Sums that a convolution computes: which they are, and that compiled programs have no more."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.planner.places import temporary_bytes
from jaxmem.planner.simulate import Simulator
from jaxmem.program.ir import Block
from jaxmem.program.sideinputs import summed_in_convolutions
from jaxmem.rewrite.emit import as_function
from jaxmem.targets import compile_for
from tests.planner.lines import RATES, program

TOGETHER = dataclasses.replace(RATES, together=True)
ROWS, CHANNELS = 32, 64
X = jax.ShapeDtypeStruct((ROWS, 64, 64, CHANNELS), jnp.bfloat16)
K = jax.ShapeDtypeStruct((3, 3, CHANNELS, CHANNELS), jnp.bfloat16)
DIMS = ("NHWC", "HWIO", "NHWC")


def convolved(x, k):
    return lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def summed(x, *kernels):
    total = convolved(x, kernels[0])
    for k in kernels[1:]:
        total = total + convolved(x, k)
    return jnp.sin(total.reshape(-1, CHANNELS) @ kernels[0][0, 0])


def as_volumes(x, *kernels):
    parts = [convolved(x, k).reshape(4, ROWS // 4, *x.shape[1:]) for k in kernels]
    return jnp.sin((parts[0] + parts[1]).reshape(-1, CHANNELS) @ kernels[0][0, 0])


def found_in(fun, *args) -> tuple[Block, list[tuple[str, str]]]:
    block = program(fun, *args).block
    made = {v: op.name for op in block.ops for v in op.outputs}
    found = summed_in_convolutions(block.ops, block.outputs)
    return block, [(made[total], made[result]) for total, result in found.items()]


@pytest.mark.parametrize(("fun", "count"), [(summed, 2), (summed, 3), (as_volumes, 2)])
def test_the_first_two_are_added_up_by_the_second_and_no_more_is_compiled(fun, count: int):
    block, found = found_in(fun, X, *[K] * count)
    assert found == [("add", "conv_general_dilated")]
    expected = temporary_bytes(Simulator(TOGETHER), block, [])
    compiled = compile_for("h200", as_function(block), (X, *[K] * count))
    assert "conv-bias-activation" in compiled.hlo_text()
    assert expected == pytest.approx(compiled.memory.temp_bytes, rel=0.03)


def both_read(x, a, b):
    one, other = convolved(x, a), convolved(x, b)
    return (one + other).mean(), one.max()


def returned(x, a, b):
    one = convolved(x, a)
    return one + convolved(x, b), one


def with_itself(x, a, b):
    one = convolved(x, a)
    return one + one


def with_another(x, a, b):
    return x + convolved(x, a)


def grouped(x, a, b):
    halves = [
        lax.conv_general_dilated(
            x, k[:, :, :1], (1, 1), "SAME", dimension_numbers=DIMS, feature_group_count=CHANNELS
        )
        for k in (a, b)
    ]
    return halves[0] + halves[1]


def of_gradients(x, a, b):
    def loss(x):
        return (convolved(x, a) ** 2 + convolved(x, b) ** 2).sum()

    return jax.grad(loss)(x)


@pytest.mark.parametrize(
    "fun", [both_read, returned, with_itself, with_another, grouped, of_gradients]
)
def test_what_is_read_twice_or_no_forward_convolution_is_none(fun):
    assert found_in(fun, X, K, K)[1] == []


def test_a_norm_of_the_sum_is_no_part_of_the_convolution():
    def normed(x, a, b):
        y = (convolved(x, a) + convolved(x, b)).astype(jnp.float32)
        return y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))

    block, found = found_in(normed, X, K, K)
    assert len(found) == 1
    compiled = compile_for("h200", as_function(block), (X, K, K)).memory.temp_bytes
    assert temporary_bytes(Simulator(TOGETHER), block, []) == pytest.approx(compiled, rel=0.03)
