"""What a GPU's convolution takes beside its products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxmem.program.convolving import steps_beside, sums_over_places
from jaxmem.program.cost import Rates, block_seconds, op_seconds
from jaxmem.program.work import work_of
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from tests.planner.lines import program

PLAIN = Rates({"float32": 1e12}, 1e15)
H200 = Rates(
    {"bfloat16": 735e12, "float32": 198e12},
    3.87e12,
    convolving={"float32": 367e12},
    beside_seconds=14.4e-12,
)


def convolution(taken: int, made: int, size: int = 3, **params):
    def conv(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=dims, **params
        )

    groups = params.get("feature_group_count", 1)
    x, kernel = jnp.ones((2, 8, 8, taken)), jnp.ones((size, size, taken // groups, made))
    return conv, (x, kernel)


def equations(fun, *args) -> list:
    return [e for e in jax.make_jaxpr(fun)(*args).eqns if "conv_general" in e.primitive.name]


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


@pytest.mark.parametrize("channels, places, dtype, milliseconds", SEEN)
def test_convolutions_take_what_they_took(channels, places, dtype, milliseconds):
    def conv(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)

    shapes = (places // 4, 2, 2, channels), (3, 3, channels, channels)
    block = program(conv, *[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]).block
    assert 0.85 < block_seconds(block, H200) * 1e3 / milliseconds < 1.2


# Places, channels read and made, milliseconds forward and of the kernel's gradient, of profiles of
# the same net.
BOTH_WAYS = [
    (512 * 512 * 256, 24, 24, 9.6, 8.34),
    (512 * 512 * 256, 1, 24, 8.9, 7.16),
]


@pytest.mark.parametrize("places, taken, made, forward, backward", BOTH_WAYS)
def test_the_gradient_of_a_kernel_takes_less_than_its_convolution(
    places, taken, made, forward, backward
):
    def conv(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)

    x = jax.ShapeDtypeStruct((places // 4, 2, 2, taken), "bfloat16")
    kernel = jax.ShapeDtypeStruct((3, 3, taken, made), "bfloat16")
    y = jax.eval_shape(conv, x, kernel)
    seconds = [
        op_seconds(op, H200) * 1e3
        for op in program(
            lambda x, kernel, y: (conv(x, kernel), jax.vjp(lambda k: conv(x, k), kernel)[1](y)),
            *(x, kernel, y),
        ).block.ops
        if op.name == "conv_general_dilated"
    ]
    first, *_, gradient = seconds
    assert first == pytest.approx(forward, rel=0.03)
    assert gradient == pytest.approx(backward, rel=0.03)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("channels", [1, 8, 24, 48, 192])
def test_a_convolution_takes_no_less_than_its_bytes_and_more_places_take_longer(channels, summed):
    def conv(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)

    def taken(places):
        x, kernel = jnp.ones((places, 8, 8, channels)), jnp.ones((3, 3, channels, channels))
        differentiated = jax.grad(lambda k: conv(x, k).sum())
        (*_, eqn) = equations(differentiated, kernel) if summed else equations(conv, x, kernel)
        assert sums_over_places(eqn) == summed
        work = work_of(eqn)
        seconds = H200.convolution_seconds(eqn, work)
        assert seconds >= work.nbytes / H200.bytes_per_second
        assert seconds >= work.flops / max(H200.flops["float32"], H200.convolving["float32"])
        return seconds

    assert taken(1) < taken(2) < taken(8)


def test_places_and_taps_are_counted_once_whatever_the_gradient():
    conv, (x, kernel) = convolution(32, 128)
    places, taps = 2 * 8 * 8, 9
    (forward,) = equations(conv, x, kernel)
    _, *gradients = equations(jax.grad(lambda *a: conv(*a).sum(), (0, 1)), x, kernel)
    assert [steps_beside(e) for e in (forward, *gradients)] == [places * taps] * 3


def test_the_gradient_of_a_strided_convolution_does_not_count_holes():
    def strided(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dims)

    x, kernel = jnp.ones((2, 8, 8, 32)), jnp.ones((2, 2, 32, 32))
    _, gradient = equations(jax.grad(lambda x: strided(x, kernel).sum()), x)
    assert steps_beside(gradient) == 2 * 8 * 8 * 4 / 4


def test_few_channels_are_taken_in_together_with_the_taps_but_one_is_not():
    found = [steps_beside(*equations(*few(channels))) for channels in (1, 2, 15, 16)]
    assert found == [2 * 64 * 49, 2 * 64, 2 * 64, 2 * 64 * 49]


def few(channels):
    conv, args = convolution(channels, 64, size=7)
    return conv, *args


def test_a_grouped_or_empty_convolution_has_kernels_of_its_own():
    conv, args = convolution(64, 64, feature_group_count=64)
    # The gradient for the kernel is grouped by the batch.
    every = equations(conv, *args) + equations(jax.grad(lambda *a: conv(*a).sum(), 1), *args)
    assert len(every) == 3
    assert [steps_beside(e) for e in every] == [0, 0, 0]
    conv, (x, kernel) = convolution(32, 128)
    assert steps_beside(*equations(conv, x, kernel[..., :0])) == 0


@pytest.mark.parametrize(
    "size, stride, places", [((3, 3), 1, 2), ((16, 16), 16, 224), ((8, 8), 1, 8)], ids=str
)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_the_gradient_of_a_kernel_is_known_by_its_batch(size, stride, places, layout):
    def conv(x, kernel):
        dims = (layout, "HWIO", layout)
        strides = (stride, stride)
        return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=dims)

    shape = (4, places, places, 16) if layout == "NHWC" else (4, 16, places, places)
    x, kernel = jnp.ones(shape), jnp.ones((*size, 16, 8))
    forward, *gradients = equations(jax.grad(lambda *a: conv(*a).sum(), (0, 1)), x, kernel)
    assert not sums_over_places(forward)
    assert sorted(map(sums_over_places, gradients)) == [False, True]


def test_convolutions_have_a_rate_of_their_own_and_gradients_of_their_kernels_do_not():
    conv, (x, kernel) = convolution(32, 128)
    fast = Rates({"float32": 1e12}, 1e15, convolving={"float32": 4e12})

    def ratio(fun, *args):
        block = program(fun, *args).block
        return block_seconds(block, PLAIN) / block_seconds(block, fast)

    assert ratio(conv, x, kernel) == pytest.approx(4)
    assert ratio(lambda k: jax.vjp(lambda k: conv(x, k), k)[1](x @ jnp.ones((32, 128))), kernel) < 2
    assert ratio(lambda a: a @ a, jnp.ones((512, 512))) == pytest.approx(1)


def test_a_target_of_one_dtype_alone_has_rates():
    target = Target("h100", flops={"float32": 1e12})
    assert rates_of(target).convolving == {}
    measured = Target("h200", flops={"bfloat16": 735e12, "float32": 198e12})
    assert rates_of(measured).convolving["float32"] == pytest.approx(367e12, rel=0.01)
    assert rates_of(measured).beside_seconds == pytest.approx(14.4e-12)
    assert rates_of(Target("cpu")).beside_seconds == 0
