"""Each shared problem is fit to test with, and the judge of results finds what it should."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.problems import (
    LARGE,
    PROBLEMS,
    Problem,
    assert_no_less_exact,
    assert_same,
    error_vs_float64,
    in_float64,
    pure,
    random_step,
)
from tests.problems.rules import DEPTH, LOG

MIB = 2**20
EPS = float(np.finfo(np.float32).eps)
FLAVOURS = {"plain", "linen", "nnx", "equinox"}
# What the set must contain, so that a transform tested on all of it has met each of them.
CONTENTS = {
    *FLAVOURS,
    *("abstract", "accumulation", "aux", "batch_stats", "bf16", "checkpoint", "collectives"),
    *("cond", "consts", "conv", "conv_transpose", "custom_jvp", "custom_vjp", "dropout"),
    *("effects", "gather", "jitted", "keys", "linalg", "map", "mixed", "moe", "nested_scan"),
    *("opaque_gradient", "reverse", "rnn", "scan", "scatter", "shard_map", "skip", "sort"),
    *("static_leaves", "tied", "two_gradients", "unrolled", "unrolled_scan", "vmap", "while"),
}


def _finite(leaf: jax.Array) -> bool:
    return not jnp.issubdtype(leaf.dtype, jnp.inexact) or bool(jnp.isfinite(leaf).all())


# Every other one: tests/test_laws.py runs most of them, too.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if n % 2 else pytest.mark.wide)
        for n, name in enumerate(PROBLEMS)
    ],
)
def test_step_runs_and_its_memory_is_activations(name: str):
    first, second = pure(PROBLEMS[name]), pure(PROBLEMS[name])
    assert_same(first.args, second.args, multiple=0)
    # Level 0 compiles in half the time; buffers are assigned before it matters.
    compiled = first.compile(xla_backend_optimization_level=0)

    memory = compiled.memory_analysis()
    assert 10 * MIB <= memory.temp_size_in_bytes <= 120 * MIB
    assert memory.temp_size_in_bytes >= 3 * memory.argument_size_in_bytes
    assert memory.alias_size_in_bytes >= 0.9 * _float_bytes(first)

    before = jax.tree.map(jnp.copy, first.args)
    outputs = compiled(*first.args)
    assert all(map(_finite, jax.tree.leaves(outputs)))
    assert_same(outputs, compiled(*second.args), multiple=0)
    assert _changed(before, outputs)


def _float_bytes(problem) -> int:
    """Bytes of the donated float leaves: an update of each must be able to take its place."""
    donated = [problem.args[i] for i in problem.donate]
    return sum(a.nbytes for a in jax.tree.leaves(donated) if jnp.issubdtype(a.dtype, jnp.floating))


def _changed(args, outputs) -> bool:
    """Whether most large outputs are new: a step that trains nothing hands its state back."""
    big = [np.asarray(a) for a in jax.tree.leaves(args) if a.size > 1000 and a.dtype.kind == "f"]
    new = [np.asarray(a) for a in jax.tree.leaves(outputs) if a.size > 1000]
    known = [any(a.shape == b.shape and np.array_equal(a, b) for a in big) for b in new]
    return sum(known) < len(new) / 4


@pytest.mark.parametrize("problem", [*PROBLEMS.values(), *LARGE.values()], ids=lambda p: p.name)
def test_tags_name_one_library(problem: Problem):
    assert len(problem.tags & FLAVOURS) == 1


def test_names_and_contents():
    assert all(name == problem.name for name, problem in (PROBLEMS | LARGE).items())
    tags = [problem.tags for problem in (PROBLEMS | LARGE).values()]
    assert frozenset().union(*tags) == CONTENTS


def test_effects_happen_once_in_order():
    step, args = PROBLEMS["effects"].make()
    LOG.clear()
    loss = jax.jit(step)(*args)[2]
    jax.effects_barrier()
    debug = [(name, value) for name, value in LOG if name in ("hidden", "loss")]
    assert [name for name, _ in debug] == ["hidden"] * DEPTH + ["loss"]
    assert [name for name, _ in LOG if name in ("scale", "update")] == ["scale", "update"]
    assert len(LOG) == DEPTH + 3
    hidden = [value for _, value in debug[:-1]]
    assert hidden == sorted(hidden), "the residual stream grows: out of order otherwise"
    assert debug[-1][1] == float(loss)


def test_keys_and_counters_move_on():
    step, (state, batch) = PROBLEMS["mixed_leaves"].make()
    new, _, aux = jax.jit(step)(state, batch)
    assert new["rest"][0] == 1
    assert aux["valid"] == batch["valid"].sum()
    assert aux.keys() == {"nothing", "valid", "empty"}
    with pytest.raises(AssertionError, match=r"\['rest'\]\[1\]: 4 of 4 uint32 values differ"):
        assert_same(state, new)


@pytest.mark.parametrize("name", LARGE)
def test_large_problems_are_abstract_and_trace(name: str):
    step, args = LARGE[name].make()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(args[0]))
    assert 1.3e9 < parameters < 1.4e9
    *state, loss = jax.eval_shape(step, *args)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    kinds = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (state, list(args[:2]))]
    assert kinds[0] == kinds[1]
    problem = pure(LARGE[name])
    assert jax.eval_shape(problem.function, *problem.args) == ((*state, loss), None)


@pytest.mark.parametrize("seed", (1, 9))
def test_random_step_is_well_conditioned(seed: int):
    step, args = random_step(seed)
    assert_same(args, random_step(seed)[1], multiple=0)
    outputs = jax.jit(step)(*args)
    assert all(map(_finite, jax.tree.leaves(outputs)))
    errors = error_vs_float64(in_float64(step, args), outputs)
    assert 0 < max(errors.values()) < 64 * EPS


def test_random_steps_differ_and_nest():
    texts = [str(jax.make_jaxpr(step)(*args)) for step, args in map(random_step, range(4))]
    assert len(set(texts)) == len(texts)
    for primitive in (
        r"scan\[",
        r"(remat2|checkpoint)\[",
        r"cond\[",
        r"random_bits\[",
        "reverse=True",
    ):
        assert any(re.search(rf"\b{primitive}", text) for text in texts), primitive


def test_float64_judge_finds_a_small_error():
    def step(w, x):
        return {"y": jnp.tanh(x @ w), "count": jnp.int32(3)}

    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.standard_normal((64, 64)), jnp.float32) for _ in range(2))
    exact, outputs = in_float64(step, args), step(*args)
    assert exact["y"].dtype == jnp.float64
    assert list(error_vs_float64(exact, outputs)) == ["['y']"]
    assert_no_less_exact(exact, outputs, outputs)
    wrong = outputs | {"y": outputs["y"] * (1 + 1e-5)}
    with pytest.raises(AssertionError, match=r"\['y'\]: error 1.*e-05, untransformed"):
        assert_no_less_exact(exact, outputs, wrong)


@pytest.mark.parametrize(
    ("reference", "output", "message"),
    [
        (jnp.ones(3), jnp.ones(3).at[1].add(1e-4), r"relative error 0.0001 exceeds .* 512 eps of"),
        (jnp.ones(3), jnp.ones(3, jnp.float16), "dtype float16 instead of float32"),
        (jnp.ones(3), jnp.ones((3, 1)), r"shape \(3, 1\) instead of \(3,\)"),
        (jnp.ones(3), jnp.ones(3).at[0].set(jnp.nan), "relative error nan exceeds"),
        (jnp.ones(3).at[0].set(jnp.inf), jnp.ones(3), "relative error inf exceeds"),
        (jnp.arange(3), jnp.arange(3).at[2].add(1), "1 of 3 int32 values differ"),
        (jnp.array(True), jnp.array(False), "1 of 1 bool values differ"),
        (jax.random.key(0), jax.random.key(1), "1 of 2 uint32 values differ"),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0)), "dtype uint32 instead of key"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), "dtype key<rbg> instead of key<fry>"),
    ],
)
def test_assert_same_names_what_differs(reference, output, message: str):
    tree = {"good": jnp.ones(2), "layers": [reference]}
    assert_same(tree, {"good": jnp.ones(2), "layers": [reference]}, multiple=0)
    with pytest.raises(
        AssertionError, match=r"1 of 2 leaves differ:\n  \['layers'\]\[0\]: " + message
    ):
        assert_same(tree, {"good": jnp.ones(2), "layers": [output]})


def test_assert_same_compares_structure():
    with pytest.raises(
        AssertionError, match=r"missing \[\"\['b'\]\"\], unexpected \[\"\['c'\]\"\]"
    ):
        assert_same({"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 2.0})


def test_assert_same_is_as_strict_as_the_coarsest_dtype():
    half = {"loss": jnp.float32(1), "w": jnp.ones(2, jnp.bfloat16)}
    assert_same(half, half | {"loss": jnp.float32(1.01)})
    with pytest.raises(AssertionError, match=r"\['loss'\]: .* 16 eps of bfloat16"):
        assert_same(half, half | {"loss": jnp.float32(1.2)})
    with pytest.raises(AssertionError, match=r"0 eps of bfloat16"):
        assert_same(half, half | {"loss": jnp.float32(1.01)}, multiple=0)
