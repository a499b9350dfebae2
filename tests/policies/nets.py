"""Functions that policies are tried on, and what their derivative keeps."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

# What jax_remat3 can do, by version; jaxmem finds it out without. From 0.12 on it asks all
# callables, about convolutions too, and tells the types of named values.
OFFLOADS = jax.__version_info__ >= (0, 11)
ASKS_ALL = jax.__version_info__ >= (0, 12)


@contextlib.contextmanager
def remat3(enabled: bool) -> Iterator[None]:
    """Within, ``jax.checkpoint`` is or is not JAX's new implementation."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def residuals(fun: Callable[..., Any], *args: Any) -> list[str]:
    """What the derivative of ``fun`` keeps, a line of JAX's own report for each value."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_saved_residuals(fun, *args)
    return sorted(text.getvalue().splitlines())


def types(lines: list[str]) -> list[str]:
    """The types of residuals only: how a value is called differs between ways to keep it."""
    return sorted(line.split()[0] for line in lines)


# The examples of JAX's guide to gradient checkpointing.


def g(W, x):
    y = jnp.dot(W, x)
    return jnp.sin(y)


def f(W1, W2, W3, x):
    x = g(W1, x)
    x = g(W2, x)
    return g(W3, x)


F_ARGS = (jnp.ones((5, 4)), jnp.ones((6, 5)), jnp.ones((7, 6)), jnp.ones(4))


def predict(params, x):
    *Ws, Wlast = params
    for i, W in enumerate(Ws):
        x = checkpoint_name(jnp.sin(jnp.dot(W, x)), name=f"layer{i}_output")
    return jnp.dot(Wlast, x)


def loss(params, x, y):
    return jnp.sum((predict(params, x) - y) ** 2)


LOSS_ARGS = (list(F_ARGS[:3]), jnp.ones(4), jnp.ones(7))


def scanned(x):
    """The guide's example of offload: a loop with two named values."""

    def body(carry, _):
        y = checkpoint_name(jnp.sin(carry), "y")
        z = checkpoint_name(jnp.sin(y), "z")
        return jnp.sin(z), None

    out, _ = jax.lax.scan(body, x, None, length=8)
    return out.sum()


# A block with a loop, calls, custom derivatives, a branch and random numbers.


def block(params, x, key):
    def layer(carry, w):
        carry, key = carry
        key, drop = jax.random.split(key)
        with jax.named_scope("attn"):
            scores = jax.nn.softmax(carry @ w)
            h = checkpoint_name(carry * scores.sum(), "scores")
        with jax.named_scope("mlp"):
            h = checkpoint_name(jax.nn.silu(h @ w), "act")
            h = jax.nn.relu(h) + jax.nn.gelu(h)
        h = jnp.where(jax.random.bernoulli(drop, 0.8, h.shape), h, 0.0)
        return (jnp.tanh(carry + h), key), None

    with jax.named_scope("layers"):
        (x, _), _ = jax.lax.scan(layer, (x, key), params["layers"])
    x = jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x), lambda x: jnp.cos(x), x)
    with jax.named_scope("head"):
        logits = checkpoint_name(jnp.einsum("bi,io->bo", x, params["head"]), "logits")
    return jax.nn.logsumexp(logits, axis=-1).mean()


def block_args(seed: int = 0):
    # Its key makes small programs, which compile fast.
    keys = jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), 4)
    params = {
        "layers": jax.random.normal(keys[0], (3, 8, 8)) / 3,
        "head": jax.random.normal(keys[1], (8, 5)),
    }
    return params, jax.random.normal(keys[2], (4, 8)), keys[3]
