"""What a GPU multiplies beside what a convolution asks for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxmem.program.cost import Rates, block_seconds
from jaxmem.program.tiles import padding
from tests.planner.lines import program

PLAIN = Rates({"float32": 1e12}, 1e15)
TILED = Rates({"float32": 1e12}, 1e15, tiled=True)


def convolution(taken: int, made: int, size: int = 3, **params):
    def conv(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=dims, **params
        )

    groups = params.get("feature_group_count", 1)
    x, kernel = jnp.ones((2, 8, 8, taken)), jnp.ones((size, size, taken // groups, made))
    return conv, (x, kernel)


def padded(fun, *args) -> float:
    (eqn,) = [e for e in jax.make_jaxpr(fun)(*args).eqns if "conv" in e.primitive.name]
    return padding(eqn)


@pytest.mark.parametrize(
    "taken, made, size, expected",
    [
        (32, 128, 3, 1.0),
        (256, 512, 1, 1.0),
        (24, 24, 3, 128 / 24 * 32 / 24),
        (64, 64, 3, 2.0),
        (3, 128, 7, 160 / 147),  # few channels are taken in together with the taps
        (1, 128, 1, 32.0),
    ],
)
def test_tiles_that_are_partly_empty_are_multiplied_whole(taken, made, size, expected):
    conv, args = convolution(taken, made, size)
    assert padded(conv, *args) == pytest.approx(expected)


def test_a_grouped_convolution_is_not_a_product_of_tiles():
    conv, args = convolution(64, 64, feature_group_count=64)
    assert padded(conv, *args) == 1.0
    # Its gradient for the kernel is grouped by the batch.
    gradient = jax.make_jaxpr(jax.grad(lambda *a: conv(*a).sum(), 1))(*args)
    found = [padding(e) for e in gradient.eqns if "conv" in e.primitive.name]
    assert found and all(p == 1.0 for p in found)


@pytest.mark.parametrize("batch", [2, 15, 16, 24])
def test_the_gradient_of_a_kernel_is_a_sum_over_all_places_whatever_the_batch(batch):
    conv, (_, kernel) = convolution(32, 128)
    gradient = jax.make_jaxpr(jax.grad(lambda x, k: conv(x, k).sum(), 1))(
        jnp.ones((batch, 8, 8, 32)), kernel
    )
    *_, last = [e for e in gradient.eqns if "conv" in e.primitive.name]
    assert padding(last) == 1.0


def test_an_empty_convolution_and_other_operations_have_no_tiles():
    conv, (x, kernel) = convolution(32, 128)
    assert padded(conv, x, kernel[..., :0]) == 1.0
    (eqn,) = jax.make_jaxpr(lambda a: a @ a)(jnp.ones((3, 3))).eqns
    assert padding(eqn) == 1.0


def test_only_tiled_rates_count_them():
    conv, args = convolution(24, 24)
    block = program(conv, *args).block
    expected = 128 / 24 * 32 / 24
    assert block_seconds(block, TILED) == pytest.approx(expected * block_seconds(block, PLAIN))
