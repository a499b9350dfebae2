"""GPTs of 1.3 billion parameters as abstract arguments: compiled for GPUs that are absent."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .problem import ADAMW, Problem, plain, train_step
from .transformers import Form, Shape, loss_function

GPT = Shape(layers=24, d_model=2048, heads=16, vocab=50304, batch=16, sequence=2048)


def abstract_weights(form: Form, shape: Shape, dtype=jnp.bfloat16) -> dict:
    """What ``transformers.weights`` draws, as ``jax.ShapeDtypeStruct``s."""
    d = shape.d_model

    def stacked(*prefix):
        sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        return {name: jax.ShapeDtypeStruct((*prefix, *size), dtype) for name, size in sizes.items()}

    layers = stacked(shape.layers) if form.scan else [stacked() for _ in range(shape.layers)]
    params = {"embedding": jax.ShapeDtypeStruct((shape.vocab, d), dtype), "layers": layers}
    return params if form.tied else params | {"head": jax.ShapeDtypeStruct((d, shape.vocab), dtype)}


def make(form: Form, shape: Shape = GPT):
    """``(step, args)`` of a bfloat16 GPT trained by AdamW; no leaf of ``args`` holds data."""
    params = abstract_weights(form, shape)
    opt_state = jax.eval_shape(ADAMW.init, params)
    tokens = jax.ShapeDtypeStruct((shape.batch, shape.sequence), jnp.int32)
    return train_step(loss_function(form, shape), ADAMW), (params, opt_state, tokens)


def _problem(name: str, form: Form, *tags: str) -> Problem:
    return plain(name, functools.partial(make, form), "bf16", "abstract", *tags)


LARGE: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        _problem("gpt_scan", Form(tied=True), "scan"),
        _problem("gpt_unrolled", Form(scan=False, tied=True), "unrolled"),
    )
}
