"""Reductions that are part of one kernel read what they share once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxmem.program.fusion import fuse
from jaxmem.program.ir import Op
from jaxmem.program.primitives import Kind
from tests.planner.lines import program

X = jnp.ones((64, 32))
W = jnp.ones((32, 32))
NBYTES = X.size * 4


def reductions(fun, *args) -> list[tuple[Op, int]]:
    """The reductions of ``fun`` in order, with the bytes of ``X``'s size that each moves."""
    block = program(fun, *args).block
    fusion = fuse(block.inputs, block.ops, block.outputs)
    found = zip(block.ops, fusion.kinds, strict=True)
    return [(op, fusion.moved_bytes(op) // NBYTES) for op, kind in found if kind is Kind.REDUCE]


def read(fun, *args) -> list[int]:
    return [nbytes for _, nbytes in reductions(fun, *args)]


def test_reductions_of_one_operand_read_it_once():
    assert read(lambda x: (x.sum(0), (x * x).sum(0), jnp.exp(x).max(0)), X) == [1, 0, 0]


def test_what_a_sibling_does_not_read_is_read():
    assert read(lambda x, y: (x.sum(0), (x * y).sum(0), (y * y).sum(0)), X, X) == [1, 1, 0]


def test_a_reduction_of_what_the_first_one_gave_reads_again():
    """The variance about a mean: it cannot start before the mean is there."""
    assert read(lambda x: ((x - x.sum(0)) ** 2).sum(0), X) == [1, 1]


@pytest.mark.parametrize(
    "other",
    [lambda x: x.sum(1), lambda x: x.reshape(32, 64).sum(0), lambda x: x[:32].sum(0)],
)
def test_reductions_of_another_form_read_for_themselves(other):
    first, second = reductions(lambda x: (x.sum(0), other(x)), X)
    block = program(other, X).block
    fusion = fuse(block.inputs, block.ops, block.outputs)
    (alone,) = [fusion.moved_bytes(op) for op in block.ops if op.name == "reduce_sum"]
    assert first[1] == 1 and second[1] == alone // NBYTES


def test_a_reduction_does_not_read_what_its_kernel_makes():
    def fun(x, w):
        y = jnp.tanh(x @ w) + x
        return y, y.sum(0), (y @ w).sum(0)

    # The second one reads the result of a product, which is a kernel of its own.
    assert read(fun, X, W) == [0, 1]


def test_no_kernel_reaches_across_a_barrier():
    def fun(x):
        first = x.sum(0)
        x, first = jax.lax.optimization_barrier((x, first))
        return first, (x * x).sum(0)

    assert read(fun, X) == [1, 1]


def test_only_what_is_near_is_looked_at():
    """The first sibling of many is far away; the others are not."""
    assert read(lambda x: [(x * n).sum(0) for n in range(2, 12)], X) == [1] + 9 * [0]


def test_a_reduction_of_a_number_reads_nothing():
    assert read(lambda: jnp.broadcast_to(1.0, (64, 32)).sum(0)) == [0]
