"""Small steps that are fitted in several test files."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

WIDTH = 64
X = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)
ADAM = optax.adam(1e-2, eps=1e-3)

# Ten layers hold ten activations of 512 KiB; arguments and results are 0.6 MiB.
DEEP_ARGS = (jnp.eye(128) * 1.2, jnp.linspace(-1, 1, 2**17).reshape(1024, 128))
DEEP_BUDGET = "4.5MiB"


def deep(w, x):
    """A step that keeps 6.2 MiB as written."""

    def loss(w):
        y = x
        for _ in range(10):
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


class Counted:
    """A function that counts how often Python runs it, that is how often it is traced."""

    def __init__(self, function):
        self.function, self.traces = function, 0
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.function(*args, **kwargs)
