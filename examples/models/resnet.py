"""ResNets of bottleneck blocks in Flax NNX (He et al., https://arxiv.org/abs/1512.03385)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

RESNET_50 = (3, 4, 6, 3)
RESNET_101 = (3, 4, 23, 3)
RESNET_152 = (3, 8, 36, 3)


@dataclass(frozen=True)
class ResNetConfig:
    """The shape of a ResNet.

    Attributes:
        depths: blocks of each stage; each stage after the first halves height and width.
        width: channels inside the blocks of the first stage; each stage doubles them. A block's
            output has four times as many.
        classes: number of classes.
        dtype: dtype of the computation.
        param_dtype: dtype of the parameters, and so of the optimizer state.
        remat_policy: a policy of ``jax.checkpoint_policies`` for each block; ``None`` keeps what
            the backward pass reads, without ``jax.checkpoint``.
    """

    depths: tuple[int, ...] = RESNET_152
    width: int = 64
    classes: int = 1000
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat_policy: Callable[..., bool] | None = None


class Bottleneck(nnx.Module):
    """Convolutions 1x1, 3x3 and 1x1 added to a shortcut (v1.5: the 3x3 has the stride).

    ``[batch, height, width, inputs]`` to ``[batch, height/stride, width/stride, 4 * width]``.
    """

    def __init__(
        self, config: ResNetConfig, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs
    ):
        outputs = 4 * width
        self.conv1 = _conv(config, inputs, width, 1, 1, rngs)
        self.norm1 = _norm(config, width, rngs)
        self.conv2 = _conv(config, width, width, 3, stride, rngs)
        self.norm2 = _norm(config, width, rngs)
        self.conv3 = _conv(config, width, outputs, 1, 1, rngs)
        self.norm3 = _norm(config, outputs, rngs)
        self.projects = stride > 1 or inputs != outputs
        if self.projects:
            self.projection = _conv(config, inputs, outputs, 1, stride, rngs)
            self.projection_norm = _norm(config, outputs, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = checkpoint_name(x, "block_in")
        y = nnx.relu(self.norm1(checkpoint_name(self.conv1(x), "conv1")))
        y = nnx.relu(self.norm2(checkpoint_name(self.conv2(y), "conv2")))
        y = self.norm3(checkpoint_name(self.conv3(y), "conv3"))
        if self.projects:
            with jax.named_scope("shortcut"):
                x = self.projection_norm(self.projection(x))
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    """Images ``[batch, height, width, 3]`` to logits ``[batch, classes]``.

    Batch norm uses the statistics of the batch and moves its averages (``nnx.BatchStat``) once a
    call, with ``remat_policy`` too; ``model.eval()`` uses the averages.

    >>> model = ResNet(ResNetConfig(depths=(1, 1), width=8, classes=10), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 32, 32, 3))).shape
    (2, 10)
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = _conv(config, 3, config.width, 7, 2, rngs)
        self.stem_norm = _norm(config, config.width, rngs)
        blocks, channels = [], config.width
        for stage, depth in enumerate(config.depths):
            width = config.width * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Bottleneck(config, channels, width, stride, rngs=rngs))
                channels = 4 * width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(
            channels,
            config.classes,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        run_block = Bottleneck.__call__
        if self.config.remat_policy is not None:
            run_block = nnx.remat(run_block, policy=self.config.remat_policy)
        with jax.named_scope("stem"):
            x = nnx.relu(self.stem_norm(self.stem(images)))
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for index, block in enumerate(self.blocks):
            with jax.named_scope(f"block{index}"):
                x = run_block(block, x)
        with jax.named_scope("head"):
            return self.head(x.mean(axis=(1, 2)))


def _conv(
    config: ResNetConfig, inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs
) -> nnx.Conv:
    return nnx.Conv(
        inputs,
        outputs,
        (size, size),
        strides=stride,
        padding=size // 2,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        rngs=rngs,
    )


def _norm(config: ResNetConfig, channels: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(
        channels, momentum=0.9, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
    )
