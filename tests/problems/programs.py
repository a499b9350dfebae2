"""Random train steps for fuzzing: nested loops, skips, checkpoints, dropout, well conditioned.

Every block ends in a residual sum that is normalised, so activations and gradients stay of order
one however deep the program is and float32 results can be compared (`compare.in_float64`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .problem import ADAM, MOMENTUM, Step, dropout, layer_norm, normal, random_numbers, weight
from .rules import soft_clip, squared_swish

BATCH, WIDTH = 256, 32

Apply = Callable[[Any, jax.Array, jax.Array | None], jax.Array]
"""``apply(params, x, key)`` with ``x`` and the result ``[batch, width]``."""

ACTIVATIONS = (jnp.tanh, jax.nn.gelu, jax.nn.silu, jax.nn.relu, jnp.sin, soft_clip, squared_swish)
ELEMENTWISE = (
    jnp.tanh,
    jnp.sin,
    jax.nn.sigmoid,
    soft_clip,
    lambda x: jnp.where(x > 0, x, 0.1 * x),
    lambda x: x / (1 + jnp.square(x)),
    lambda x: jnp.exp(-jnp.abs(x)),
    lambda x: jnp.logaddexp(x, -x),
)


@dataclass(frozen=True)
class Block:
    """A part of a program: its weights and how to apply them.

    Attributes:
        params: weights, any pytree.
        apply: ``apply(params, x, key)``; pure, and with weights of the same structure reusable.
        random: whether it uses its key; no key is derived for a block that does not.
    """

    params: Any
    apply: Apply
    random: bool = False


def random_step(seed: int, *, depth: int = 2) -> tuple[Step, tuple]:
    """``step(params, opt_state, x, y, key) -> (params, opt_state, loss[, aux])``, and arguments.

    The same seed gives the same program and numbers on every JAX version. The step takes its
    precision from its arguments.

    Args:
        seed: of the program, its weights and its data.
        depth: how deep scans, checkpoints, branches and skips may nest.

    Returns:
        The step and concrete arguments, under 1 MiB; the first two are state and may be donated.

    >>> step, args = random_step(0)
    >>> jax.eval_shape(step, *args)[2].shape
    ()
    """
    rng = random_numbers(seed)
    net = _sequence(rng, depth, int(rng.integers(3, 6)))
    optimizer = (ADAM, MOMENTUM)[rng.integers(2)]
    with_aux = bool(rng.integers(2))

    def loss(params, x, y, key):
        out = net.apply(params, x, key)
        return jnp.square(out - y).mean(), {"mean": out.mean(0), "largest": out.max()}

    def step(params, opt_state, x, y, key):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, x, y, key)
        updates, opt_state = optimizer.update(grads, opt_state)
        state = optax.apply_updates(params, updates), opt_state
        return (*state, value, aux) if with_aux else (*state, value)

    x, y = normal(rng, BATCH, WIDTH), normal(rng, BATCH, WIDTH)
    return step, (net.params, optimizer.init(net.params), x, y, jax.random.key(seed))


def _sequence(rng: np.random.Generator, depth: int, length: int) -> Block:
    """Blocks one after another; now and then an earlier value skips ahead to a later one."""
    leaves = (_dense, _dense, _gated, _elementwise, _mixing, _statistics, _dropout)
    nests = (_scan, _scan, _checkpoint, _branch, _jit, _wide_skip)
    blocks = []
    for _ in range(length):
        if depth and rng.random() < 0.4:
            blocks.append(nests[rng.integers(len(nests))](rng, depth - 1))
        else:
            blocks.append(leaves[rng.integers(len(leaves))](rng))
    skips = {i: int(rng.integers(i)) for i in range(2, length) if rng.random() < 0.3}

    def apply(params, x, key):
        seen = []
        for i, (block, weights) in enumerate(zip(blocks, params, strict=True)):
            own = jax.random.fold_in(key, i) if block.random else None
            x = layer_norm(x + block.apply(weights, x, own))
            if i in skips:
                x = x + 0.5 * seen[skips[i]]
            seen.append(x)
        return x

    return Block([block.params for block in blocks], apply, any(b.random for b in blocks))


def _dense(rng: np.random.Generator) -> Block:
    activation = ACTIVATIONS[rng.integers(len(ACTIVATIONS))]
    hidden = WIDTH * int(rng.integers(1, 5))
    params = {"up": weight(rng, WIDTH, hidden), "down": weight(rng, hidden, WIDTH)}
    return Block(params, lambda p, x, key: activation(x @ p["up"]) @ p["down"])


def _gated(rng: np.random.Generator) -> Block:
    params = [weight(rng, WIDTH, 2 * WIDTH), weight(rng, WIDTH, WIDTH)]

    def apply(params, x, key):
        gate, value = jnp.split(x @ params[0], 2, axis=-1)
        return (jax.nn.sigmoid(gate) * value) @ params[1]

    return Block(params, apply)


def _elementwise(rng: np.random.Generator) -> Block:
    chain = [ELEMENTWISE[i] for i in rng.integers(len(ELEMENTWISE), size=rng.integers(2, 7))]
    params = {"scale": normal(rng, WIDTH) * 0.3 + 1, "shift": normal(rng, WIDTH)}

    def apply(params, x, key):
        for function in chain:
            x = function(x * params["scale"] + params["shift"])
        return x

    return Block(params, apply)


def _mixing(rng: np.random.Generator) -> Block:
    """Attention of the rows of the batch to one another."""
    params = {"query": weight(rng, WIDTH, WIDTH), "value": weight(rng, WIDTH, WIDTH)}

    def apply(params, x, key):
        scores = (x @ params["query"]) @ x.T / np.sqrt(WIDTH).astype(x.dtype)
        return jax.nn.softmax(0.5 * scores) @ (x @ params["value"])

    return Block(params, apply)


def _statistics(rng: np.random.Generator) -> Block:
    """Reductions over the batch, brought back by broadcasting, a running sum and a gather."""
    order = rng.permutation(BATCH).astype(np.int32)
    params = normal(rng, 3, WIDTH)

    def apply(params, x, key):
        running = jnp.cumsum(x, axis=0) / np.sqrt(BATCH).astype(x.dtype)
        average = x * jnp.square(x).mean(0)
        return running * params[0] + average * params[1] + jnp.tanh(x)[order] * params[2]

    return Block(params, apply)


def _dropout(rng: np.random.Generator) -> Block:
    params = weight(rng, WIDTH, WIDTH)
    rate = float(rng.uniform(0.1, 0.4))
    return Block(params, lambda w, x, key: dropout(key, jnp.tanh(x @ w), rate), True)


def _scan(rng: np.random.Generator, depth: int) -> Block:
    """A scan over stacked weights, of a short sequence."""
    length = int(rng.integers(2, 5))
    inner = _sequence(rng, depth, int(rng.integers(1, 3)))
    shrinking = np.linspace(1, 0.7, length, dtype=np.float32)
    params = jax.tree.map(lambda w: jnp.stack([w * scale for scale in shrinking]), inner.params)
    reverse, unroll, collect = bool(rng.integers(2)), int(rng.integers(1, 3)), bool(rng.integers(2))

    def apply(params, x, key):
        def body(x, inputs):
            weights, key = inputs
            y = inner.apply(weights, x, key)
            return y, jnp.tanh(y).mean(0) if collect else None

        keys = jax.random.split(key, length) if inner.random else None
        y, means = jax.lax.scan(body, x, (params, keys), reverse=reverse, unroll=unroll)
        return y + means.sum(0) if collect else y

    return Block(params, apply, inner.random)


def _checkpoint(rng: np.random.Generator, depth: int) -> Block:
    inner = _sequence(rng, depth, int(rng.integers(1, 4)))
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    policy = (None, dots)[rng.integers(2)]
    return Block(inner.params, jax.checkpoint(inner.apply, policy=policy), inner.random)


def _jit(rng: np.random.Generator, depth: int) -> Block:
    inner = _sequence(rng, depth, int(rng.integers(1, 3)))
    return Block(inner.params, jax.jit(inner.apply), inner.random)


def _branch(rng: np.random.Generator, depth: int) -> Block:
    """A ``cond`` on the data."""
    inner = _sequence(rng, depth, 1)
    simple = _dense(rng)
    negate = float(rng.choice([-1, 1]))

    def apply(params, x, key):
        return jax.lax.cond(
            negate * x[0, 0] > 0,
            lambda: inner.apply(params[0], x, key),
            lambda: simple.apply(params[1], x, key),
        )

    return Block([inner.params, simple.params], apply, inner.random)


def _wide_skip(rng: np.random.Generator, depth: int) -> Block:
    """A U: the input is concatenated to what the inner sequence makes of it."""
    inner = _sequence(rng, depth, int(rng.integers(1, 3)))
    params = {"inner": inner.params, "join": weight(rng, 2 * WIDTH, WIDTH)}

    def apply(params, x, key):
        y = inner.apply(params["inner"], jnp.tanh(x), key)
        return jnp.concatenate([x, y], axis=-1) @ params["join"]

    return Block(params, apply, inner.random)
