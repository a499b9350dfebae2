"""What JAX asks the GPU's libraries while it traces is answered for a GPU that is not there."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.targets.target import Target
from jaxmem.targets.topology import tracing_for

QKV = jax.ShapeDtypeStruct((4, 512, 8, 64), jnp.bfloat16)
SCORES_BYTES = 4 * 8 * 512 * 512 * 2  # bfloat16, of one layer

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="a GPU of this machine answers for itself"
)


def attend(query, key, value, implementation="cudnn"):
    made = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )
    return (made.astype(jnp.float32) ** 2).sum()


def three_layers(query, key, value, implementation="cudnn"):
    """Attention after attention, so that there is something to make again."""

    def loss(query):
        for _ in range(3):
            query = query + jax.nn.dot_product_attention(
                jnp.tanh(query), key, value, is_causal=True, implementation=implementation
            )
        return (query.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss)(query)


def traced(*args):
    """Its program, traced anew: JAX keeps what it traced before."""
    return jax.make_jaxpr(lambda *args: attend(*args))(*args)


def test_flash_attention_is_planned_for_a_gpu_that_is_not_there():
    keep_all = jaxmem.plan(three_layers, QKV, QKV, QKV, target="h100", budget="80GB")
    spelled_out = functools.partial(three_layers, implementation="xla")
    scores = jaxmem.plan(spelled_out, QKV, QKV, QKV, target="h100", budget="80GB")
    assert scores.compiled_bytes - keep_all.compiled_bytes > 3 * SCORES_BYTES
    tight = int(keep_all.compiled_bytes * 0.9)
    plan = jaxmem.plan(three_layers, QKV, QKV, QKV, target="h100", budget=tight)
    assert plan.compiled_bytes <= tight
    assert plan.predicted_seconds > keep_all.predicted_seconds


def test_the_compiled_program_calls_cudnn_forward_and_backward():
    step = jaxmem.fit(jax.grad(attend), target="h100", budget="80GB")
    text = step.lower(QKV, QKV, QKV).compile().as_text()
    assert "fmhaSoftmax" in text and "fmhaSoftmaxBackward" in text
    report = jaxmem.analyze(jax.grad(attend), QKV, QKV, QKV, target="h100")
    assert report.compiled_bytes > report.argument_bytes
    assert jaxmem.frontier(jax.grad(attend), QKV, QKV, QKV, target="h100").points


def test_outside_of_it_jax_says_what_it_says():
    with tracing_for(Target("h100")):
        assert traced(QKV, QKV, QKV).eqns
        told = []

        def elsewhere():
            try:
                traced(QKV, QKV, QKV)
            except RuntimeError as error:
                told.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "cuDNN" in told[0]
    with pytest.raises(RuntimeError, match="cuDNN"):
        traced(QKV, QKV, QKV)
    with tracing_for(Target("cpu")), pytest.raises(RuntimeError, match="cuDNN"):
        traced(QKV, QKV, QKV)


def test_the_absent_gpu_decides_what_its_attention_can_do():
    wide = jax.ShapeDtypeStruct((4, 512, 8, 256), jnp.bfloat16)  # Hopper's alone
    with tracing_for(Target("h100")):
        traced(wide, wide, wide)
    with tracing_for(Target("a100-80")), pytest.raises(NotImplementedError, match="head dim"):
        traced(wide, wide, wide)
