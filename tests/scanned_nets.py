"""Scanned nets whose stacked parameters, or what updates them, may wait in host memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LAYERS, WIDTH = 6, 512
X = jnp.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)


def layer(x, w):
    return x + jnp.tanh(x @ w["in"]) @ w["out"] + w["bias"], None


def plain(params, x):
    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


def backwards(params, x):
    return (jax.lax.scan(layer, x, params, reverse=True)[0] ** 2).mean()


def checkpointed(params, x):
    return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean()


def with_rows_of_both(params, x):
    """Rows of the device beside those of the host, and results that are stacked."""

    def scaled(x, given):
        w, scale = given
        x, _ = layer(x, w)
        return x * scale, (x.sum(), 7)

    scales = jnp.linspace(0.9, 1.1, LAYERS)
    x, (sums, sevens) = jax.lax.scan(scaled, x, (params, scales))
    return (x**2).mean() + sums[-1] / x.size + sevens[-1]


def inside_out(params, x):
    """A loop in which another one runs over a row."""

    def outer(x, w):
        x, _ = jax.lax.scan(lambda x, v: (x + jnp.tanh(x @ w["in"]) * v, None), x, w["out"][:3])
        return x + w["bias"], None

    return (jax.lax.scan(outer, x, params)[0] ** 2).mean()


def params_of(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "in": jax.random.normal(keys[0], (layers, WIDTH, WIDTH)) * 0.05,
        "out": jax.random.normal(keys[1], (layers, WIDTH, WIDTH)) * 0.05,
        "bias": jnp.zeros((layers, WIDTH)),
    }
