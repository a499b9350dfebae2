"""Nets as Flax Linen, Flax NNX and Equinox users write them."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from .problem import (
    ADAM,
    ADAMW,
    Problem,
    cross_entropy,
    initialised,
    initialised_module,
    integers,
    normal,
    random_numbers,
)

# Attention has no biases: the gradient of a key bias is zero but for rounding, so that no two
# programs agree on it.
LAYERS, WIDTH, BATCH, SEQUENCE, VOCAB, EXAMPLES = 5, 64, 16, 64, 64, 4096


class NNXBlock(nnx.Module):
    """A pre-norm transformer block with dropout, ``[batch, sequence, width]``."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norms[1](x)))))


class NNXTransformer(nnx.Module):
    """Blocks one after another, or one block with stacked parameters under ``nnx.scan``."""

    def __init__(self, scan: bool, *, rngs: nnx.Rngs):
        self.scan = scan
        self.embedding = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        if scan:

            @nnx.split_rngs(splits=LAYERS)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stacked(rngs):
                return NNXBlock(rngs=rngs)

            self.blocks = stacked(rngs)
        else:
            self.blocks = nnx.List([NNXBlock(rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        if self.scan:

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def layers(x, block):
                return block(x)

            x = layers(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.embedding.attend(self.norm(x))


def make_nnx_transformer(scan: bool):
    """``step(model, optimizer, tokens) -> loss`` with dropout from the model's own keys."""
    rng = random_numbers(0)
    model = initialised_module(lambda: NNXTransformer(scan, rngs=nnx.Rngs(0, dropout=1)), rng)
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    tokens = integers(rng, VOCAB, BATCH, SEQUENCE)

    def step(model, optimizer, tokens):
        def loss(model):
            return cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, tokens)


class LinenBlock(nn.Module):
    """A pre-norm transformer block in Linen, in the form ``nn.scan`` wants."""

    @nn.compact
    def __call__(self, x, _):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(4, use_bias=False)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(nn.Dropout(0.1, deterministic=False)(hidden)), None


class LinenTransformer(nn.Module):
    """An ``nn.scan`` over layers, optionally with ``nn.remat`` inside."""

    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        block = nn.remat(LinenBlock, prevent_cse=False) if self.remat else LinenBlock
        scanned = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        x, _ = scanned()(x, None)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


LINEN_TRANSFORMERS = {remat: LinenTransformer(remat) for remat in (False, True)}


def make_linen_transformer(remat: bool):
    """A Linen ``TrainState`` stepped with a fresh dropout key."""
    model = LINEN_TRANSFORMERS[remat]
    rng = random_numbers(0)
    tokens = integers(rng, VOCAB, BATCH, SEQUENCE)
    variables = initialised(jax.eval_shape(model.init, jax.random.key(0), tokens), rng)
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=ADAMW)

    def step(state, tokens, key):
        def loss(params):
            logits = state.apply_fn({"params": params}, tokens, rngs={"dropout": key})
            return cross_entropy(logits[:, :-1], tokens[:, 1:])

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return step, (state, tokens, jax.random.key(1))


class EquinoxMLP(eqx.Module):
    """A residual MLP, batched by ``vmap``; whatever is not an array is a static field."""

    layers: list[eqx.nn.Linear]
    norms: list[eqx.nn.LayerNorm]
    head: eqx.nn.Linear
    scale: float = eqx.field(static=True)

    def __init__(self, depth: int, *, key: jax.Array):
        *keys, last = jax.random.split(key, depth + 1)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in keys]
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in keys]
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=last)
        self.scale = 0.7

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.scale * jax.nn.silu(layer(norm(x)))
        return self.head(x)


def _equinox_step(model, opt_state, x, labels):
    @eqx.filter_value_and_grad
    def loss(model):
        return cross_entropy(jax.vmap(model)(x), labels)

    value, grads = loss(model)
    updates, opt_state = ADAM.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, value


def _make_equinox(model: eqx.Module):
    rng = random_numbers(0)
    opt_state = ADAM.init(eqx.filter(model, eqx.is_inexact_array))
    return _equinox_step, (
        model,
        opt_state,
        normal(rng, EXAMPLES, WIDTH),
        integers(rng, VOCAB, EXAMPLES),
    )


def make_equinox():
    """An Equinox module that ``jax.jit`` accepts as an argument."""
    return _make_equinox(EquinoxMLP(8, key=jax.random.key(0)))


def make_equinox_callables():
    """``eqx.nn.MLP``, whose activation functions are leaves: needs ``eqx.filter_jit``, not jit."""
    return _make_equinox(eqx.nn.MLP(WIDTH, VOCAB, WIDTH, 8, jax.nn.silu, key=jax.random.key(0)))


def make_equinox_partition():
    """Equinox trained on the array half of a partition, the static half closed over."""
    rng = random_numbers(0)
    model = eqx.nn.MLP(WIDTH, VOCAB, 2 * WIDTH, 6, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def step(params, opt_state, x, labels):
        def loss(params):
            return cross_entropy(jax.vmap(eqx.combine(params, static))(x), labels)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (
        params,
        ADAM.init(params),
        normal(rng, EXAMPLES, WIDTH),
        integers(rng, VOCAB, EXAMPLES),
    )


def _problem(name: str, make, *tags: str, donate=(0, 1)) -> Problem:
    return Problem(name, make, donate, frozenset(tags))


PROBLEMS = [
    _problem(
        "transformer_nnx",
        functools.partial(make_nnx_transformer, False),
        "nnx",
        "unrolled",
        "dropout",
        "keys",
    ),
    _problem(
        "transformer_nnx_scan",
        functools.partial(make_nnx_transformer, True),
        "nnx",
        "scan",
        "dropout",
        "keys",
    ),
    _problem(
        "transformer_linen",
        functools.partial(make_linen_transformer, False),
        "linen",
        "scan",
        "dropout",
        "keys",
        donate=(0,),
    ),
    _problem(
        "transformer_linen_remat",
        functools.partial(make_linen_transformer, True),
        "linen",
        "scan",
        "checkpoint",
        "dropout",
        "keys",
        donate=(0,),
    ),
    _problem("mlp_equinox", make_equinox, "equinox"),
    _problem("mlp_equinox_callables", make_equinox_callables, "equinox", "static_leaves"),
    _problem("mlp_equinox_partition", make_equinox_partition, "equinox"),
]
