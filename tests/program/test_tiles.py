"""What a GPU multiplies beside what a convolution asks for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxmem.program.cost import Rates, block_seconds
from jaxmem.program.tiles import padding, sums_over_places
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


# Milliseconds of cuDNN's kernels on an H200, of one profiled step each: channels, places, dtype.
SEEN = [
    (24, 512 * 512 * 256, "bfloat16", 9.65),
    (48, 256 * 256 * 128, "bfloat16", 1.39),
    (96, 128 * 128 * 64, "bfloat16", 0.315),
    (192, 64 * 64 * 32, "bfloat16", 0.135),
    (64, 256 * 56 * 56, "float32", 0.260),
    (128, 256 * 28 * 28, "float32", 0.163),
    (256, 256 * 14 * 14, "float32", 0.144),
]
H200 = {"bfloat16": 735e12, "float32": 367e12}


@pytest.mark.parametrize("channels, places, dtype, milliseconds", SEEN)
def test_convolutions_take_what_they_took(channels, places, dtype, milliseconds):
    conv, args = convolution(channels, channels)
    products = 2 * places * 9 * channels**2
    found = padded(conv, *args) * products / H200[dtype] * 1e3
    # Of few channels and the products alone it would be a tenth.
    assert 0.85 < found / milliseconds < 1.4


def test_few_channels_are_taken_in_together_with_the_taps_but_one_is_not():
    assert padded(*few(3)) - 1 == pytest.approx((padded(*few(16)) - 1) * 16 / (3 * 49))
    assert padded(*few(1)) - 1 == pytest.approx((padded(*few(16)) - 1) * 16)


def few(channels):
    conv, args = convolution(channels, 64, size=7)
    return conv, *args


def test_a_grouped_convolution_is_not_a_product_of_tiles():
    conv, args = convolution(64, 64, feature_group_count=64)
    assert padded(conv, *args) == 1.0
    # Its gradient for the kernel is grouped by the batch.
    gradient = jax.make_jaxpr(jax.grad(lambda *a: conv(*a).sum(), 1))(*args)
    found = [padding(e) for e in gradient.eqns if "conv" in e.primitive.name]
    assert found and all(p == 1.0 for p in found)


@pytest.mark.parametrize("batch", [2, 15, 16, 24])
def test_the_gradient_of_a_kernel_takes_as_long_whatever_the_batch(batch):
    conv, (_, kernel) = convolution(32, 128)
    gradient = jax.make_jaxpr(jax.grad(lambda x, k: conv(x, k).sum(), 1))(
        jnp.ones((batch, 8, 8, 32)), kernel
    )
    forward, *_, last = [e for e in gradient.eqns if "conv" in e.primitive.name]
    assert (sums_over_places(forward), sums_over_places(last)) == (False, True)
    assert padding(last) == padded(*convolution(32, 128)[:1], *convolution(32, 128)[1])


def test_an_empty_convolution_and_other_operations_have_no_tiles():
    conv, (x, kernel) = convolution(32, 128)
    assert padded(conv, x, kernel[..., :0]) == 1.0
    (eqn,) = jax.make_jaxpr(lambda a: a @ a)(jnp.ones((3, 3))).eqns
    assert padding(eqn) == 1.0


def test_only_tiled_rates_count_them():
    conv, args = convolution(24, 24)
    block = program(conv, *args).block
    expected = padded(conv, *args)
    assert block_seconds(block, TILED) == pytest.approx(expected * block_seconds(block, PLAIN))


def test_convolutions_have_a_rate_of_their_own_and_gradients_of_their_kernels_do_not():
    conv, (x, kernel) = convolution(32, 128)
    fast = Rates({"float32": 1e12}, 1e15, convolving={"float32": 4e12})

    def ratio(fun, *args):
        block = program(fun, *args).block
        return block_seconds(block, PLAIN) / block_seconds(block, fast)

    assert ratio(conv, x, kernel) == pytest.approx(4)
    assert ratio(lambda k: jax.vjp(lambda k: conv(x, k), k)[1](x @ jnp.ones((32, 128))), kernel) < 2
    assert ratio(lambda a: a @ a, jnp.ones((512, 512))) == pytest.approx(1)
