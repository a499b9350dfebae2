"""GPT in Flax NNX learns to predict the next token, with AdamW."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from models.gpt import GPT, GPTConfig

from benchmarks.workloads.base import JaxWorkload
from benchmarks.workloads.text_sizes import GPT_SIZES, GPTSizes

SIZES = GPT_SIZES


def workload(
    sizes: GPTSizes,
    remat_policy: Callable[..., Any] | None = None,
    attention: str = "cudnn",
    scan: bool = False,
    masters: bool = False,
) -> JaxWorkload:
    """The train step; nothing is allocated until ``state`` and ``batch`` are called.

    Args:
        sizes: one of ``SIZES``.
        remat_policy: a policy of ``jax.checkpoint_policies`` for each block; ``None`` saves all.
        attention: ``implementation=`` of ``jax.nn.dot_product_attention``.
        scan: whether the blocks are one loop.
        masters: whether parameters are of the computation's dtype, and the optimizer has them in
            float32 as well.
    """
    config = GPTConfig(
        vocab_size=sizes.vocab_size,
        layers=sizes.layers,
        heads=sizes.heads,
        d_model=sizes.d_model,
        sequence=sizes.sequence,
        dtype=jnp.dtype(sizes.dtype),
        param_dtype=jnp.dtype(sizes.dtype) if masters else jnp.float32,
        attention=attention,
        remat_policy=remat_policy,
        scan_layers=scan,
    )

    def model() -> GPT:
        return GPT(config, rngs=nnx.Rngs(0))

    graph, _ = nnx.split(nnx.eval_shape(model))
    tx = optax.adamw(**vars(sizes.adamw))

    def loss_of(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        tokens = batch["tokens"]
        logits = nnx.merge(graph, params)(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        if not masters:
            updates, opt = tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt = tx.update(grads, state["opt"], state["masters"])
        full = optax.apply_updates(state["masters"], updates)
        params = jax.tree.map(lambda w: w.astype(sizes.dtype), full)
        return {"params": params, "masters": full, "opt": opt}, loss

    def state() -> dict[str, Any]:
        # Plain arrays: nothing may take the step for one that mutates its arguments.
        params = nnx.to_pure_dict(nnx.state(model()))
        if not masters:
            return {"params": params, "opt": tx.init(params)}
        full = jax.tree.map(lambda w: w.astype(jnp.float32), params)
        return {"params": params, "masters": full, "opt": tx.init(full)}

    def batch() -> dict[str, jax.Array]:
        shape = (sizes.batch, sizes.sequence + 1)
        return {"tokens": jax.random.randint(jax.random.key(1), shape, 0, sizes.vocab_size)}

    return JaxWorkload(
        step=step,
        state=state,
        batch=batch,
        items=sizes.batch * sizes.sequence,
        unit="tokens",
        saved=("qkv", "attention"),
        offloaded=("block_in",),
    )
