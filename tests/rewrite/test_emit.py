"""Blocks run as functions: the same results whatever is made anew, names and effects in place."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.program.ir import Block, Op
from jaxmem.rewrite.emit import as_function
from jaxmem.targets import Target, compile_for
from jaxmem.targets.options import memory_schedules
from tests.planner.lines import program, random_keep, search
from tests.problems import (
    PROBLEMS,
    assert_no_less_exact,
    assert_same,
    in_float64,
    pure,
    random_step,
)

LOOPS = ("lstm_bidirectional", "scan_many_carries", "accumulation", "transformer_scan_unroll")
# Level 0 compiles in half the time.
OPTIONS = {**memory_schedules(Target("cpu"))[0], "xla_backend_optimization_level": 0}
X = jnp.linspace(-1, 1, 12).reshape(3, 4)


def run(block: Block, arrays: list) -> list:
    return compile_for("cpu", as_function(block), arrays, options=OPTIONS).executable(*arrays)


def renewed(block: Block) -> Block:
    """``block`` with every loop in it marked as changed, so that it is made anew."""
    ops = []
    for op in block.ops:
        if op.loop is not None:
            loop = replace(op.loop, body=renewed(op.loop.body), rewritten=True)
            op = Op(op.eqn, op.inputs, op.outputs, loop, op.recompute, origin=op.origin)
        ops.append(op)
    return replace(block, ops=tuple(ops))


@pytest.mark.parametrize("name", LOOPS)
def test_loops_made_anew_compute_the_same(name: str):
    step = pure(PROBLEMS[name])
    traced = program(step.function, *step.args)
    arrays = [*traced.consts, *jax.tree.leaves(step.args)]
    again = renewed(traced.block)
    assert any(op.loop is not None and op.loop.rewritten for op in again.ops)
    assert_same(run(traced.block, arrays), run(again, arrays))


def test_loops_made_anew_keep_their_form():
    """Length, direction and unrolling are those of the user's loop."""

    def loops(x):
        carry, stacked = lax.scan(lambda c, y: (c + y, c * y), x[0], x, reverse=True, unroll=2)
        return carry, stacked, lax.scan(lambda c, _: (c * 2, None), x, None, length=5)[0]

    traced = program(loops, X)
    closed = jax.make_jaxpr(as_function(renewed(traced.block)))(X)
    found = [e.params for e in closed.eqns if e.primitive.name == "scan"]
    forms = [(p["length"], p["reverse"], p["unroll"]) for p in found]
    assert forms == [(3, True, 2), (5, False, 1)]
    assert_same(list(jax.tree.leaves(loops(X))), as_function(renewed(traced.block))(X))


def test_inputs_literals_and_repeated_values_as_outputs():
    def step(x, y):
        z = x + y
        return z, x, z, 2.0, y

    traced = program(step, X, X + 1, donate=(0, 1))
    assert_same(jax.tree.leaves(step(X, X + 1)), as_function(traced.block)(X, X + 1))
    assert as_function(replace(traced.block, ops=()))  # nothing to run is no error
    empty = Block("", traced.block.inputs, (), traced.block.inputs[::-1])
    assert_same([X + 1, X], as_function(empty)(X, X + 1), multiple=0)


def test_the_same_operations_are_emitted():
    step = pure(PROBLEMS["custom_jvp"])
    traced = program(step.function, *step.args)
    closed = jax.make_jaxpr(as_function(traced.block))(*traced.avals())
    emitted = Counter(e.primitive.name for e in closed.eqns)
    assert emitted == Counter(op.name for op in traced.block.ops)


def test_a_recomputation_carries_its_name_into_the_compiled_program():
    def step(w, x):
        def loss(w):
            return jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w))

        return jax.grad(loss)(w)

    w, x = jnp.eye(64), jnp.ones((256, 64))
    found = search(step, w, x)
    block = found.scheduler.schedule(dict.fromkeys(random_keep(found, 0), frozenset()))
    tags = {op.recompute for op in block.ops if op.recompute and op.name == "dot_general"}
    assert tags
    for target in ("cpu", "h200"):
        options = memory_schedules(Target(target))[0]
        text = compile_for(target, as_function(block), [w, x], options=options).hlo_text()
        assert all(f"{tag}/" in text or f"{tag})" in text for tag in tags)
    assert "jaxmem.recompute" not in compile_for("cpu", step, [w, x]).hlo_text()


def test_a_barrier_holds_all_its_operands_back():
    traced = program(lambda x: x * 2, jnp.ones(4)).block
    (x,), (use,) = traced.inputs, traced.ops
    y, z = x.like(), x.like()
    barrier = Op(use.eqn, (x, x), (y, z), None, "jaxmem.recompute.step.1", barrier=True)
    block = Block("", (x,), (barrier,), (y, z))
    (eqn,) = jax.make_jaxpr(as_function(block))(jnp.ones(4)).eqns
    assert eqn.primitive.name == "optimization_barrier"
    assert len(eqn.invars) == len(eqn.outvars) == 2
    assert "jaxmem.recompute.step.1" in str(eqn.source_info.name_stack)


def test_effects_stay_in_order_around_a_loop_made_anew():
    def step(x):
        jax.debug.callback(lambda: log.append("before"), ordered=True)

        def body(carry, row):
            jax.debug.callback(lambda i: log.append(int(i)), carry, ordered=True)
            return carry + 1, row * 2

        count, rows = lax.scan(body, 0, x)
        jax.debug.callback(lambda: log.append("after"), ordered=True)
        return count, rows

    traced = program(step, X)
    for block in (traced.block, renewed(traced.block)):
        log: list = []
        jax.jit(as_function(block))(X)
        jax.effects_barrier()
        assert log == ["before", 0, 1, 2, "after"]


# --- fuzzing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [pytest.param(1, marks=pytest.mark.wide), 3, pytest.param(5, marks=pytest.mark.wide)]
)
def test_random_programs_with_random_kept_sets(seed: int):
    """A rewrite may round differently, not worse: both are judged against float64."""
    step, args = random_step(seed)
    found = search(step, *args)
    arrays = [*found.program.consts, *jax.tree.leaves(args)]
    exact = jax.tree.leaves(in_float64(step, args))
    reference = run(found.program.block, arrays)
    written = found.scheduler.schedule(random_keep(found, seed))
    assert found.choices
    outputs = run(written, arrays)
    assert_no_less_exact(exact, reference, outputs)
    keys = [np.asarray(leaf) for leaf in reference if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    same = [np.asarray(leaf) for leaf in outputs if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(np.array_equal(a, b) for a, b in zip(keys, same, strict=True))
