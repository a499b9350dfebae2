"""A net that reads a table by tokens: over a mesh XLA splits its layers by columns, if left alone.

The table is split by its rows, and what is read from it could be split in either way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

LAYERS, WIDTH, ROWS, SEQUENCE, WORDS = 3, 256, 32, 64, 512
SHAPES = {
    "up": (LAYERS, WIDTH, 4 * WIDTH),
    "down": (LAYERS, 4 * WIDTH, WIDTH),
    "table": (WORDS, WIDTH),
    "places": (SEQUENCE, WIDTH),
}
TOKENS = jax.ShapeDtypeStruct((ROWS, SEQUENCE), jnp.int32)


def shapes() -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    pairs = zip(keys, SHAPES.items(), strict=True)
    return {name: 0.05 * jax.random.normal(key, shape) for key, (name, shape) in pairs}


def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, WORDS, TOKENS.shape).astype(np.int32)


def loss(params, tokens):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x = params["table"][tokens] + params["places"]
    x, _ = jax.lax.scan(layer, x, {"up": params["up"], "down": params["down"]})
    logits = x @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def step(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value
