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


class Conv(nnx.Module):
    """A convolution of 3 x 3 x 3 that keeps the size, or halves it with a stride of 2.

    ``[batch, depth, height, width, inputs]`` to the same divided by ``stride``, ``outputs``
    channels. It is the sum of three convolutions of 3 x 3, one for each of the slices that a result
    reads: XLA runs those with channels last, and three-dimensional ones with channels first, which
    takes a GPU longer. Each of the three is rounded to ``dtype``.
    """

    def __init__(
        self, config: UNet3DConfig, inputs: int, outputs: int, stride: int = 1, *, rngs: nnx.Rngs
    ):
        shape = (3, 3, 3, inputs, outputs)
        make = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(make(rngs.params(), shape, config.param_dtype))
        self.stride, self.dtype = stride, config.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...].astype(self.dtype)
        padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0), (0, 0)))
        taps = (padded[:, k : k + x.shape[1] : self.stride] for k in range(3))
        y = _of_slices(next(taps), kernel[0], self.stride)
        for tap, weights in zip(taps, kernel[1:], strict=True):
            y = y + _of_slices(tap, weights, self.stride)
        return y


class Upsample(nnx.Module):
    """A transposed convolution of 2 x 2 x 2 with a stride of 2: a matrix for each of 8 places.

    ``[batch, depth, height, width, inputs]`` to twice that, ``outputs`` channels.
    """

    def __init__(self, config: UNet3DConfig, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        make = nnx.initializers.lecun_normal()
        shape = (2, 2, 2, inputs, outputs)
        self.kernel = nnx.Param(make(rngs.params(), shape, config.param_dtype))
        self.dtype = config.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, depth, height, width, inputs = x.shape
        kernel = self.kernel[...].astype(self.dtype)
        y = _of_slices(x, kernel.transpose(3, 0, 1, 2, 4).reshape(1, 1, inputs, -1))
        y = y.reshape(batch, depth, height, width, 2, 2, 2, -1)
        y = y.transpose(0, 1, 4, 2, 5, 3, 6, 7)
        return y.reshape(batch, 2 * depth, 2 * height, 2 * width, -1)


class Down(nnx.Module):
    """Two convolutions, the first one with the stride (max pooling is slow backwards in XLA).

    ``[batch, depth, height, width, inputs]`` to the same divided by ``stride``, ``outputs``
    channels.
    """

    def __init__(
        self, config: UNet3DConfig, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs
    ):
        self.conv1 = Conv(config, inputs, outputs, stride, rngs=rngs)
        self.norm1 = _norm(config, outputs, rngs)
        self.conv2 = Conv(config, outputs, outputs, rngs=rngs)
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
        self.conv1 = Conv(config, channels, channels, rngs=rngs)
        self.conv1_skip = Conv(config, channels, channels, rngs=rngs)
        self.norm1 = _norm(config, channels, rngs)
        self.conv2 = Conv(config, channels, channels, rngs=rngs)
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
            [Upsample(config, coarse, fine, rngs=rngs) for coarse, fine in reversed(finer_first)]
        )
        self.ups = nnx.List([Up(config, fine, rngs=rngs) for _, fine in reversed(finer_first)])
        self.head = nnx.Linear(
            config.channels[0],
            config.classes,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

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


def _of_slices(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of each slice of ``x`` on its own, padded so that it keeps its size."""
    batch, depth, height, width, channels = x.shape
    around = kernel.shape[0] // 2
    y = jax.lax.conv_general_dilated(
        x.reshape(batch * depth, height, width, channels),
        kernel,
        (stride, stride),
        ((around, around), (around, around)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y.reshape(batch, depth, *y.shape[1:])


def _norm(config: UNet3DConfig, channels: int, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(
        channels,
        config.groups,
        epsilon=1e-5,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )
