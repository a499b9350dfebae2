"""What the checks after compiling find: recomputations that are gone, results that differ."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem
from jaxmem.program.ir import Block, Op, Value
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime import verify
from jaxmem.targets import compile_for
from jaxmem.targets.options import memory_schedules
from jaxmem.targets.target import Target
from tests.fitted_steps import tanh_chain
from tests.planner.lines import search

KEPT = {"cpu": memory_schedules(Target("cpu"))[0], "h200": {}}


@pytest.fixture(scope="module")
def rewritten():
    """A chain with everything made again: its schedule, and arguments."""

    step = jax.value_and_grad(functools.partial(tanh_chain, layers=4))
    args = jnp.eye(64), jnp.ones((256, 64))
    found = search(step, *args, host=True)
    keep = {choice.turn: frozenset() for choice in found.choices}
    return found.scheduler.schedule(keep), args


@pytest.mark.parametrize("target", KEPT)
def test_a_recomputation_that_is_there_is_found(rewritten, target: str):
    block, args = rewritten
    text = compile_for(target, as_function(block), args, options=KEPT[target]).hlo_text()
    assert verify.undone(block, text) == ()


@pytest.mark.parametrize("target", KEPT)
def test_a_product_that_xla_transposes_is_still_one(target: str):
    """``W @ x`` under ``vmap``: XLA folds the transposition into the product and names it so."""

    def step(w, x):
        def loss(w):
            y = x
            for _ in range(4):
                y = jnp.tanh(jax.vmap(lambda row: w @ row)(y))
            return (y**2).sum()

        return jax.value_and_grad(loss)(w)

    args = jnp.eye(64), jnp.ones((256, 64))
    found = search(step, *args, host=target == "cpu")
    block = found.scheduler.schedule({choice.turn: frozenset() for choice in found.choices})
    text = compile_for(target, as_function(block), args, options=KEPT[target]).hlo_text()
    assert verify.undone(block, text) == ()


def without_barriers(block: Block) -> Block:
    """The copies next to their originals with nothing to tell them apart."""
    now: dict = {}
    ops = []
    for op in block.ops:
        inputs = tuple(now.get(v, v) if isinstance(v, Value) else v for v in op.inputs)
        if op.barrier:
            now.update(zip(op.outputs, inputs, strict=True))
        else:
            ops.append(Op(op.eqn, inputs, op.outputs, op.loop, op.recompute, origin=op.origin))
    return replace(block, ops=tuple(ops))


@pytest.mark.parametrize("target", KEPT)
def test_recomputations_that_xla_undid_are_named(rewritten, target: str):
    block, args = rewritten
    bare = without_barriers(block)
    text = compile_for(target, as_function(bare), args, options=KEPT[target]).hlo_text()
    merged = verify.undone(bare, text)
    copies = [op for op in bare.ops if op.recompute and op.name == "dot_general"]
    assert copies
    assert {op.origin for op in copies} == set(merged)
    assert all(not op.recompute for op in merged), "they are the user's own operations"


def test_what_was_undone_is_planned_around(monkeypatch):
    """The error says that the compiler is the reason; a compiler that does as told gives a plan."""

    step = jax.grad(tanh_chain)
    args = jnp.eye(128), jnp.ones((1024, 128))
    monkeypatch.setattr(verify, "undone", lambda block, text: tuple(products(block)))

    def products(block):
        return [op.origin for op in block.ops if op.recompute and op.name == "dot_general"]

    with pytest.raises(jaxmem.BudgetInfeasibleError, match="would be possible, but") as caught:
        jaxmem.plan(step, *args, budget="4.5MiB", progress=False)
    assert "the compiler merged" in str(caught.value)
    monkeypatch.setattr(verify, "undone", lambda block, text: ())
    assert jaxmem.plan(step, *args, budget="4.5MiB", progress=False).recomputed()


# --- comparing results -------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16", "complex64", "int32", "bool", "uint8")


def check(expected, found) -> None:
    verify.compare([expected], [found], ["['w']"], "step")


@given(st.sampled_from(DTYPES), st.integers(0, 1000))
def test_equal_results_agree_and_large_differences_do_not(dtype: str, seed: int):
    values = np.random.default_rng(seed).standard_normal((3, 4)) * 10
    leaf = jnp.asarray(values > 0 if dtype == "bool" else np.abs(values)).astype(dtype)
    check(leaf, leaf)
    wrong = leaf.at[1, 2].set(~leaf[1, 2] if dtype == "bool" else leaf[1, 2] + leaf.max() + 1)
    with pytest.raises(jaxmem.VerificationError, match=r"step: result \['w'\] differs"):
        check(leaf, wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_rounding_is_allowed(dtype: str):
    leaf = jnp.linspace(1, 2, 100).astype(dtype)
    check(leaf, leaf * (1 + 2 * jnp.finfo(dtype).eps).astype(leaf.real.dtype))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_must_be_so_in_both(bad: float):
    leaf = jnp.arange(4.0)
    check(leaf.at[2].set(bad), leaf.at[2].set(bad))
    for one, other in ((leaf, leaf.at[2].set(bad)), (leaf.at[2].set(bad), leaf)):
        with pytest.raises(jaxmem.VerificationError, match="differs"):
            check(one, other)


def test_keys_must_be_equal():
    check(jax.random.key(1), jax.random.key(1))
    with pytest.raises(jaxmem.VerificationError, match="it is not a float"):
        check(jax.random.key(1), jax.random.key(2))


def test_zeros_and_empty_leaves():
    check(jnp.zeros(3), jnp.zeros(3))
    check(jnp.zeros((0, 3)), jnp.zeros((0, 3)))
    with pytest.raises(jaxmem.VerificationError, match="differs"):
        check(jnp.zeros(3), jnp.zeros(3).at[0].set(0.1))
