"""A mixture of experts under ``shard_map``, with collectives, on as many devices as given."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .problem import (
    ADAM,
    Problem,
    integers,
    layer_norm,
    normal,
    plain,
    random_numbers,
    train_step,
    weight,
)
from .problem import cross_entropy as token_loss

WIDTH, EXPERTS, TOKENS, LAYERS, CLASSES = 64, 4, 1024, 3, 16


def _experts(weights: dict, x: jax.Array) -> jax.Array:
    """Dispatch to this device's experts by all-to-all; ``x`` is ``[tokens / devices, width]``."""
    gates = jax.nn.softmax(x @ weights["router"])
    chosen = jnp.argmax(gates, -1)
    capacity = 2 * x.shape[0] // EXPERTS
    one_hot = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)
    place = (jnp.cumsum(one_hot, 0) - 1) * one_hot
    slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity, dtype=x.dtype)
    dispatch = jnp.einsum("te,tc->tec", one_hot, slot)

    sent = jnp.einsum("tec,td->ecd", dispatch, x)
    received = jax.lax.all_to_all(sent, "expert", split_axis=0, concat_axis=1, tiled=True)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edh->ech", received, weights["up"]))
    done = jnp.einsum("ech,ehd->ecd", hidden, weights["down"])
    returned = jax.lax.all_to_all(done, "expert", split_axis=1, concat_axis=0, tiled=True)
    return jnp.einsum("tec,te,ecd->td", dispatch, gates, returned)


def _net(params: dict, x: jax.Array, labels: jax.Array) -> jax.Array:
    for weights in params["layers"]:
        x = x + _experts(weights, layer_norm(x))
    return jax.lax.pmean(token_loss(layer_norm(x) @ params["head"], labels), "expert")


def make_experts(devices: Sequence[jax.Device] | None = None):
    """Experts and tokens sharded over ``devices``; by default over the first device alone."""
    devices = jax.devices()[:1] if devices is None else devices
    mesh = Mesh(np.asarray(devices), ("expert",))
    rng = random_numbers(0)
    layers = [
        {
            "router": weight(rng, WIDTH, EXPERTS),
            "up": weight(rng, EXPERTS, WIDTH, 4 * WIDTH),
            "down": weight(rng, EXPERTS, 4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    params = {"layers": layers, "head": weight(rng, WIDTH, CLASSES)}
    split = {"router": P(), "up": P("expert"), "down": P("expert")}
    specs = {"layers": [split] * LAYERS, "head": P()}
    loss = jax.shard_map(_net, mesh=mesh, in_specs=(specs, P("expert"), P("expert")), out_specs=P())
    x, labels = normal(rng, TOKENS, WIDTH), integers(rng, CLASSES, TOKENS)
    return train_step(loss, ADAM), (params, ADAM.init(params), x, labels)


def make_data_parallel():
    """The whole gradient inside ``shard_map``, averaged by an explicit ``psum``."""
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    rng = random_numbers(0)
    params = {"layers": [weight(rng, WIDTH, WIDTH) for _ in range(12)]}
    data = normal(rng, 2048, WIDTH), normal(rng, 2048, WIDTH)

    def loss(params, x, y):
        for w in params["layers"]:
            x = x + jnp.tanh(layer_norm(x) @ w)
        return jnp.square(x - y).mean()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=(P(), P()),
        check_vma=False,
    )
    def gradient(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.lax.pmean(value, "data"), jax.lax.pmean(grads, "data")

    def step(params, opt_state, x, y):
        value, grads = gradient(params, x, y)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return jax.tree.map(jnp.add, params, updates), opt_state, value

    return step, (params, ADAM.init(params), *data)


PROBLEMS: list[Problem] = [
    plain("experts", make_experts, "shard_map", "collectives", "moe"),
    plain("data_parallel", make_data_parallel, "shard_map", "collectives", "opaque_gradient"),
]
