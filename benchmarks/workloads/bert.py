"""BERT in Flax Linen learns to predict masked tokens, with AdamW."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jax
import jax.numpy as jnp
import optax
from models.bert import Bert, BertConfig

from benchmarks.workloads.base import JaxWorkload
from benchmarks.workloads.text_sizes import BERT_SIZES, BertSizes

SIZES = BERT_SIZES


def workload(
    sizes: BertSizes,
    remat_policy: Callable[..., Any] | None = None,
    attention: str = "cudnn",
) -> JaxWorkload:
    """The train step; nothing is allocated until ``state`` and ``batch`` are called.

    Args:
        sizes: one of ``SIZES``.
        remat_policy: a policy of ``jax.checkpoint_policies`` for each block; ``None`` saves all.
        attention: ``implementation=`` of ``jax.nn.dot_product_attention``.
    """
    config = BertConfig(
        vocab_size=sizes.vocab_size,
        layers=sizes.layers,
        heads=sizes.heads,
        d_model=sizes.d_model,
        sequence=sizes.sequence,
        segments=sizes.segments,
        dtype=jnp.dtype(sizes.dtype),
        attention=attention,
        remat_policy=remat_policy,
    )
    model = Bert(config)
    tx = optax.adamw(**vars(sizes.adamw))

    def loss_of(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        inputs = (batch["tokens"], batch["segments"], batch["masked"])
        logits = model.apply({"params": params}, *inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def state() -> dict[str, Any]:
        tokens = jnp.zeros((1, sizes.sequence), jnp.int32)
        masked = jnp.zeros((1, sizes.masked), jnp.int32)
        # The same parameters, and their shapes are known on machines without cuDNN, too.
        spelled_out = Bert(replace(config, attention="xla"))
        params = spelled_out.init(jax.random.key(0), tokens, tokens, masked)["params"]
        return {"params": params, "opt": tx.init(params)}

    return JaxWorkload(
        step=step,
        state=state,
        batch=lambda: masked_batch(sizes),
        items=sizes.batch * sizes.sequence,
        unit="tokens",
        saved=("qkv", "attention"),
        offloaded=("block_in",),
    )


def masked_batch(sizes: BertSizes) -> dict[str, jax.Array]:
    """Random tokens of two segments, of which ``masked`` are hidden and are the labels.

    Returns:
        ``tokens`` and ``segments``: ``[batch, sequence]``; ``masked``, positions in ascending
        order, and ``labels``, the tokens that were there: ``[batch, masked]``.
    """
    draw_tokens, draw_masked = jax.random.split(jax.random.key(1))
    shape = (sizes.batch, sizes.sequence)
    tokens = jax.random.randint(draw_tokens, shape, 0, sizes.vocab_size)
    _, masked = jax.lax.top_k(jax.random.uniform(draw_masked, shape), sizes.masked)
    masked = jnp.sort(masked, axis=1)
    halves = (jnp.arange(sizes.sequence) >= sizes.sequence // 2).astype(jnp.int32)
    rows = jnp.arange(sizes.batch)[:, None]
    return {
        "tokens": tokens.at[rows, masked].set(sizes.mask_token),
        "segments": jnp.broadcast_to(halves, shape),
        "masked": masked,
        "labels": jnp.take_along_axis(tokens, masked, axis=1),
    }
