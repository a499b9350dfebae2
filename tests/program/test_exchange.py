"""What devices exchange for one operation: laws of the split product, on each way to split it."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from jaxmem.program.collectives import gathering, reducing, scattering
from jaxmem.program.exchange import ALONE, exchange, gathered
from jaxmem.program.ir import Op
from jaxmem.program.layout import Layout
from tests.planner.lines import program

ROWS, INNER, COLUMNS = 64, 128, 32
X, Y = ("x", 2), ("y", 4)
WHOLE = Layout(((), ()))


def product() -> Op:
    (op,) = program(jnp.dot, jnp.zeros((ROWS, INNER)), jnp.zeros((INNER, COLUMNS))).block.ops
    return op


def laid(op: Op, *layouts: Layout | None) -> Op:
    """The operation with its operands, then its results, split like this."""
    for value, layout in zip((*op.inputs, *op.outputs), layouts, strict=True):
        value.lay_out(layout)
    return op


def split(*axes) -> Layout:
    """A layout with at most one axis, or ``None``, for each dimension."""
    return Layout(tuple((axis,) if axis else () for axis in axes))


def test_nothing_is_exchanged_where_nothing_is_split():
    assert exchange(product()) is ALONE
    found = exchange(laid(product(), WHOLE, WHOLE, WHOLE))
    assert (found.devices, found.share, found.working_bytes) == (1, 1.0, 0)
    assert not found.is_collective


def test_rows_of_a_batch_need_no_exchange():
    """Data parallel, forward: each device has its rows, and all of the weights."""
    op = laid(product(), split(Y, None), WHOLE, split(Y, None))
    found = exchange(op)
    assert not found.is_collective
    assert found.devices == 4
    assert found.share == sum(v.nbytes for v in (*op.values, *op.outputs)) / (
        4 * (ROWS * INNER + INNER * COLUMNS + ROWS * COLUMNS)
    )


def test_a_sum_over_what_is_split_is_reduced():
    """The gradient of weights over rows of a batch, and the second product of tensor parallel."""
    op = laid(product(), split(None, Y), split(Y, None), WHOLE)
    found = exchange(op)
    assert found.sent == reducing(op.outputs[0].nbytes, 4)
    assert found.devices == 4
    assert found.working_bytes == 0


@pytest.mark.parametrize("result", [split(Y, None), split(None, Y)])
def test_a_sum_whose_result_is_split_alike_is_scattered(result):
    """ZeRO: every device adds up its part, after each made all of it."""
    op = laid(product(), split(None, Y), split(Y, None), result)
    found = exchange(op)
    whole = 4 * ROWS * COLUMNS
    assert op.outputs[0].nbytes == whole / 4
    assert found.sent == scattering(whole, 4)
    assert found.working_bytes == whole


def test_weights_that_are_split_along_the_devices_of_the_rows_are_gathered():
    """FSDP: the batch needs the devices, so the weights come together for the product."""
    op = laid(product(), split(Y, None), split(None, Y), split(Y, None))
    weights = op.inputs[1]
    assert gathered(op) == {weights: WHOLE}
    found = exchange(op)
    assert found.sent == gathering(4 * INNER * COLUMNS, 4)
    assert found.working_bytes == 4 * INNER * COLUMNS
    assert found.devices == 4


def test_only_what_is_needed_elsewhere_is_gathered():
    """Over a grid the columns stay split along the axis that the result is split along."""
    weights = Layout(((X,), (Y,)))
    op = laid(product(), split(X, None), weights, Layout(((X,), (Y,))))
    assert gathered(op) == {op.inputs[1]: split(None, Y)}
    assert exchange(op).devices == 8
    assert exchange(op).working_bytes == 4 * INNER * COLUMNS / 4


@pytest.mark.parametrize("left", list(itertools.product([None, X, Y], repeat=2)))
def test_laws_of_any_split(left):
    """No device sends or works for what it has; as many share the work as results differ on."""
    if left[0] == left[1] and left[0]:
        return  # An axis splits one dimension.
    for right, out in itertools.product(itertools.product([None, X, Y], repeat=2), repeat=2):
        if (right[0] and right[0] == right[1]) or (out[0] and out[0] == out[1]):
            continue
        op = laid(product(), split(*left), split(*right), split(*out))
        found = exchange(op)
        parts = math.prod(size for _, size in {a for a in out if a})
        assert found.devices >= parts
        assert 1 / 8 <= found.share <= 1
        assert found.is_collective == (found.sent.nbytes > 0)
        for value, layout in gathered(op).items():
            assert layout.all_axes < value.layout.all_axes
            assert layout.part_bytes(value.aval) > value.nbytes
        # What is gathered is worked on; a sum is exchanged exactly where its dimension is split.
        assert found.working_bytes >= sum(
            layout.part_bytes(v.aval) for v, layout in gathered(op).items()
        )
        if left[1] and left[1] == right[0]:
            assert found.is_collective


def test_element_wise_work_is_split_as_its_result_is():
    """An operand that is split otherwise comes together first."""
    (op,) = program(jnp.add, jnp.zeros((64, 64)), jnp.zeros((64, 64))).block.ops
    same = exchange(laid(op, split(Y, None), split(Y, None), split(Y, None)))
    assert not same.is_collective
    assert (same.devices, same.share) == (4, 1 / 4)
    other = laid(op, split(None, Y), split(Y, None), split(Y, None))
    assert gathered(other) == {op.inputs[0]: WHOLE}
    assert exchange(other).sent == gathering(4 * 64 * 64, 4)


def test_reductions_and_transposes_follow_their_dimensions():
    (total,) = program(
        lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), jnp.zeros((64, 32))
    ).block.ops
    kept = exchange(laid(total, split(None, Y), split(Y)))
    assert not kept.is_collective
    summed = exchange(laid(total, split(Y, None), Layout(((),))))
    assert summed.sent == reducing(4 * 32, 4)
    (turned,) = program(jnp.transpose, jnp.zeros((64, 32))).block.ops
    assert not exchange(laid(turned, split(Y, None), split(None, Y))).is_collective
    assert gathered(laid(turned, split(Y, None), split(Y, None))) == {turned.inputs[0]: WHOLE}


def test_rows_of_a_split_table_are_summed_up():
    """A device looks up what it has of an embedding; of the other rows it has zeros."""
    traced = program(lambda table, at: table[at], jnp.zeros((64, 32)), jnp.zeros(16, int))
    (op,) = [op for op in traced.block.ops if op.name == "gather"]
    at = Layout(((),) * len(op.inputs[1].aval.shape))
    by_rows = exchange(laid(op, split(Y, None), at, WHOLE))
    assert by_rows.sent == reducing(op.outputs[0].nbytes, 4)
    by_columns = exchange(laid(op, split(None, Y), at, split(None, Y)))
    assert not by_columns.is_collective
