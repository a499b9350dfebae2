"""What kernels work in, learnt from one program, is in the bytes that others are predicted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.hlo import wire
from jaxmem.hlo.products import Product
from jaxmem.planner.workspace import Workspace
from jaxmem.program.loops import nest
from jaxmem.runtime import laidout
from jaxmem.runtime.workspaces import workspaces_in
from tests.planner.lines import program

MIB = 2**20


def shape(*dims: int, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def products_in(fun, *args):
    block = program(fun, *args).block
    return block, [op for op in block.ops if op.name == "dot_general"]


def three(x, w, v):
    return (x @ w) @ w + x @ v


ARGS = shape(8, 16), shape(16, 16), shape(16, 16)
OPERANDS, DIMS, SIZE = (8 * 16, 16 * 16), (8, 16), 8 * 16


def test_as_many_of_a_size_are_taken_in_turn():
    block, ops = products_in(three, *ARGS)
    compiled = [Product(OPERANDS, DIMS, 4 * SIZE, room) for room in (0, 7, 5)]
    assert workspaces_in(block, compiled) == {ops[1]: Workspace(7), ops[2]: Workspace(5)}


def test_others_are_given_the_largest():
    block, ops = products_in(three, *ARGS)
    compiled = [Product(OPERANDS, DIMS, 4 * SIZE, room) for room in (0, 7)]
    assert workspaces_in(block, compiled) == dict.fromkeys(ops, Workspace(7))


def test_a_result_that_is_several_times_as_large_is_parts():
    block, ops = products_in(jnp.matmul, *ARGS[:2])
    compiled = [Product(OPERANDS, (4, *DIMS), 16 * SIZE, 3)]
    assert workspaces_in(block, compiled) == {ops[0]: Workspace(3, 16 * SIZE)}


# The last is four times as large, and no dimension of it counts to four.
@pytest.mark.parametrize("dims", [(4, 16), (8, 17), (16, 32)])
def test_what_no_operation_makes_says_nothing(dims):
    block, _ = products_in(jnp.matmul, *ARGS[:2])
    assert workspaces_in(block, [Product(OPERANDS, dims, 4 * SIZE, 3)]) == {}
    assert workspaces_in(block, [Product((1, 2), DIMS, 4 * SIZE, 3)]) == {}


def test_a_product_of_a_branch_is_not_taken_for_parts_of_another():
    def branching(x, w, flag):
        scores = jax.lax.cond(flag, lambda x: (x.T @ x[:, :8]).sum(), lambda x: x.sum(), x)
        return (x[:, :8] @ w[:8]).sum() + scores

    x, w = shape(8, 16), shape(16, 8)
    block, (op,) = products_in(branching, x, w, shape(dtype="bool"))
    operands = (64, 64)
    whole, parts = Product(operands, (8, 8), 256, 0), Product(operands, (2, 8, 8), 512, 0)
    assert workspaces_in(block, [whole]) == {}
    assert workspaces_in(block, [parts]) == {op: Workspace(0, 512)}
    # The branch multiplies 128 by 64 numbers and makes 128, twice those of the other product.
    assert workspaces_in(block, [Product((64, 128), (2, 8, 8), 512, 0)]) == {}


def test_those_of_loops_are_known_inside():
    def looped(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)

    block = program(looped, *ARGS[:2]).block
    (op,) = workspaces_in(block, [Product(OPERANDS, DIMS, 4 * SIZE, 3)])
    assert op in next(op.loop.body.ops for op in block.ops if op.loop is not None)


def chain(layers: int, width: int, rows: int, dtype: str):
    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.abs(y).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step, [shape(width, width, dtype=dtype)] * layers, shape(rows, width, dtype=dtype)


# Of complex numbers each product is cuBLAS's, with a workspace; the others are made in parts.
@pytest.mark.parametrize(
    ("layers", "width", "rows", "dtype"),
    [(6, 1024, 1024, "complex64"), (6, 1024, 512, "float32"), (6, 512, 512, "float32")],
)
def test_the_smallest_programs_are_predicted_with_what_kernels_work_in(layers, width, rows, dtype):
    step, *args = chain(layers, width, rows, dtype)
    settings = {"target": "h200", "donate_argnums": 0, "progress": False}
    with pytest.raises(jaxmem.BudgetInfeasibleError) as refused:
        jaxmem.plan(step, *args, budget="1MiB", **settings)
    plan = jaxmem.plan(step, *args, budget=refused.value.smallest_bytes, **settings)
    assert plan.predicted_bytes == pytest.approx(plan.compiled_bytes, rel=0.02)


def test_a_program_that_cannot_be_read_is_said_in_the_plan(monkeypatch):
    def unreadable(executable):
        raise wire.WireError("field 9 is missing")

    monkeypatch.setattr(laidout, "read_module", unreadable)
    step, *args = chain(3, 256, 512, "float32")
    plan = jaxmem.plan(step, *args, target="h200", donate_argnums=0, progress=False)
    assert any("no program can be read: WireError: field 9" in note for note in plan.notes)


def test_what_could_not_be_read_is_forgotten_when_something_is(monkeypatch):
    read, tried = laidout.read_module, []

    def once(executable):
        tried.append(executable)
        if len(tried) == 1:
            raise wire.WireError("field 9 is missing")
        return read(executable)

    monkeypatch.setattr(laidout, "read_module", once)
    step, *args = chain(6, 512, 512, "float32")
    plan = jaxmem.plan(step, *args, budget="16MiB", target="h200", donate_argnums=0, progress=False)
    assert len(tried) == 2
    assert not any("can be read" in note for note in plan.notes)


def test_nothing_is_read_of_what_a_cpu_runs(monkeypatch):
    monkeypatch.setattr(laidout, "read_module", lambda executable: pytest.fail("read"))
    step, *args = chain(3, 64, 32, "float32")
    plan = jaxmem.plan(step, *args, target="cpu", donate_argnums=0, progress=False)
    assert not any("can be read" in note for note in plan.notes)


def test_products_of_a_scans_backward_iterations_have_theirs_where_plans_write_them_out():
    """They read what forward iterations made in place of what the traced loop is handed."""

    def step(w, x):
        def net(w):
            return (jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)[0] ** 2).mean()

        return w - jax.grad(net)(w)

    traced = program(step, shape(5, 16, 16), shape(8, 16))
    bodies = [op.loop.body.ops for op in traced.block.ops if op.loop is not None]
    (pair, _), *_ = nest(traced.block).pairs
    written = [op for op in pair.joint.ops if op.name == "dot_general"]
    assert len(written) == 3
    assert {op.origin for op in written} == {
        op for ops in bodies for op in ops if op.name == "dot_general"
    }
