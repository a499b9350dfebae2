"""Convolutional nets, images ``[batch, height, width, channels]``: Linen, NNX and plain."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from .problem import (
    ADAM,
    ADAMW,
    MOMENTUM,
    Problem,
    cross_entropy,
    initialised,
    initialised_module,
    integers,
    layer_norm,
    normal,
    plain,
    random_numbers,
    train_step,
    weight,
)

CLASSES = 10


class LinenConvNet(nn.Module):
    """Convolutions with batch statistics and a residual connection around every second one."""

    channels: int = 24
    depth: int = 6

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.Conv(self.channels, (3, 3), use_bias=False)(x)
        for i in range(self.depth):
            h = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            h = nn.Conv(self.channels, (3, 3), use_bias=False)(h)
            x = x + h if i % 2 else h
        return nn.Dense(CLASSES)(x.mean((1, 2)))


# One model for every state: a TrainState carries the bound `apply` in its tree structure, and two
# structures are equal only if it is bound to the same object.
LINEN_CONV_NET = LinenConvNet()


class BatchState(TrainState):
    """A Linen train state that carries batch statistics."""

    batch_stats: dict


def make_linen_conv():
    """A Linen ``TrainState`` with mutable ``batch_stats``."""
    model = LINEN_CONV_NET
    rng = random_numbers(0)
    images, labels = normal(rng, 16, 32, 32, 3), integers(rng, CLASSES, 16)
    init = functools.partial(model.init, train=True)
    variables = initialised(jax.eval_shape(init, jax.random.key(0), images), rng)
    state = BatchState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=MOMENTUM,
    )

    def step(state, images, labels):
        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
            return cross_entropy(logits, labels), updates["batch_stats"]

        (value, batch_stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), value

    return step, (state, images, labels)


class NNXConvNet(nnx.Module):
    """Convolutions with batch statistics and dropout, both of which the step mutates."""

    def __init__(self, channels: int, depth: int, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, channels, (3, 3), rngs=rngs)
        self.convs = nnx.List(
            [nnx.Conv(channels, channels, (3, 3), use_bias=False, rngs=rngs) for _ in range(depth)]
        )
        self.norms = nnx.List([nnx.BatchNorm(channels, rngs=rngs) for _ in range(depth)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(channels, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + self.dropout(jax.nn.relu(conv(norm(x))))
        return self.head(x.mean((1, 2)))


def make_nnx_conv():
    """``step(model, optimizer, images, labels) -> loss``: weights, statistics and keys mutate."""
    rng = random_numbers(0)
    model = initialised_module(lambda: NNXConvNet(24, 5, rngs=nnx.Rngs(0)), rng)
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)

    def step(model, optimizer, images, labels):
        value, grads = nnx.value_and_grad(lambda m: cross_entropy(m(images), labels))(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, normal(rng, 16, 32, 32, 3), integers(rng, CLASSES, 16))


class UNet(nnx.Module):
    """Two levels down and up again; each level's input skips to the way up."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        def conv(inputs: int, outputs: int, strides: int = 1) -> nnx.Conv:
            return nnx.Conv(inputs, outputs, (3, 3), strides=strides, rngs=rngs)

        def up(inputs: int, outputs: int) -> nnx.ConvTranspose:
            return nnx.ConvTranspose(inputs, outputs, (2, 2), strides=(2, 2), rngs=rngs)

        c = channels
        self.stem = conv(3, c)
        self.down = nnx.List([conv(c, 2 * c, 2), conv(2 * c, 4 * c, 2)])
        self.middle = conv(4 * c, 4 * c)
        self.up = nnx.List([up(4 * c, 2 * c), up(2 * c, c)])
        self.join = nnx.List([conv(4 * c, 2 * c), conv(2 * c, c)])
        self.head = nnx.Linear(c, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem(x))
        skips = []
        for down in self.down:
            skips.append(x)
            x = jax.nn.relu(layer_norm(down(x)))
        x = jax.nn.relu(layer_norm(self.middle(x)))
        for up, join in zip(self.up, self.join, strict=True):
            x = jnp.concatenate([up(x), skips.pop()], axis=-1)
            x = jax.nn.relu(layer_norm(join(x)))
        return self.head(x)


def make_unet():
    """A denoising U-Net in NNX with skip connections and transposed convolutions."""
    rng = random_numbers(0)
    model = initialised_module(lambda: UNet(12, rngs=nnx.Rngs(0)), rng)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    noisy, clean = normal(rng, 32, 32, 32, 3), normal(rng, 32, 32, 32, 3)

    def step(model, optimizer, noisy, clean):
        def loss(model):
            return jnp.square(model(noisy) - clean).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, noisy, clean)


def _convolve(x: jax.Array, kernel: jax.Array, strides: int = 1) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (strides, strides), "SAME", dimension_numbers=dimensions
    )


def make_autoencoder():
    """A plain convolutional autoencoder: strided convolutions, then ``lax.conv_transpose``."""
    rng = random_numbers(0)
    widths = [3, 24, 48]
    pairs = list(itertools.pairwise(widths))

    def kernel(inputs, outputs):
        return weight(rng, 3, 3, inputs, outputs) / 3

    params = {
        "down": [kernel(i, o) for i, o in pairs],
        "up": [kernel(o, i) for i, o in reversed(pairs)],
    }

    def loss(params, images):
        x = images
        for k in params["down"]:
            x = jax.nn.relu(layer_norm(_convolve(x, k, 2)))
        for k in params["up"]:
            x = jax.lax.conv_transpose(
                jax.nn.relu(x), k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = layer_norm(x) if k.shape[-1] > 3 else x
        return optax.squared_error(x, images).mean()

    return train_step(loss, ADAM), (params, ADAM.init(params), normal(rng, 96, 32, 32, 3))


PROBLEMS = [
    Problem("conv_linen", make_linen_conv, (0,), frozenset({"linen", "conv", "batch_stats"})),
    Problem(
        "conv_nnx",
        make_nnx_conv,
        (0, 1),
        frozenset({"nnx", "conv", "batch_stats", "dropout", "keys"}),
    ),
    Problem("unet_nnx", make_unet, (0, 1), frozenset({"nnx", "conv", "skip", "conv_transpose"})),
    plain("autoencoder", make_autoencoder, "conv", "conv_transpose"),
]
