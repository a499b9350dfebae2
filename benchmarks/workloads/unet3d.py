"""A 3D U-Net segmenting volumes, in JAX: AdamW on random volumes, a label for each voxel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from models.unet3d import UNet3D, UNet3DConfig

from benchmarks.workloads.base import JaxWorkload
from benchmarks.workloads.conv_sizes import UNET3D_SIZES as SIZES
from benchmarks.workloads.conv_sizes import UNet3DSizes as Sizes

__all__ = ["SIZES", "Sizes", "workload"]


def workload(sizes: Sizes, remat_policy: Callable[..., bool] | None = None) -> JaxWorkload:
    """The train step of a U-Net; allocates nothing until its ``state`` or ``batch`` is called.

    Args:
        sizes: one of ``SIZES``, or others.
        remat_policy: a policy of ``jax.checkpoint_policies`` for each pair of convolutions;
            ``None`` for no ``jax.checkpoint``.
    """
    config = UNet3DConfig(
        channels=sizes.channels,
        classes=sizes.classes,
        inputs=sizes.inputs,
        groups=sizes.groups,
        remat_policy=remat_policy,
    )
    tx = optax.adamw(sizes.learning_rate, weight_decay=sizes.weight_decay)

    def model() -> UNet3D:
        return UNet3D(config, rngs=nnx.Rngs(0))

    graph = nnx.graphdef(nnx.eval_shape(model))

    def state() -> dict:
        params = nnx.state(model(), nnx.Param)
        return {"params": params, "opt": tx.init(params)}

    def batch() -> dict[str, jax.Array]:
        volumes_key, labels_key = jax.random.split(jax.random.key(1))
        shape = (sizes.batch, *sizes.volume)
        return {
            "volumes": jax.random.normal(volumes_key, (*shape, sizes.inputs)),
            "labels": jax.random.randint(labels_key, shape, 0, sizes.classes),
        }

    def step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
        def loss_fn(params: nnx.State) -> jax.Array:
            logits = nnx.merge(graph, params)(batch["volumes"]).astype(jnp.float32)
            # One-hot, not integer labels: those are a scatter over all voxels backwards.
            labels = jax.nn.one_hot(batch["labels"], sizes.classes)
            return optax.softmax_cross_entropy(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return JaxWorkload(
        step=step,
        state=state,
        batch=batch,
        items=sizes.batch,
        unit="volumes",
        saved=("conv1", "conv2"),
        offloaded=("block_in",),
    )
