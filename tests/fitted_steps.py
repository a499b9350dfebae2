"""Small steps that are fitted in several test files, and how tests compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax

import jaxmem

WIDTH = 64
X = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)
ADAM = optax.adam(1e-2, eps=1e-3)

# Ten layers hold ten activations of 512 KiB; arguments and results are 0.6 MiB.
DEEP_ARGS = (jnp.eye(128) * 1.2, jnp.linspace(-1, 1, 2**17).reshape(1024, 128))
DEEP_BUDGET = "4.5MiB"


def roomy(step, **options):
    """A step that is fitted into more than it needs."""
    return jaxmem.fit(step, budget="64MiB", progress=False, **options)


@contextlib.contextmanager
def optimising_less(quick: bool = True) -> Iterator[None]:
    """Within, LLVM optimises less, if ``quick``: XLA's programs and their bytes are the same."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def tanh_chain(w, x, layers=10):
    """The mean square of ``x`` [rows, width] after ``layers`` products with ``w``, each in tanh."""
    for _ in range(layers):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def deep(w, x):
    """A step that keeps 6.2 MiB as written."""
    value, gradient = jax.value_and_grad(tanh_chain)(w, x)
    return w - 0.1 * gradient, value


def accumulated(w, x):
    """A step whose number of microbatches the planner chooses."""
    gradient = jaxmem.accumulate(jax.grad(functools.partial(tanh_chain, layers=6)), jaxmem.AUTO)
    return w - gradient(w, x)


class Counted:
    """A function that counts how often Python runs it, that is how often it is traced."""

    def __init__(self, function):
        self.function, self.traces = function, 0
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.function(*args, **kwargs)
