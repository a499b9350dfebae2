"""Transformers on plain pytrees: scanned and unrolled, checkpointed, tied, with dropout."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .problem import (
    ADAMW,
    Problem,
    at_least_float32,
    cross_entropy,
    dropout,
    integers,
    layer_norm,
    plain,
    random_numbers,
    train_step,
    weight,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer and of its batch; the defaults are for a CPU."""

    layers: int = 6
    d_model: int = 64
    heads: int = 4
    vocab: int = 128
    batch: int = 16
    sequence: int = 64


@dataclass(frozen=True)
class Form:
    """How the transformer is written down.

    Attributes:
        scan: one scan over stacked layers; otherwise one layer after another.
        checkpoint: each layer (or the scan's body) inside ``jax.checkpoint``.
        tied: the output head is the transposed embedding.
        dropout: two typed keys come with the batch, one for the embedding and one for the layers.
        outputs: every layer's output is used after the loop and returned as aux.
        reverse: the scan runs from the last layer to the first.
        unroll: ``unroll`` of the scan.
        block: size of the key/value blocks of attention; None computes all scores at once.
    """

    scan: bool = True
    checkpoint: bool = False
    tied: bool = False
    dropout: bool = False
    outputs: bool = False
    reverse: bool = False
    unroll: int = 1
    block: int | None = None


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, ``[batch, sequence, heads, head]`` each."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(q.dtype)
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    scores = jnp.where(causal, at_least_float32(scores), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def block_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int) -> jax.Array:
    """Causal attention with a running softmax over blocks of keys (Dao et al., 2022)."""
    batch, sequence, heads, head = q.shape
    blocks = [jnp.moveaxis(a.reshape(batch, -1, block, heads, head), 1, 0) for a in (k, v)]
    rows = jnp.arange(sequence)[:, None]

    def body(carry, inputs):
        highest, total, mixed = carry
        index, key, value = inputs
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, key) / np.sqrt(head).astype(q.dtype)
        scores = jnp.where(rows >= index * block + jnp.arange(block), scores, -1e9)
        higher = jnp.maximum(highest, jax.lax.stop_gradient(scores.max(-1)))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(highest - higher)
        total = total * shrink + weights.sum(-1)
        mixed = mixed * shrink[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, value)
        return (higher, total, mixed), None

    start = jnp.full((batch, heads, sequence), -1e9, q.dtype)
    carry = (start, jnp.zeros_like(start), jnp.zeros((batch, heads, sequence, head), q.dtype))
    indices = jnp.arange(sequence // block)
    (_, total, mixed), _ = jax.lax.scan(body, carry, (indices, *blocks))
    return jnp.moveaxis(mixed / total[..., None], 1, 2)


def layer(form: Form, shape: Shape, x: jax.Array, weights: dict, key=None) -> jax.Array:
    """One pre-norm layer on ``x`` ``[batch, sequence, d_model]``."""
    qkv = (layer_norm(x) @ weights["qkv"]).reshape(*x.shape[:2], 3, shape.heads, -1)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    mix = attention if form.block is None else functools.partial(block_attention, block=form.block)
    mixed = mix(q, k, v).reshape(x.shape) @ weights["out"]
    x = x + (mixed if key is None else dropout(key, mixed, 0.1))
    return x + jax.nn.gelu(layer_norm(x) @ weights["up"]) @ weights["down"]


def loss_function(form: Form, shape: Shape):
    """``loss(params, tokens[, key, layer_keys])``, next-token prediction."""
    block = functools.partial(layer, form, shape)
    if form.checkpoint:
        block = jax.checkpoint(block)

    def stack(x, weights, keys):
        if form.scan:

            def body(x, inputs):
                y = block(x, *inputs)
                return y, y if form.outputs else None

            inputs = (weights,) if keys is None else (weights, keys)
            return jax.lax.scan(body, x, inputs, reverse=form.reverse, unroll=form.unroll)
        outputs = []
        for i, w in enumerate(weights):
            x = block(x, w, None if keys is None else keys[i])
            outputs.append(x)
        return x, jnp.stack(outputs) if form.outputs else None

    def loss(params, tokens, key=None, layer_keys=None):
        x = params["embedding"][tokens]
        if key is not None:
            x = dropout(key, x, 0.1)
        x, outputs = stack(x, params["layers"], layer_keys)
        head = params["embedding"].T if form.tied else params["head"]
        logits = at_least_float32(layer_norm(x) @ head)
        value = cross_entropy(logits[:, :-1], tokens[:, 1:])
        if form.outputs:
            norms = jnp.sqrt(jnp.square(outputs).mean((1, 2, 3)))
            return value + 1e-2 * norms.sum(), outputs
        return value

    return loss


def weights(rng, form: Form, shape: Shape, dtype) -> dict:
    """Parameters of the transformer; stacked ``[layers, ...]`` where it is scanned."""
    d = shape.d_model

    def stacked(*prefix):
        return {
            "qkv": weight(rng, *prefix, d, 3 * d, dtype=dtype),
            "out": weight(rng, *prefix, d, d, dtype=dtype),
            "up": weight(rng, *prefix, d, 4 * d, dtype=dtype),
            "down": weight(rng, *prefix, 4 * d, d, dtype=dtype),
        }

    layers = stacked(shape.layers) if form.scan else [stacked() for _ in range(shape.layers)]
    params = {"embedding": weight(rng, shape.vocab, d, dtype=dtype), "layers": layers}
    return params if form.tied else params | {"head": weight(rng, d, shape.vocab, dtype=dtype)}


def make(form: Form, shape: Shape = Shape(), dtype=jnp.float32):
    """``(step, args)`` of a transformer trained by AdamW."""
    rng = random_numbers(0)
    params = weights(rng, form, shape, dtype)
    args = (params, ADAMW.init(params), integers(rng, shape.vocab, shape.batch, shape.sequence))
    if form.dropout:
        args += (jax.random.key(1), jax.random.split(jax.random.key(2), shape.layers))
    return train_step(loss_function(form, shape), ADAMW, aux=form.outputs), args


def _problem(name: str, form: Form, *tags: str, dtype=jnp.float32, shape=Shape()) -> Problem:
    kind = "scan" if form.scan else "unrolled"
    return plain(name, functools.partial(make, form, shape, dtype), kind, *tags)


UNROLLED = Form(scan=False)
LONG = Shape(layers=4, batch=4, sequence=256)

PROBLEMS = [
    _problem("transformer_scan", Form()),
    _problem("transformer_unrolled", UNROLLED),
    _problem("transformer_bf16", Form(), "bf16", dtype=jnp.bfloat16),
    _problem("transformer_unrolled_tied", Form(scan=False, tied=True), "tied"),
    _problem("transformer_unrolled_checkpoint", Form(scan=False, checkpoint=True), "checkpoint"),
    _problem("transformer_scan_checkpoint", Form(checkpoint=True), "checkpoint"),
    _problem("transformer_scan_unroll", Form(unroll=2), "unrolled_scan"),
    _problem("transformer_scan_reverse", Form(reverse=True), "reverse"),
    _problem("transformer_scan_outputs", Form(outputs=True), "aux"),
    _problem("transformer_dropout_scan", Form(dropout=True), "dropout", "keys"),
    _problem("transformer_dropout_unrolled", Form(scan=False, dropout=True), "dropout", "keys"),
    _problem("transformer_block_attention", Form(block=64), "nested_scan", shape=LONG),
]
