"""What operations cost, against the compiler's own count of floating-point operations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.program.cost import Rates, op_seconds
from jaxmem.program.work import arithmetic
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from jaxmem.work import Work
from tests.planner.lines import program

RATES = Rates({"float32": 1e12, "bfloat16": 4e12}, 1e11)
IMAGE, KERNEL = jnp.ones((2, 16, 16, 8)), jnp.ones((3, 3, 8, 12))
LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolution(**options):
    return lambda x, w: lax.conv_general_dilated(
        x, w, options.pop("strides", (1, 1)), "SAME", dimension_numbers=LAYOUT, **options
    )


PRODUCTS = {
    "matrix": (lambda a, b: a @ b, jnp.ones((32, 64)), jnp.ones((64, 16))),
    "batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), *[jnp.ones((4, 8, 8))] * 2),
    "two dimensions": (lambda a, b: jnp.einsum("ijk,jkl->il", a, b), *[jnp.ones((8, 8, 8))] * 2),
    "vector": (lambda a, b: a @ b, jnp.ones((32, 64)), jnp.ones(64)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_count_what_xla_counts(name: str):
    function, *args = PRODUCTS[name]
    (op,) = [o for o in program(function, *args).block.ops if o.name == "dot_general"]
    counted = jax.jit(function).lower(*args).cost_analysis()["flops"]
    assert arithmetic(op.eqn) == pytest.approx(counted)


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_count_taps_times_channels(groups: int):
    kernel = KERNEL[:, :, : 8 // groups]
    step = program(convolution(feature_group_count=groups), IMAGE, kernel)
    (op,) = step.block.ops
    assert arithmetic(op.eqn) == 2 * (2 * 16 * 16 * 12) * (3 * 3 * 8 // groups)


def test_the_holes_of_a_dilated_input_cost_nothing():
    """The input gradient of a strided convolution costs what the convolution costs."""
    forward = convolution(strides=(2, 2))
    step = program(jax.grad(lambda x, w: forward(x, w).sum()), IMAGE, KERNEL)
    costs = [arithmetic(o.eqn) for o in step.block.ops if o.name == "conv_general_dilated"]
    plain = 2 * (2 * 8 * 8 * 12) * (3 * 3 * 8)
    assert costs[-1] == pytest.approx(plain)


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3)], ids=["as wide as its stride", "wider"])
def test_a_transposed_convolution_and_its_gradients_cost_alike(kernel: tuple[int, int]):
    def up(x, w):
        return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=LAYOUT).sum()

    weights = jnp.ones((*kernel, 8, 12))
    step = program(jax.value_and_grad(up, (0, 1)), IMAGE, weights)
    costs = [arithmetic(o.eqn) for o in step.block.ops if o.name == "conv_general_dilated"]
    assert len(costs) == 3
    assert costs == pytest.approx([2 * IMAGE.size * 12 * kernel[0] * kernel[1]] * 3)


def test_time_is_the_slower_of_arithmetic_and_traffic():
    assert RATES.seconds(Work(2e12, 1, "float32")) == 2.0
    assert RATES.seconds(Work(2e12, 1, "bfloat16")) == 0.5
    assert RATES.seconds(Work(1, 3e11, "bfloat16")) == 3.0
    assert RATES.seconds(Work(2e12, 1, "float8_unheard_of")) == 2.0, "as float32"


def test_cycles_come_on_top_of_arithmetic_and_other_kernels_on_top_of_all():
    rates = dataclasses.replace(RATES, cycle_seconds=1e-12)
    assert rates.seconds(Work(1e12, 1e11, cycles=5e11)) == 1.5
    assert rates.seconds(Work(1e12, 3e11, cycles=5e11)) == 3.0, "hidden behind the traffic"
    assert rates.seconds(Work(1e12, 3e11, cycles=5e11, apart=1e11)) == 4.0
    assert RATES.seconds(Work(1e12, 1e11, cycles=5e11)) == 1.0, "nothing is known of its cycles"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_that_sums_the_rows_of_both_operands_is_slower_in_tf32(dtype):
    a = jnp.ones((256, 256), dtype)
    rates = dataclasses.replace(RATES, summing_rows={"float32": 5e11})

    def seconds(dims):
        step = program(lambda a, b: lax.dot_general(a, b, (dims, ((), ()))), a, a)
        (op,) = [op for op in step.block.ops if op.name == "dot_general"]
        return op_seconds(op, rates)

    both = seconds(((0,), (0,)))
    others = {seconds(((i,), (j,))) for i, j in [(1, 0), (0, 1), (1, 1)]}
    assert others == {2 * 256**3 / RATES.flops[dtype]}
    assert both == (2 if dtype == "float32" else 1) * others.pop()


def test_only_a_hopper_is_known_to_turn_operands_of_tf32():
    known = {name: rates_of(Target(name)) for name in ("h200", "h100", "a100", "b200", "cpu")}
    assert {n for n, r in known.items() if r.summing_rows} == {"h200", "h100"}
    for name in ("h200", "h100"):
        rates, whole = known[name], Target(name).flops["float32"]
        assert rates.summing_places["float32"] < rates.summing_rows["float32"] < whole
        assert whole <= rates.convolving["float32"]


def test_cycles_are_known_of_gpus_of_the_table():
    assert rates_of(Target("h200")).cycle_seconds == pytest.approx(1 / (132 * 1.98e9))
    assert rates_of(Target("cpu")).cycle_seconds == 0.0


def test_loops_branches_and_calls_cost_what_is_inside():
    x = jnp.ones((128, 128))
    product = op_seconds(program(lambda x: x @ x, x).block.ops[0], RATES)

    def looped(x):
        return lax.scan(lambda c, _: (c @ x, None), x, None, length=7)[0]

    def chosen(x):
        return lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x)

    def costs(function, name):
        return next(op_seconds(o, RATES) for o in program(function, x).block.ops if o.name == name)

    assert costs(looped, "scan") == pytest.approx(7 * product)
    assert costs(chosen, "cond") == pytest.approx(2 * product)
