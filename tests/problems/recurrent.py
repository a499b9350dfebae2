"""Recurrent nets: loops over time, alone and inside loops over layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .problem import (
    ADAM,
    cross_entropy,
    integers,
    layer_norm,
    normal,
    plain,
    random_numbers,
    train_step,
    weight,
)

WIDTH, TIME, BATCH, VOCAB = 64, 64, 64, 64


def lstm_cell(weights: dict, carry: tuple, x: jax.Array) -> tuple:
    """One step of an LSTM; ``x`` and both halves of the carry are ``[batch, width]``."""
    hidden, cell = carry
    gates = x @ weights["input"] + hidden @ weights["hidden"] + weights["bias"]
    update, forget, read, new = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(forget + 1) * cell + jax.nn.sigmoid(update) * jnp.tanh(new)
    hidden = jax.nn.sigmoid(read) * jnp.tanh(cell)
    return (hidden, cell), hidden


def lstm_weights(rng, *prefix: int) -> dict:
    """Weights of one LSTM layer, or of ``prefix[0]`` of them stacked."""
    return {
        "input": weight(rng, *prefix, WIDTH, 4 * WIDTH),
        "hidden": weight(rng, *prefix, WIDTH, 4 * WIDTH),
        "bias": jnp.zeros((*prefix, 4 * WIDTH)),
    }


def run_lstm(weights: dict, xs: jax.Array) -> jax.Array:
    """All hidden states ``[time, batch, width]`` of inputs of the same shape."""
    zeros = jnp.zeros(xs.shape[1:], xs.dtype)
    _, hidden = jax.lax.scan(lambda c, x: lstm_cell(weights, c, x), (zeros, zeros), xs)
    return hidden


def _language_model(stack):
    def loss(params, tokens):
        hidden = stack(params["lstm"], params["embedding"][tokens])
        return cross_entropy(hidden[:-1] @ params["head"], tokens[1:])

    return loss


def _arguments(rng, lstm) -> tuple:
    params = {
        "embedding": normal(rng, VOCAB, WIDTH),
        "lstm": lstm,
        "head": weight(rng, WIDTH, VOCAB),
    }
    return params, ADAM.init(params), integers(rng, VOCAB, TIME, BATCH)


def make_lstm():
    """One LSTM layer scanned over time."""
    rng = random_numbers(0)
    return train_step(_language_model(run_lstm), ADAM), _arguments(rng, lstm_weights(rng))


def make_nested():
    """A scan over layers around a scan over time."""
    rng = random_numbers(0)

    def stack(weights, xs):
        def body(xs, weights):
            return xs + layer_norm(run_lstm(weights, xs)), None

        return jax.lax.scan(body, xs, weights)[0]

    return train_step(_language_model(stack), ADAM), _arguments(rng, lstm_weights(rng, 3))


def make_bidirectional():
    """A forward and a reversed scan over the same inputs, and a residual connection."""
    rng = random_numbers(0)

    def stack(weights, xs):
        ahead = run_lstm(weights["ahead"], xs)
        zeros = jnp.zeros(xs.shape[1:], xs.dtype)
        step = functools.partial(lstm_cell, weights["back"])
        _, behind = jax.lax.scan(step, (zeros, zeros), xs, reverse=True)
        return layer_norm(xs + ahead + behind)

    lstm = {"ahead": lstm_weights(rng), "back": lstm_weights(rng)}
    return train_step(_language_model(stack), ADAM), _arguments(rng, lstm)


def make_many_carries():
    """A scan with three carries (one an integer), closed-over constants and two outputs."""
    rng = random_numbers(0)
    params = {
        "mix": weight(rng, WIDTH, WIDTH),
        "gate": weight(rng, WIDTH, WIDTH),
        "shift": jnp.zeros(WIDTH),
    }

    def loss(params, xs, targets):
        scale = jax.nn.softplus(params["shift"])

        def body(carry, x):
            state, average, count = carry
            gate = jax.nn.sigmoid(0.3 * (state @ params["gate"]) + x)
            state = layer_norm(state * gate + jnp.tanh(x @ params["mix"]) * (1 - gate))
            average = 0.9 * average + 0.1 * state * scale
            weighting = 1 / (1 + count.astype(state.dtype))
            return (state, average, count + 1), (average * weighting, jnp.square(state).mean())

        zeros = jnp.zeros(xs.shape[1:], xs.dtype)
        (_, average, _), (ys, energy) = jax.lax.scan(body, (zeros, zeros, jnp.int32(0)), xs)
        return jnp.square(ys - targets).mean() + 0.1 * average.mean() + 0.01 * energy.mean()

    xs, targets = normal(rng, TIME, BATCH, WIDTH), normal(rng, TIME, BATCH, WIDTH)
    return train_step(loss, ADAM), (params, ADAM.init(params), xs, targets)


PROBLEMS = [
    plain("lstm", make_lstm, "scan", "rnn"),
    plain("lstm_nested", make_nested, "scan", "nested_scan", "rnn"),
    plain("lstm_bidirectional", make_bidirectional, "scan", "reverse", "rnn"),
    plain("scan_many_carries", make_many_carries, "scan", "rnn", "consts"),
]
