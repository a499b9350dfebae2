"""What is done for some rows of an update's leaves gives those rows of what the update gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.program.calling import Caller
from jaxmem.program.ir import Block, Value
from jaxmem.program.rowwise import Chunks, Rows, rows_at_once, rows_of
from jaxmem.rewrite.chunked import as_loop
from jaxmem.rewrite.emit import as_function
from jaxmem.targets.options import going_by_rows
from jaxmem.targets.target import Target

ROWS, WIDE = 12, 4
LEAF = jnp.linspace(0.5, 2.0, ROWS * WIDE * 3).reshape(ROWS, WIDE, 3)
OTHER = jnp.cos(LEAF)
SQUARE = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)

# Each takes a leaf that waits, an array of its shape, and a matrix; it gives the leaf's successor.
BY_ROWS = {
    "moments": lambda a, b, m: 0.9 * a + 0.1 * b**2,
    "scaled by what all share": lambda a, b, m: a * jnp.sqrt((b**2).sum()),
    "where": lambda a, b, m: jnp.where(a > b, a, 0.0).clip(-1.0, 1.0),
    "softmax of each": lambda a, b, m: jax.nn.softmax(a + b, axis=-1),
    "norm of each row": lambda a, b, m: a / jnp.sqrt((a**2).mean(axis=(1, 2), keepdims=True)),
    "product": lambda a, b, m: a @ m + b,
    "batched product": lambda a, b, m: jnp.einsum("lij,lkj,lkm->lim", a, b, a),
    "turned": lambda a, b, m: (a.transpose(0, 2, 1) * b.transpose(0, 2, 1)).transpose(0, 2, 1),
    "turned to the end": lambda a, b, m: jnp.moveaxis(jnp.moveaxis(a, 0, -1) * 2.0, -1, 0),
    "flattened": lambda a, b, m: (a.reshape(ROWS, -1) - b.reshape(ROWS, -1)).reshape(a.shape),
    "split and joined": lambda a, b, m: jnp.concatenate([a[..., 2:], b[..., :2]], axis=-1),
    "padded": lambda a, b, m: jnp.pad(a[:, :, 1:], ((0, 0), (0, 0), (1, 0))),
    "sorted": lambda a, b, m: jnp.sort(-a, axis=1)[:, ::-1],
    "summed up": lambda a, b, m: jnp.cumsum(a, axis=2) + lax.cummax(b, axis=1),
    "positions": lambda a, b, m: a * jnp.arange(3.0) + jnp.argmax(a, axis=2)[..., None],
    "a number for each row": lambda a, b, m: a * jnp.arange(float(ROWS))[:, None, None],
    "rows of what is mixed before": lambda a, b, m: a + b[::-1],
    "noise": lambda a, b, m: a + jax.random.normal(jax.random.key(0), a.shape),
    "rounded": lambda a, b, m: a.astype(jnp.bfloat16).astype(jnp.float32),
}
ACROSS = {
    "a norm of the leaf": lambda a, b, m: a / jnp.sqrt((a**2).sum()),
    "turned over": lambda a, b, m: a[::-1],
    "running along": lambda a, b, m: jnp.cumsum(a, axis=0),
    "the first row": lambda a, b, m: a * a[0],
    "a product of all": lambda a, b, m: jnp.einsum("lij,kij,kij->lij", a, b, a),
    "folded": lambda a, b, m: a.reshape(2, ROWS // 2, WIDE, 3).sum(0).repeat(2, 0),
    "twice by other axes": lambda a, b, m: (
        a + (a.reshape(ROWS, ROWS) + a.reshape(ROWS, ROWS).T).reshape(a.shape)
    ),
    "a loop": lambda a, b, m: lax.fori_loop(0, 3, lambda i, c: c * 1.1, a),
}


def trace(fun, args):
    caller = Caller(fun, ())
    return caller.trace(caller.take(args, {})).program


def block_of(fun) -> Block:
    return trace(fun, (LEAF, OTHER, SQUARE)).block


def rows_in(block: Block) -> Rows | None:
    (result,) = block.outputs
    assert isinstance(result, Value)
    return rows_of(block, block.inputs[:1], [result])


def chunked(rows: Rows, count: int, over=()) -> Chunks:
    (result,) = rows.outputs
    assert isinstance(result, Value)
    return Chunks(rows, count, {result: rows.leaves[0]}, tuple(over))


@pytest.mark.parametrize(
    "count",
    [
        5,
        pytest.param(3, marks=pytest.mark.wide),
        *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 6)),
    ],
)
@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_of_an_update_are_those_of_the_whole(name: str, count: int):
    """Five rows at a time leave two."""
    block = block_of(BY_ROWS[name])
    rows = rows_in(block)
    assert rows is not None
    expected = jax.jit(as_function(block))(LEAF, OTHER, SQUARE)
    found = jax.jit(as_loop(chunked(rows, count)))(LEAF, OTHER, SQUARE)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ACROSS)
def test_what_needs_other_rows_is_not_split(name: str):
    if name == "twice by other axes":
        square = jnp.ones((ROWS, ROWS, 1))
        block = trace(lambda a: a + a.transpose(1, 0, 2), (square,)).block
    else:
        block = block_of(ACROSS[name])
    assert rows_in(block) is None


def test_what_only_the_device_has_is_read_by_rows_and_not_made_before():
    """A float32 copy of a bfloat16 gradient is made of some rows at a time."""
    rows = rows_in(block_of(lambda a, b, m: a + b.astype(jnp.bfloat16).astype(jnp.float32)))
    assert rows is not None
    assert not rows.once.ops
    assert set(rows.taken) == {*rows.inputs[:2]}


def test_what_is_read_whole_and_by_rows_is_refused_or_made_before():
    rows = rows_in(block_of(lambda a, b, m: a * b + b.sum()))
    assert rows is not None
    assert [op.name for op in rows.once.ops] == ["reduce_sum"]


def test_results_on_the_device_take_the_place_of_arguments():
    """Parameters beside moments: both are written row by row, the second over what it replaces."""

    def update(leaf, params, grad):
        leaf = 0.9 * leaf + grad
        return leaf, params - 0.1 * leaf

    block = trace(update, (LEAF, OTHER, OTHER * 2)).block
    moment, params = block.outputs
    rows = rows_of(block, block.inputs[:1], [moment])
    assert rows is not None
    assert set(rows.in_rows) == {moment, params}
    chunks = Chunks(rows, 5, {moment: block.inputs[0]}, block.inputs[1:2])
    run = jax.jit(as_loop(chunks), compiler_options=going_by_rows(Target.local(measure=False)))
    found = run(LEAF, OTHER, OTHER * 2)
    for a, b in zip(found, update(LEAF, OTHER, OTHER * 2), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_leaves_that_are_only_read_stay():
    block = trace(lambda leaf, fixed: leaf * fixed, (LEAF, OTHER)).block
    (result,) = block.outputs
    rows = rows_of(block, block.inputs, [result])
    assert rows is not None
    found = jax.jit(as_loop(Chunks(rows, 4, {result: block.inputs[0]})))(LEAF, OTHER)
    np.testing.assert_allclose(found[0], LEAF * OTHER, rtol=1e-6)


@pytest.mark.parametrize(
    ("nbytes", "count"), [(0, 1), (48, 1), (3 * 48, 3), (5 * 48, 4), (100 * 48, 6)]
)
def test_rows_at_once_divide_all_where_they_can(nbytes: int, count: int):
    rows = rows_in(block_of(BY_ROWS["moments"]))
    assert rows is not None
    assert rows.row_bytes() == 48
    assert rows_at_once(rows, nbytes) == count
