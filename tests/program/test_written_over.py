"""What XLA:GPU writes over what: small programs on paper, beside what they compile to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.planner.simulate import Simulator
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target, compile_for
from tests.planner.lines import program

N = 2048
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
IMAGES = jax.ShapeDtypeStruct((8, 128, 128, 32), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)
barrier = lax.optimization_barrier


def chosen(x, y):
    return jnp.where(y > 0, x, 0.0)


def ended(x, w):
    """Two more products, so that nothing after needs as much as what comes before."""
    return ((x.reshape(N, N) @ w) @ w)[:1, :1]


def in_place(x, w):
    return ended(chosen(x @ w, w @ x), w)


def behind_a_barrier(x, w):
    return ended(chosen(*barrier((x @ w, w @ x))), w)


def behind_two(x, w):
    return ended(chosen(*barrier(barrier((x @ w, w @ x)))), w)


def one_of_two_behind(x, w):
    return ended(chosen(barrier(x @ w), w @ x), w)


def reshaped_before(x, w):
    shape = (1, 2, N // 2, N)
    return ended(chosen(*barrier(((x @ w).reshape(shape), (w @ x).reshape(shape)))), w)


def reshaped_after(x, w):
    a, b = barrier((x @ w, w @ x))
    shape = (1, 2, N // 2, N)
    return ended(chosen(a.reshape(shape), b.reshape(shape)), w)


def barrier_after(x, w):
    return ended(barrier(chosen(x @ w, w @ x)), w)


def convolved(x, kernel):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)


def two_convolutions(x, k):
    return convolved(chosen(convolved(x, k), convolved(x, k * 2)), k).max()


def two_results(x, k):
    """One kernel gives a sine and a hyperbolic tangent, both of which convolutions read."""
    p, q = jnp.tanh(x), jnp.sin(x)
    most = convolved(p, k).max() + convolved(q, k).max()
    return convolved(chosen(q, p) * most, k).max()


CASES = [
    *[(f, (SQUARE, SQUARE)) for f in (in_place, behind_a_barrier, behind_two, one_of_two_behind)],
    *[(f, (SQUARE, SQUARE)) for f in (reshaped_before, reshaped_after, barrier_after)],
    *[(f, (IMAGES, KERNEL)) for f in (two_convolutions, two_results)],
]


@pytest.mark.parametrize("function, shapes", CASES, ids=[f.__name__ for f, _ in CASES])
def test_paper_has_what_is_compiled(function, shapes):
    step = program(function, *shapes)
    block = step.block
    compiled = compile_for("h200", as_function(block), step.avals()).memory.temp_bytes
    simulated = Simulator(rates_of(Target("h200"))).step(block).temp_bytes
    assert simulated == pytest.approx(compiled, rel=0.02)
