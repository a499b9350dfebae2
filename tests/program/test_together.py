"""What XLA makes of several operations: against brute force over layouts, and the compiler."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxmem.planner.simulate import Simulator
from jaxmem.program.fusion import fuse
from jaxmem.program.ir import Block
from jaxmem.program.rearranging import rearranged
from jaxmem.program.undoing import undone
from jaxmem.rewrite.emit import as_function
from jaxmem.targets import compile_for
from tests.planner.lines import RATES, program

TOGETHER = dataclasses.replace(RATES, together=True)
FLOAT = jnp.float32


def is_a_view(given: np.ndarray, result: np.ndarray) -> bool:
    """Whether some order of the axes of each makes the same memory of both."""
    of_result = {
        np.transpose(result, axes).tobytes() for axes in itertools.permutations(range(result.ndim))
    }
    orders = itertools.permutations(range(given.ndim))
    return any(np.transpose(given, axes).tobytes() in of_result for axes in orders)


@st.composite
def rearrangements(draw: st.DrawFn):
    """A shape, what its axes are split into, their order, and how many are joined to each axis."""
    axes = draw(st.lists(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3), min_size=1))
    axes = axes[:3]
    split = [size for axis in axes for size in axis]
    order = draw(st.permutations(range(len(split))))
    ends = draw(st.sets(st.integers(1, len(split))))
    bounds = [0, *sorted(ends | {len(split)})]
    moved = [split[n] for n in order]
    joined = [math.prod(moved[a:b]) for a, b in itertools.pairwise(bounds)]
    return [math.prod(axis) for axis in axes], split, order, joined


@settings(max_examples=300)
@given(rearrangements())
def test_what_is_rearranged_is_what_no_layout_makes_a_view(drawn):
    shape, split, order, joined = drawn
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)

    def function(x):
        return lax.reshape(lax.transpose(lax.reshape(x, split), order), joined)

    block = program(function, jax.ShapeDtypeStruct(x.shape, x.dtype)).block
    assert bool(rearranged(block.ops)) == (not is_a_view(x, np.asarray(function(x))))


@settings(max_examples=100)
@given(st.data())
def test_a_slice_that_undoes_a_padding_is_what_was_padded(data):
    x = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4)
    config = [(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)), 0) for _ in x.shape]
    padded = lax.pad(x, np.float32(0), config).shape
    starts = [data.draw(st.integers(0, size - 1)) for size in padded]
    starts = data.draw(st.sampled_from([starts, [low for low, _, _ in config]]))
    limits = [min(size, at + n) for at, size, n in zip(starts, padded, x.shape, strict=True)]

    def function(x):
        return lax.slice(lax.pad(x, jnp.float32(0), config), starts, limits)

    block = program(function, jax.ShapeDtypeStruct(x.shape, x.dtype)).block
    found = undone(block.ops)
    assert bool(found) == np.array_equal(np.asarray(function(x)), x)
    assert set(found.values()) <= set(block.inputs)


@pytest.mark.parametrize(
    "config", [((1, 1, 1), (0, 0, 0)), ((-1, 1, 0), (0, 0, 0))], ids=["inside", "cut"]
)
def test_a_slice_of_what_was_padded_in_another_way_is_not(config):
    def function(x):
        padded = lax.pad(x, FLOAT(0), config)
        return lax.slice(padded, (0, 0), (3, 4)) if padded.shape[0] > 2 else padded

    assert not undone(program(function, jax.ShapeDtypeStruct((3, 4), FLOAT)).block.ops)


def fused(function, *shapes) -> tuple[Block, list[int]]:
    """A program, and the operations whose kernels run in the place of another."""
    block = program(function, *[jax.ShapeDtypeStruct(shape, FLOAT) for shape in shapes]).block
    at = fuse(block.inputs, block.ops, block.outputs, closely=True).at
    return block, [n for n, place in enumerate(at) if place != n]


def names(block: Block, numbers: list[int]) -> list[str]:
    return [block.ops[n].name for n in numbers]


W = (256, 256)


def test_results_of_the_same_buffer_are_written_by_one_kernel():
    def function(x, w):
        y = x @ w
        return jnp.tanh(y) @ w, jnp.sin(y) @ w

    assert names(*fused(function, W, W)) == ["sin"]


def test_those_behind_a_barrier_are_not():
    def function(x, w):
        y = x @ w
        return jnp.tanh(y) @ w, jnp.sin(lax.optimization_barrier(y)) @ w

    assert names(*fused(function, W, W)) == []


def test_what_frees_more_than_it_takes_does_not_wait():
    def function(x, w):
        a, b = x @ w, w @ x
        c = lax.reshape(w, (256 * 256,))
        d = lax.reshape(c, W) @ x
        e = d @ w
        return (a + b) @ e

    block, early = fused(function, W, W)
    assert names(block, early) == ["add"]
    ran = Simulator(TOGETHER).step(block)
    assert ran.temp_bytes < Simulator(RATES).step(block).temp_bytes


def convolution(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def depth_to_space(x, w, a, b, c):
    """As a U-Net of volumes goes up a level, written as convolutions of slices."""
    d, h, width, _ = x.shape
    y = convolution(x, w).reshape(d, h, width, 2, 2, 2, -1)
    y = y.transpose(0, 3, 1, 4, 2, 5, 6).reshape(2 * d, 2 * h, 2 * width, -1)
    padded = jnp.pad(y, ((1, 1), (0, 0), (0, 0), (0, 0)))
    return sum(convolution(padded[n : n + 2 * d], k).sum() for n, k in enumerate((a, b, c)))


def doubled_in_place(x, w, a):
    """Two sums of what could be written over its operand."""
    y = jnp.maximum(x @ w, 0)
    z = y @ a
    g = jnp.where(y > 0, z, 0)
    return g.sum(0), (g * g).sum(0), (g @ w).sum()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (
            depth_to_space,
            [(8, 64, 64, 64), (1, 1, 64, 512), (3, 3, 64, 64), (3, 3, 64, 64), (3, 3, 64, 64)],
        ),
        (doubled_in_place, [(8192, 2048), (2048, 2048), (2048, 2048)]),
    ],
    ids=["depth to space", "two sums"],
)
def test_the_compiler_takes_what_is_seen_together(function, shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    step = program(function, *args)
    block = step.block
    compiled = compile_for("h200", as_function(block), step.avals()).memory.temp_bytes
    closely = Simulator(TOGETHER).step(block).temp_bytes
    assert closely == pytest.approx(compiled, rel=0.02)
    assert Simulator(RATES).step(block).temp_bytes < 0.9 * closely


@pytest.mark.parametrize("rows", [2**16, 2**17, 2**18])
def test_what_is_very_large_is_not_summed_where_it_is_made(rows: int):
    """Then it is written over its operand: of 2**28 elements on."""
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(rows, 2048), *[(2048,) * 2] * 2]
    ]
    step = program(doubled_in_place, *args)
    compiled = compile_for("h200", as_function(step.block), step.avals()).memory.temp_bytes
    assert Simulator(TOGETHER).step(step.block).temp_bytes == pytest.approx(compiled, rel=0.02)


def test_what_reads_another_is_written_with_it_only_where_both_are_written():
    """Else it takes the other's place: the gradient of a GPT's logits, 3 GiB of 50,304 words."""

    def both(x, w):
        y = jnp.tanh(x @ w)
        return y @ w, (y * 2) @ w, y.sum(0)

    def one(x, w):
        a, b, c = x @ w, w @ x, x @ x
        y = jnp.tanh(a) + jnp.sin(b) + jnp.cos(c)
        return (y * 2) @ w, y.sum(0)

    assert names(*fused(both, W, W)) == ["mul"]
    assert "mul" not in names(*fused(one, W, W))
