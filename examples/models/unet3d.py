"""A 3D U-Net in Flax NNX (Çiçek et al., https://arxiv.org/abs/1606.06650), with group norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike


@dataclass(frozen=True)
class UNet3DConfig:
    """The shape of a 3D U-Net.

    Attributes:
        channels: channels of each level; each level after the first halves depth, height and width.
        classes: number of classes of a voxel.
        inputs: channels of the volume.
        dtype: dtype of the computation.
        param_dtype: dtype of the parameters, and so of the optimizer state.
        groups: groups of channels that are normalised together; must divide all ``channels``.
        remat_policy: a policy of ``jax.checkpoint_policies`` for each pair of convolutions;
            ``None`` keeps what the backward pass reads, without ``jax.checkpoint``.
    """

    channels: tuple[int, ...] = (16, 32, 64, 128, 256)
    classes: int = 3
    inputs: int = 1
    dtype: DTypeLike = jnp.bfloat16
    param_dtype: DTypeLike = jnp.float32
    groups: int = 8
    remat_policy: Callable[..., bool] | None = None


class Down(nnx.Module):
    """Two convolutions, the first one with the stride (max pooling is slow backwards in XLA).

    ``[batch, depth, height, width, inputs]`` to the same divided by ``stride``, ``outputs``
    channels.
    """

    def __init__(
        self, config: UNet3DConfig, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs
    ):
        self.conv1 = _conv(config, inputs, outputs, 3, stride, rngs)
        self.norm1 = _norm(config, outputs, rngs)
        self.conv2 = _conv(config, outputs, outputs, 3, 1, rngs)
        self.norm2 = _norm(config, outputs, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = checkpoint_name(x, "block_in")
        x = nnx.relu(self.norm1(checkpoint_name(self.conv1(x), "conv1")))
        return nnx.relu(self.norm2(checkpoint_name(self.conv2(x), "conv2")))


class Up(nnx.Module):
    """Two convolutions of ``x`` concatenated with the skip of the encoder; all the same shape.

    The first is the sum of two with half the inputs each, which is the same function and never
    makes the concatenated volume. That would be the largest tensor of all, and cuDNN wants fewer
    than 2^31 elements.
    """

    def __init__(self, config: UNet3DConfig, channels: int, *, rngs: nnx.Rngs):
        self.conv1 = _conv(config, channels, channels, 3, 1, rngs)
        self.conv1_skip = _conv(config, channels, channels, 3, 1, rngs)
        self.norm1 = _norm(config, channels, rngs)
        self.conv2 = _conv(config, channels, channels, 3, 1, rngs)
        self.norm2 = _norm(config, channels, rngs)

    def __call__(self, x: jax.Array, skip: jax.Array) -> jax.Array:
        x = checkpoint_name(x, "block_in")
        skip = checkpoint_name(skip, "block_in")
        x = checkpoint_name(self.conv1(x) + self.conv1_skip(skip), "conv1")
        x = nnx.relu(self.norm1(x))
        return nnx.relu(self.norm2(checkpoint_name(self.conv2(x), "conv2")))


class UNet3D(nnx.Module):
    """Volumes ``[batch, depth, height, width, inputs]`` to logits of each voxel, ``classes`` last.

    Depth, height and width must be multiples of ``2 ** (levels - 1)``.

    >>> model = UNet3D(UNet3DConfig(channels=(8, 16)), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 8, 8, 4, 1))).shape
    (1, 8, 8, 4, 3)
    """

    def __init__(self, config: UNet3DConfig, *, rngs: nnx.Rngs):
        self.config = config
        downs, inputs = [], config.inputs
        for level, outputs in enumerate(config.channels):
            downs.append(Down(config, inputs, outputs, 1 if level == 0 else 2, rngs=rngs))
            inputs = outputs
        self.downs = nnx.List(downs)
        finer_first = list(zip(config.channels[1:], config.channels[:-1], strict=True))
        self.upsamples = nnx.List(
            [_upsample(config, coarse, fine, rngs) for coarse, fine in reversed(finer_first)]
        )
        self.ups = nnx.List([Up(config, fine, rngs=rngs) for _, fine in reversed(finer_first)])
        self.head = _conv(config, config.channels[0], config.classes, 1, 1, rngs, use_bias=True)

    def __call__(self, volumes: jax.Array) -> jax.Array:
        down_block, up_block = Down.__call__, Up.__call__
        if (policy := self.config.remat_policy) is not None:
            down_block, up_block = (nnx.remat(f, policy=policy) for f in (down_block, up_block))
        x, skips = volumes.astype(self.config.dtype), []
        for level, down in enumerate(self.downs):
            with jax.named_scope(f"down{level}"):
                x = down_block(down, x)
            skips.append(x)
        skips.pop()
        for upsample, up in zip(self.upsamples, self.ups, strict=True):
            with jax.named_scope(f"up{len(skips) - 1}"):
                x = up_block(up, upsample(x), skips.pop())
        with jax.named_scope("head"):
            return self.head(x)


def _conv(
    config: UNet3DConfig,
    inputs: int,
    outputs: int,
    size: int,
    stride: int,
    rngs: nnx.Rngs,
    use_bias: bool = False,
) -> nnx.Conv:
    return nnx.Conv(
        inputs,
        outputs,
        (size, size, size),
        strides=stride,
        padding=size // 2,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _upsample(config: UNet3DConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.ConvTranspose:
    return nnx.ConvTranspose(
        inputs,
        outputs,
        (2, 2, 2),
        strides=2,
        padding="VALID",
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _norm(config: UNet3DConfig, channels: int, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(
        channels,
        config.groups,
        epsilon=1e-5,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )
