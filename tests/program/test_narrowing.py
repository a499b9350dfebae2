"""Products that are only rounded are written rounded, and others are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxmem.planner.search import Search
from jaxmem.program.cost import op_seconds
from jaxmem.program.ir import Hosting, Op
from jaxmem.program.narrowing import narrowed_products
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from tests.planner.lines import program
from tests.rewrite.test_transfers import compiled

H200 = Target("h200")
ROWS = 4096
MATRIX = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16)
HEADS = jax.ShapeDtypeStruct((8, ROWS, 64), jnp.bfloat16)
KEYS = jax.ShapeDtypeStruct((8, 64, ROWS), jnp.bfloat16)


def wide(a, b):
    return jnp.einsum("...ij,...jk->...ik", a, b, preferred_element_type=jnp.float32)


def rounded(a, b, c):
    return wide(a, b).astype(jnp.bfloat16) @ c


def scaled(a, b, c):
    return (0.5 * wide(a, b) / 3).astype(jnp.bfloat16) @ c


def turned(a, b, c):
    return wide(a, b).T.astype(jnp.float16).astype(jnp.bfloat16) @ c


def heads(q, k):
    scores = wide(q, k).reshape(4, 2, ROWS, ROWS).astype(jnp.bfloat16)
    again = scores.astype(jnp.float32)
    return jnp.tanh(again * 2).sum(-1), (again * 3).sum(-2)


def read_twice(a, b, c):
    product = wide(a, b)
    return product.astype(jnp.bfloat16) @ c, product.sum(0)


def returned(a, b, c):
    product = wide(a, b)
    return product.astype(jnp.bfloat16) @ c, product


def with_bias(a, b, c):
    return (wide(a, b) + c[0].astype(jnp.float32)).astype(jnp.bfloat16) @ c


def with_gelu(a, b, c):
    return jax.nn.gelu(wide(a, b)).astype(jnp.bfloat16) @ c


def to_integers(a, b, c):
    return wide(a, b).astype(jnp.int8).astype(jnp.bfloat16) @ c


MATRICES = (MATRIX,) * 3
ROUNDED = [(rounded, MATRICES), (scaled, MATRICES), (turned, MATRICES), (heads, (HEADS, KEYS))]
IN_FULL = [(f, MATRICES) for f in (read_twice, returned, with_bias, with_gelu, to_integers)]


def found_in(step, args):
    block = program(step, *args).block
    return block, narrowed_products(block.ops, block.outputs)


@pytest.mark.parametrize(("step", "args"), ROUNDED)
def test_what_is_only_rounded_is_written_so(step, args):
    block, found = found_in(step, args)
    (product, written), *others = found.written.items()
    assert not others
    first = next(op for op in block.ops if op.name == "dot_general")
    assert product is first.outputs[0]
    (rounding,) = found.rounding
    assert written is rounding.outputs[0]
    assert written.nbytes == product.nbytes // 2


@pytest.mark.parametrize(("step", "args"), IN_FULL)
def test_what_else_is_read_or_changed_is_written_in_full(step, args):
    assert not found_in(step, args)[1].written


def test_of_wide_operands_and_behind_barriers_products_are_written_in_full():
    def upcast(a, b, c):
        return (a.astype(jnp.float32) @ b.astype(jnp.float32)).astype(jnp.bfloat16) @ c

    def barred(a, b, c):
        return jax.lax.optimization_barrier(wide(a, b)).astype(jnp.bfloat16) @ c

    assert not found_in(upcast, MATRICES)[1].written
    assert not found_in(barred, MATRICES)[1].written


@pytest.mark.parametrize(("step", "args"), ROUNDED + IN_FULL[:4])
def test_what_is_simulated_is_what_is_compiled(step, args):
    traced = program(step, *args)
    simulated = Search(traced, rates_of(H200)).keep_all.temp_bytes
    memory = compiled(H200, traced, traced.block, Hosting()).memory
    assert simulated > 2**24
    assert simulated == pytest.approx(memory.temp_bytes, rel=0.01)


def test_what_is_not_written_takes_no_time():
    traced = program(heads, HEADS, KEYS)
    search, rates = Search(traced, rates_of(H200)), rates_of(H200)
    product: Op = next(op for op in traced.block.ops if op.name == "dot_general")
    fewer = product.outputs[0].nbytes // 2
    whole, narrow = op_seconds(product, rates), op_seconds(product, rates, fewer_bytes=fewer)
    assert whole - narrow == pytest.approx(fewer / rates.bytes_per_second, rel=0.01)
    taken = search.simulator.seconds_of(traced.block.inputs, traced.block.ops, traced.block.outputs)
    assert taken[traced.block.ops.index(product)] == narrow


def test_on_a_cpu_products_are_written_in_full():
    traced = program(rounded, *MATRICES)
    full = Search(traced, rates_of(Target("cpu")), host=True).keep_all.temp_bytes
    assert full == Search(traced, rates_of(H200)).keep_all.temp_bytes + 4 * ROWS * ROWS
