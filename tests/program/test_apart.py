"""Sums over few columns read what another kernel wrote, and give the same."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem import fit, plan
from jaxmem.program import apart
from jaxmem.program.apart import with_sums_apart
from jaxmem.program.ir import Program
from jaxmem.program.layout import Layout
from jaxmem.rewrite.emit import as_function
from jaxmem.targets import compile_for
from tests.planner.lines import program

PLACES = (64, 64, 64)


def normalised(x, y, w, groups: int = 8):
    """A sum of two convolutions, normalised in groups of channels, and what follows."""
    z = x + y
    wide = z.astype(jnp.float32).reshape(*z.shape[:-1], groups, -1)
    axes = (*range(z.ndim - 1), z.ndim)
    mean, square = wide.mean(axes, keepdims=True), (wide * wide).mean(axes, keepdims=True)
    done = ((wide - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5)).reshape(z.shape)
    return jax.nn.relu(done).astype(x.dtype) @ w


def stored(x, y, w, groups: int = 8):
    """The same sums of what a product reads as well."""
    z = x + y
    wide = z.astype(jnp.float32).reshape(*z.shape[:-1], groups, -1)
    axes = (*range(z.ndim - 1), z.ndim)
    return z @ w, wide.mean(axes), (wide * wide).mean(axes)


def summed(x, y, w):
    """An array and the sums of its columns."""
    z = x + y
    return z, z.astype(jnp.float32).sum((0, 1, 2)), w


def loss(x, y, w):
    return normalised(x, y, w).astype(jnp.float32).sum()


def step(x, y, w):
    return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, y, w)


def traced(
    channels: int, places: tuple[int, ...] = PLACES, function=step, dtype: str = "bfloat16"
) -> Program:
    shape = (*places, channels)
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in (shape, (channels, channels)))
    return program(function, x, x, w)


def barriers(of: Program) -> int:
    return sum(op.barrier for op in of.block.ops)


@pytest.mark.parametrize(
    "channels, places, found",
    [
        (24, PLACES, True),
        (48, PLACES, True),
        (64, PLACES, False),  # enough columns
        (24, (8, 8, 8), False),  # next to nothing to sum
    ],
)
def test_what_is_summed_over_few_columns_stands_behind_a_barrier(channels, places, found):
    given = traced(channels, places)
    kept = with_sums_apart(given)
    assert (barriers(kept) > barriers(given)) == found
    if not found:
        assert kept is given


@pytest.mark.parametrize("channels, parts, found", [(96, 1, False), (96, 4, True), (24, 24, False)])
def test_columns_are_those_that_a_device_has(channels, parts, found):
    given = traced(channels, function=summed)
    for value in {v for op in given.block.ops for v in (*op.values, *op.outputs)}:
        if value.aval.shape == (*PLACES, channels):
            value.lay_out(Layout(((), (), (), (("model", parts),))))
    assert (with_sums_apart(given) is not given) == found


def test_once_is_enough():
    kept = with_sums_apart(traced(24))
    assert with_sums_apart(kept) is kept


def test_the_same_is_computed(monkeypatch):
    monkeypatch.setattr(apart, "_FEW_ROWS", 2)
    monkeypatch.setattr(apart, "_FEW_ELEMENTS", 2)
    given = traced(24, (4, 4, 4), dtype="float32")
    kept = with_sums_apart(given)
    assert barriers(kept) > 0
    keys = jax.random.split(jax.random.key(0), 3)
    args = [
        jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, given.avals(), strict=True)
    ]
    plain, done = (jax.jit(as_function(p.block))(*args) for p in (given, kept))
    for one, other in zip(plain, done, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def written_and_summed(text: str, channels: int) -> list[str]:
    """Kernels of a compiled program that give an array of many places and sums of it."""
    large = math.prod(PLACES) * channels
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%\S+ = \((.*?)\) fusion\(", line)
        arrays = re.findall(r"[a-z]+\d+\[([\d,]*)\]", match.group(1)) if match else []
        sizes = [math.prod(int(n) for n in dims.split(",") if n) for dims in arrays]
        if any(size == large for size in sizes) and any(size < large for size in sizes):
            found.append(line)
    return found


@pytest.mark.parametrize("channels", [24, 48])
def test_the_compiler_has_no_kernel_that_writes_and_sums(channels):
    given = traced(channels, function=stored)
    plain, kept = (
        compile_for("h200", as_function(p.block), p.avals())
        for p in (given, with_sums_apart(given))
    )
    assert written_and_summed(plain.hlo_text(), channels)
    assert not written_and_summed(kept.hlo_text(), channels)
    # Bytes are those of before, but for the sums themselves.
    assert kept.memory.temp_bytes <= plain.memory.temp_bytes + 2**20


@pytest.mark.parametrize("target, found", [("h200", True), ("cpu", False)])
def test_plans_for_a_gpu_have_it_and_those_for_a_cpu_do_not(target, found):
    args = tuple(traced(24).avals())
    _, outcome = fit(step, target=target, budget=None, progress=False)._planned(args, {})
    assert any(op.barrier for op in outcome.block.ops) == found
    assert any("behind a barrier, summed" in note for note in outcome.plan.notes) == found


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_rows_and_columns_are_those_of_the_longest_run(shape, data):
    """Against all runs that there are; axes of one place are none."""
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    rows, columns = apart._rows_and_columns(tuple(shape), axes)
    wide = [n for n, size in enumerate(shape) if size > 1]
    runs = [
        wide[a:b]
        for a in range(len(wide))
        for b in range(a + 1, len(wide) + 1)
        if axes.issuperset(wide[a:b])
    ]
    most = max([math.prod(shape[n] for n in run) for run in runs], default=1)
    assert rows == most
    longest = [run for run in runs if math.prod(shape[n] for n in run) == most]
    beside = {math.prod(shape[run[-1] + 1 :]) for run in longest}
    assert columns in (beside or {1})


MANY = jax.ShapeDtypeStruct((2**22, 16), jnp.float32)
FEW = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def mask(x, w):
    z = (x > 0).astype(jnp.float32)
    return z @ w, z.sum(0)


def one_hot(x, w):
    z = jax.nn.one_hot((x[:, 0] * 16).astype(jnp.int32), 16)
    return (z @ w).max(), z.sum(0), (z * x).max()


def constant(x, w):
    z = jnp.full(x.shape, 1.5)
    return (z @ w + x).max(), z.sum(0)


def broadcast(x, w):
    z = jnp.broadcast_to(jnp.sin(x[:, :1]), x.shape)
    return (z @ w).max(), z.sum(0), (z * 2).max()


@pytest.mark.parametrize("function", [mask, one_hot, constant, broadcast])
def test_what_a_product_makes_in_its_own_kernel_is_not_written_for_a_sum(function):
    given = program(function, MANY, FEW)
    assert with_sums_apart(given) is given


def test_a_barrier_of_the_users_holds_all_that_it_is_given():
    """Each result is its own operand, and both are there until both are made."""

    def two(x, y):
        a, b = jax.lax.optimization_barrier((x @ x, y @ y))
        return (jnp.sin(a) @ a).sum() + (b @ b).sum()

    x, y = (jax.ShapeDtypeStruct((n, n), jnp.float32) for n in (1024, 4096))
    found = plan(two, x, y, target="h200", progress=False)
    assert found.predicted_bytes == pytest.approx(found.compiled_bytes, rel=0.01)
