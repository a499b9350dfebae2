"""Several scans of one step run in segments together, and less and less of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.hlo.module import read_module
from jaxmem.hlo.products import products_of
from jaxmem.planner.search import Search
from jaxmem.planner.segments import splittable
from jaxmem.program.ir import Hosting
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime import verify
from jaxmem.runtime.rates import rates_of
from jaxmem.runtime.workspaces import workspaces_in
from jaxmem.targets import Target
from tests.planner.lines import program
from tests.problems import assert_same
from tests.rewrite.test_transfers import compiled

H200 = Target("h200")


def layer(x, w):
    return x + jnp.tanh(x @ w)


def encoded(a, b, x, z):
    """Two scans in one loss: what the first makes goes into the second."""

    def loss(a, b):
        inner = lax.scan(lambda y, w: (layer(y, w), None), x, a)[0]
        return jnp.square(lax.scan(lambda y, w: (layer(y, w), None), inner + z, b)[0]).mean()

    grads = jax.grad(loss, (0, 1))(a, b)
    return a - grads[0], b - grads[1]


def in_turn(a, b, x, z):
    """Two nets of which each takes a step of its own."""

    def loss(w, x):
        return jnp.square(lax.scan(lambda y, w: (layer(y, w), None), x, w)[0]).mean()

    return a - jax.grad(loss)(a, x), b - jax.grad(loss)(b, z)


def alternating(a, b, x, z):
    """One net of layers in turn, of which each may be cut as it is long."""

    def loss(a, b):
        inner = lax.scan(lambda y, w: (layer(y, w), None), x, a[:9])[0]
        inner = lax.scan(lambda y, w: (layer(y, w), None), inner + z, b)[0]
        return jnp.square(lax.scan(lambda y, w: (layer(y, w), None), inner, a[9:])[0]).mean()

    grads = jax.grad(loss, (0, 1))(a, b)
    return a - grads[0], b - grads[1]


def beside(a, b, x, z):
    """A scan in each iteration of another, and one after that."""

    def loss(a, b):
        def outer(y, ws):
            return lax.scan(lambda y, w: (layer(y, w), None), y, ws)[0], None

        inner = lax.scan(outer, x, a.reshape(4, -1, *a.shape[1:]))[0]
        return jnp.square(lax.scan(lambda y, w: (layer(y, w), None), inner + z, b)[0]).mean()

    grads = jax.grad(loss, (0, 1))(a, b)
    return a - grads[0], b - grads[1]


def of_two(step: Callable, layers: int = 36, width: int = 256, rows: int = 4096) -> Search:
    shapes = [(layers, width, width), (layers, width, width), (rows, width), (rows, width)]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return Search(program(step, *given, donate=(0, 1)), rates_of(H200))


def with_workspaces(found: Search) -> Search:
    """What its kernels work in is known, of the program as written."""
    written = compiled(H200, found.program, found.program.block, Hosting())
    products = products_of(read_module(written.executable))
    found.simulator.workspaces = workspaces_in(found.program.block, products)
    return found


@pytest.mark.parametrize("step", [encoded, in_turn, alternating])
def test_several_scans_run_in_segments_together(step: Callable):
    """One of two nets in segments leaves as many bytes as the other needs."""
    found = with_workspaces(of_two(step))
    paths = splittable(found.nest)
    assert len(paths) > 1
    solutions = [s for s in found.least() if s.segments]
    least = min(solutions, key=lambda s: s.temp_bytes)
    assert set(least.segments) == set(paths)
    assert least.temp_bytes < 0.6 * found.smallest().temp_bytes
    block = found.schedule(least)
    executable = compiled(H200, found.program, block, Hosting())
    assert verify.undone(block, executable.hlo_text()) == ()
    assert least.temp_bytes == pytest.approx(executable.memory.temp_bytes, rel=0.02)


def test_of_nested_scans_the_inner_ones_run_in_segments_too():
    found = with_workspaces(of_two(beside, 100))
    least = min((s for s in found.least() if s.segments), key=lambda s: s.temp_bytes)
    assert len(least.segments) == len(splittable(found.nest)) == 3
    assert least.temp_bytes < 0.75 * found.smallest().temp_bytes
    executable = compiled(H200, found.program, found.schedule(least), Hosting())
    assert least.temp_bytes == pytest.approx(executable.memory.temp_bytes, rel=0.05)


def test_with_fewer_scans_in_segments_a_step_is_quicker_and_larger():
    found = of_two(alternating)
    by_count: dict[int, Any] = {}
    for solution in found.bodies.in_segments():
        count = len(solution.segments)
        best = by_count.get(count)
        if best is None or solution.temp_bytes < best.temp_bytes:
            by_count[count] = solution
    assert set(by_count) == {1, 2, 3}
    several = [by_count[count] for count in (1, 2, 3)]
    for fewer, more in itertools.pairwise(several):
        assert fewer.temp_bytes > more.temp_bytes
        assert fewer.seconds < more.seconds


@pytest.mark.parametrize("step", [encoded, in_turn, alternating, beside])
def test_in_segments_together_results_are_the_same(step: Callable):
    found = of_two(step, 20, 8, 16)
    least = min((s for s in found.least() if s.segments), key=lambda s: s.temp_bytes)
    assert len(least.segments) > 1
    rng = np.random.default_rng(0)
    args = [jnp.asarray(0.3 * rng.normal(size=v.shape), v.dtype) for v in found.program.avals()]
    made = jax.jit(as_function(found.schedule(least)))(*args)
    assert_same(jax.jit(step)(*args), tuple(made))
