"""A ResNet classifying images, in JAX: SGD with momentum on random images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jax
import optax
from flax import nnx
from models.resnet import ResNet, ResNetConfig

from benchmarks.workloads.base import JaxWorkload
from benchmarks.workloads.conv_sizes import RESNET_SIZES as SIZES
from benchmarks.workloads.conv_sizes import ResNetSizes as Sizes

__all__ = ["SIZES", "Sizes", "workload"]


def workload(sizes: Sizes, remat_policy: Callable[..., bool] | None = None) -> JaxWorkload:
    """The train step of a ResNet; allocates nothing until its ``state`` or ``batch`` is called.

    Args:
        sizes: one of ``SIZES``, or others.
        remat_policy: a policy of ``jax.checkpoint_policies`` for each block; ``None`` for no
            ``jax.checkpoint``.
    """
    config = ResNetConfig(
        depths=sizes.depths, width=sizes.width, classes=sizes.classes, remat_policy=remat_policy
    )
    tx = optax.chain(
        optax.add_decayed_weights(sizes.weight_decay),
        optax.sgd(sizes.learning_rate, momentum=sizes.momentum),
    )

    def model() -> ResNet:
        return ResNet(config, rngs=nnx.Rngs(0))

    graph = nnx.graphdef(nnx.eval_shape(model))

    def state() -> dict:
        _, params, stats = nnx.split(model(), nnx.Param, nnx.BatchStat)
        return {"params": params, "stats": stats, "opt": tx.init(params)}

    def batch() -> dict[str, jax.Array]:
        images_key, labels_key = jax.random.split(jax.random.key(1))
        shape = (sizes.batch, sizes.image, sizes.image, 3)
        return {
            "images": jax.random.normal(images_key, shape),
            "labels": jax.random.randint(labels_key, shape[:1], 0, sizes.classes),
        }

    def step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
        def loss_fn(params: nnx.State) -> tuple[jax.Array, nnx.State]:
            model = nnx.merge(graph, params, state["stats"], copy=True)
            logits = model(batch["images"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return losses.mean(), nnx.state(model, nnx.BatchStat)

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "opt": opt}, loss

    return JaxWorkload(
        step=step,
        state=state,
        batch=batch,
        items=sizes.batch,
        unit="images",
        saved=("conv1", "conv2", "conv3"),
        offloaded=("block_in",),
    )
