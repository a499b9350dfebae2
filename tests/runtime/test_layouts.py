"""How values are split over a mesh, found before anything is compiled: loops as one iteration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem.program.ir import Program, Value
from jaxmem.runtime.layouts import lay_out
from jaxmem.targets import Target
from tests.planner.lines import program

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
EIGHT = Target("8xh100")
ROWS, WIDTH, LAYERS = 64, 16, 3
BY_ROWS, BY_LAST = PartitionSpec("data"), PartitionSpec(None, "data")


def shape(spec: PartitionSpec | None, *dims: int) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(MESH, spec or PartitionSpec())
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding)


def laid_out(function, *args) -> Program:
    traced = program(function, *args)
    lay_out(traced, EIGHT, lambda ways: 0)
    return traced


def parts(atom) -> tuple[int, ...]:
    assert isinstance(atom, Value)
    assert atom.layout is not None
    return atom.layout.parts


def test_layouts_spread_from_arguments_to_results():
    traced = laid_out(
        lambda w, x: (x @ w, (x @ w).T, (x @ w).sum(0)),
        shape(None, WIDTH, WIDTH),
        shape(BY_ROWS, ROWS, WIDTH),
    )
    product, turned, total = traced.block.outputs
    assert [parts(a) for a in (product, turned, total)] == [(8, 1), (1, 8), (1,)]
    assert product.nbytes == 4 * ROWS * WIDTH / 8
    assert total.nbytes == 4 * WIDTH


def scanned(w, x):
    """Returns of one scan what it carries, what it stacks, and the stack of what it carries."""

    def layer(y, w):
        y = jnp.tanh(y @ w)
        return y, (y, y.sum())

    return jax.lax.scan(layer, x, w)


def test_results_of_a_loop_that_the_step_returns_are_laid_out_as_inside_it():
    """What a loop gives is given on by one iteration of it, also where nothing else reads it."""
    traced = laid_out(scanned, shape(None, LAYERS, WIDTH, WIDTH), shape(BY_ROWS, ROWS, WIDTH))
    carried, stacked, sums = traced.block.outputs
    assert parts(carried) == (8, 1)
    assert parts(stacked) == (1, 8, 1)
    assert parts(sums) == (1,)
    (loop,) = [op.loop for op in traced.block.ops if op.loop is not None]
    row, weights = loop.body.inputs[-2:]
    assert parts(row) == (8, 1)
    assert parts(weights) == (1, 1)
    for inside, outside in zip(loop.body.outputs, traced.block.outputs, strict=True):
        if isinstance(inside, Value):
            own = parts(inside)
            assert parts(outside)[len(parts(outside)) - len(own) :] == own


def test_a_carry_has_one_layout_from_the_first_turn_to_the_last():
    def step(w, x):
        return jax.lax.fori_loop(0, LAYERS, lambda _, y: jnp.tanh(y @ w), x)

    traced = laid_out(step, shape(BY_LAST, WIDTH, WIDTH), shape(BY_ROWS, ROWS, WIDTH))
    for op in traced.block.ops:
        if op.loop is not None:
            carried = range(op.loop.num_consts, op.loop.num_consts + op.loop.num_carry)
            for n, place in enumerate(carried):
                before, after = op.loop.body.inputs[place], op.loop.body.outputs[n]
                if isinstance(after, Value) and before.nbytes and before.layout is not None:
                    assert before.layout == op.outputs[n].layout
    assert parts(traced.block.outputs[0]) == (8, 1)


@pytest.mark.parametrize("spec", [BY_ROWS, BY_LAST])
def test_rows_of_stacked_weights_are_split_as_the_stack_is_but_for_its_length(spec):
    stacked = PartitionSpec(None, *spec)
    traced = laid_out(
        lambda w, x: scanned(w, x)[0], shape(stacked, LAYERS, WIDTH, WIDTH), shape(None, 8, WIDTH)
    )
    (loop,) = [op.loop for op in traced.block.ops if op.loop is not None]
    whole = parts(traced.block.inputs[0])
    assert whole[0] == 1
    assert parts(loop.body.inputs[-1]) == whole[1:]


def test_whole_arrays_stay_whole():
    traced = laid_out(scanned, shape(None, LAYERS, WIDTH, WIDTH), shape(None, ROWS, WIDTH))
    for op in traced.block.ops:
        for value in op.outputs:
            assert value.layout is None or set(value.layout.parts) <= {1}
            assert value.nbytes == value.aval.size * value.aval.dtype.itemsize


@pytest.mark.parametrize("loops", [False, True], ids=["straight", "in a scan"])
def test_a_mask_is_split_as_its_first_reader_needs_it_and_splits_no_other(loops: bool):
    """Nothing that depends on no argument hands layouts on from one reader to another."""

    def step(x, whole):
        mask = jnp.broadcast_to(jnp.tri(WIDTH, dtype=bool), (ROWS, WIDTH, WIDTH))

        def masked(y, _):
            return jnp.where(mask, jnp.tanh(y), 0.0), None

        masked_x = jax.lax.scan(masked, x, None, LAYERS)[0] if loops else masked(x, None)[0]
        return masked_x, jnp.where(mask, whole, 1.0)

    by_rows = PartitionSpec("data", None, None)
    traced = laid_out(step, shape(by_rows, ROWS, WIDTH, WIDTH), shape(None, ROWS, WIDTH, WIDTH))
    masked, whole = traced.block.outputs
    assert parts(masked) == (8, 1, 1)
    assert parts(whole) == (1, 1, 1)
    masks = [
        value
        for op in traced.block.ops
        for value in op.outputs
        if value.aval.shape == (ROWS, WIDTH, WIDTH) and value.aval.dtype == bool
    ]
    assert masks
    assert all(parts(mask) == (8, 1, 1) for mask in masks)
    read = [v for op in traced.block.ops if op.loop is not None for v in op.loop.body.inputs]
    assert loops == bool(read)
    assert all(parts(v) == (8, 1, 1) for v in read if v.aval.shape == (ROWS, WIDTH, WIDTH))
