"""A small batch, losses of it, and its microbatches as the documentation says they are taken."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np

ROWS, WIDTH = 12, 5
rng = np.random.default_rng(0)
W = {"w": jnp.asarray(rng.normal(size=(WIDTH, 3)), jnp.float32), "b": jnp.zeros(3)}
X = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
Y = {"targets": jnp.asarray(rng.normal(size=(ROWS, 3)), jnp.float32)}


def errors(params, x, y):
    return (jnp.tanh(x @ params["w"]) + params["b"] - y["targets"]) ** 2


def mean_loss(params, x, y):
    return errors(params, x, y).mean()


def parts(count, *arrays):
    """The microbatches, as the documentation says they are taken."""
    return [jax.tree.map(operator.itemgetter(slice(i, None, count)), arrays) for i in range(count)]
