"""MLPs that exercise one rule of JAX each: custom derivatives, keys, jit, effects, odd leaves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from .problem import (
    ADAM,
    ADAMW,
    MOMENTUM,
    cross_entropy,
    dropout,
    integers,
    layer_norm,
    normal,
    plain,
    random_numbers,
    train_step,
    weight,
)

WIDTH, BATCH, DEPTH, CLASSES = 64, 2048, 8, 16


def mlp_weights(rng, depth: int = DEPTH, *, width: int = WIDTH, outputs: int = CLASSES) -> dict:
    """``depth`` pairs of matrices, and a head."""
    blocks = [
        {"up": weight(rng, width, 2 * width), "down": weight(rng, 2 * width, width)}
        for _ in range(depth)
    ]
    return {"blocks": blocks, "head": weight(rng, width, outputs)}


def mlp(params: dict, x: jax.Array, activation=jnp.tanh) -> jax.Array:
    """A residual MLP from ``[batch, width]`` to ``[batch, outputs]``."""
    for block in params["blocks"]:
        x = x + activation(layer_norm(x) @ block["up"]) @ block["down"]
    return layer_norm(x) @ params["head"]


def labelled(rng) -> tuple[jax.Array, jax.Array]:
    """A batch of inputs and labels."""
    return normal(rng, BATCH, WIDTH), integers(rng, CLASSES, BATCH)


def _classifier(activation=jnp.tanh, optimizer=ADAM, criterion=cross_entropy):
    rng = random_numbers(0)
    params = mlp_weights(rng)

    def loss(params, x, labels):
        return criterion(mlp(params, x, activation), labels)

    return train_step(loss, optimizer), (params, optimizer.init(params), *labelled(rng))


@jax.custom_vjp
def squared_swish(x: jax.Array) -> jax.Array:
    """``x² sigmoid(x)`` whose backward pass is given."""
    return jnp.square(x) * jax.nn.sigmoid(x)


def _squared_swish_forward(x):
    gate = jax.nn.sigmoid(x)
    return jnp.square(x) * gate, (x, gate)


def _squared_swish_backward(residuals, cotangent):
    x, gate = residuals
    return (cotangent * x * gate * (2 + x * (1 - gate)),)


squared_swish.defvjp(_squared_swish_forward, _squared_swish_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def clipped_loss(logits: jax.Array, labels: jax.Array, limit: float) -> jax.Array:
    """Cross entropy whose gradient is clipped, value by value, to ``limit / batch``."""
    return cross_entropy(logits, labels)


def _clipped_forward(logits, labels, limit):
    return cross_entropy(logits, labels), (logits, labels)


def _clipped_backward(limit, residuals, cotangent):
    logits, labels = residuals
    gradient = jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[-1])
    gradient = jnp.clip(gradient, -limit, limit) * cotangent / len(labels)
    return gradient, np.zeros(labels.shape, jax.dtypes.float0)


clipped_loss.defvjp(_clipped_forward, _clipped_backward)


@jax.custom_jvp
def soft_clip(x: jax.Array) -> jax.Array:
    """``x / sqrt(1 + x²)`` with its derivative given."""
    return x * jax.lax.rsqrt(1 + jnp.square(x))


@soft_clip.defjvp
def _soft_clip_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return soft_clip(x), tangent * jax.lax.rsqrt(1 + jnp.square(x)) ** 3


def make_custom_vjp():
    """A custom activation and a custom loss, one with float0 cotangents."""
    return _classifier(squared_swish, ADAM, lambda x, y: clipped_loss(x, y, 0.5))


def make_mlp():
    """The plainest step: an unrolled residual MLP."""
    return _classifier(optimizer=MOMENTUM)


def make_custom_jvp():
    """An activation with ``jax.custom_jvp``."""
    return _classifier(soft_clip)


def make_jitted():
    """A step that already is jitted, with its state donated, and that calls jitted functions."""
    step, args = _classifier(jax.jit(jnp.sin), ADAMW)
    return jax.jit(step, donate_argnums=(0, 1)), args


def make_dropout():
    """Dropout whose typed key is split in the step; the next key is returned with the state."""
    rng = random_numbers(0)
    params = mlp_weights(rng)

    def loss(params, key, x, labels):
        for block in params["blocks"]:
            key, mask = jax.random.split(key)
            hidden = jax.nn.gelu(layer_norm(x) @ block["up"])
            x = x + dropout(mask, hidden, 0.2) @ block["down"]
        return cross_entropy(layer_norm(x) @ params["head"], labels)

    def step(state, x, labels):
        key, now = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], now, x, labels)
        updates, moments = ADAM.update(grads, state["moments"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments, "key": key}, value

    state = {"params": params, "moments": ADAM.init(params), "key": jax.random.key(3)}
    return step, (state, *labelled(rng))


def make_mixed_leaves():
    """State with integer, boolean, key and empty leaves; a masked batch; None among the outputs."""
    rng = random_numbers(0)
    params = mlp_weights(rng)

    def loss(params, x, labels, valid):
        losses = optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), labels)
        return jnp.where(valid, losses, 0).sum() / valid.sum()

    def step(state, batch):
        params, (count, key) = state["params"], state["rest"]
        value, grads = jax.value_and_grad(loss)(params, **batch)
        flip = jax.random.bernoulli(jax.random.fold_in(key, count))
        updates, moments = MOMENTUM.update(grads, state["moments"])
        state = {
            "params": optax.apply_updates(params, updates),
            "moments": moments,
            "rest": (count + 1, jax.random.fold_in(key, 1)),
            "seen": state["seen"] | flip,
            "empty": state["empty"],
        }
        return state, value, {"nothing": None, "valid": batch["valid"].sum(), "empty": ()}

    state = {
        "params": params,
        "moments": MOMENTUM.init(params),
        "rest": (jnp.uint32(0), jax.random.key(5, impl="rbg")),
        "seen": jnp.zeros(4, bool),
        "empty": jnp.zeros((0, 3)),
    }
    x, labels = labelled(rng)
    return step, (state, {"x": x, "labels": labels, "valid": jnp.asarray(rng.random(BATCH) > 0.3)})


LOG: list[tuple[str, float]] = []


def _record(name: str, value) -> None:
    LOG.append((name, float(value)))


def _answer(name: str, value) -> np.ndarray:
    _record(name, value)
    return np.float32(0.5)


def make_effects():
    """Ordered host effects in the forward pass and after the update; they append to ``LOG``.

    JAX orders the two kinds each by itself. One step appends, in these orders, by
    ``debug.callback`` ``hidden`` once for every block and then ``loss``, and by ``io_callback``
    ``scale`` and then ``update``.
    """
    rng = random_numbers(0)
    params = mlp_weights(rng)

    def loss(params, x, labels):
        for block in params["blocks"]:
            x = x + jnp.tanh(layer_norm(x) @ block["up"]) @ block["down"]
            record = functools.partial(_record, "hidden")
            jax.debug.callback(record, jnp.square(x).mean(), ordered=True)
        return cross_entropy(layer_norm(x) @ params["head"], labels)

    def step(params, moments, x, labels):
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        answer = functools.partial(_answer, "scale")
        scale = io_callback(answer, scalar, optax.tree.norm(grads), ordered=True)
        updates, moments = MOMENTUM.update(jax.tree.map(lambda g: g * scale, grads), moments)
        io_callback(
            functools.partial(_record, "update"), None, optax.tree.norm(updates), ordered=True
        )
        params = optax.apply_updates(params, updates)
        jax.debug.callback(functools.partial(_record, "loss"), value, ordered=True)
        return params, moments, value

    return step, (params, MOMENTUM.init(params), *labelled(rng))


PROBLEMS = [
    plain("mlp", make_mlp, "unrolled"),
    plain("custom_vjp", make_custom_vjp, "custom_vjp"),
    plain("custom_jvp", make_custom_jvp, "custom_jvp"),
    plain("jitted", make_jitted, "jitted"),
    plain("dropout", make_dropout, "dropout", "keys", donate=(0,)),
    plain("mixed_leaves", make_mixed_leaves, "keys", "mixed", donate=(0,)),
    plain("effects", make_effects, "effects"),
]
