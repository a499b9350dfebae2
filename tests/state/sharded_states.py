"""States laid out over eight CPU devices; prints what holds. See test_sharding.py."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jaxmem

WIDTH = 256


def net(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"]
    return (x**2).mean()


def first_state(tx):
    keys = jax.random.split(jax.random.key(0), 4)
    params = [
        {
            "up": jax.random.normal(key, (WIDTH, 4 * WIDTH)) / 16,
            "down": jax.random.normal(key, (4 * WIDTH, WIDTH)) / 32,
            "bias": jnp.zeros(WIDTH),
        }
        for key in keys
    ]
    return {"params": params, "opt_state": tx.init(params)}


def main() -> None:
    warnings.simplefilter("error")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = optax.adam(1e-2, eps=1e-3)
    state, x = first_state(tx), jax.random.normal(jax.random.key(1), (16, WIDTH))

    def step(state, x):
        loss, grads = jax.value_and_grad(net)(state["params"], x)
        updates, opt = tx.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt}, loss

    expected, expected_loss = jax.jit(step)(state, x)
    tp = {"*up*": PartitionSpec(None, "model"), "*down*": PartitionSpec("model")}
    for rules in ("fsdp", "zero3", "zero1", tp, [tp, "fsdp"], [tp, "zero1"]):
        found = jaxmem.shard(state, mesh, rules)
        placed = jax.device_put(state, found.shardings)
        for leaf, array in zip(found.leaves, jax.tree.leaves(placed), strict=True):
            for shard in array.addressable_shards:
                assert shard.data.nbytes == leaf.device_bytes, leaf
        held = dict.fromkeys(mesh.devices.flat, 0)
        for array in jax.tree.leaves(placed):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        assert set(held.values()) == {found.device_bytes}
        run = jax.jit(step, out_shardings=(found.shardings, None))
        after, loss = run(placed, x)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    print("what is said is what each device has, and steps compute the same: holds")

    hosted = jaxmem.shard(state, mesh, "fsdp", host="*opt_state*")
    placed = jax.device_put(state, hosted.shardings)
    away = [a for a in jax.tree.leaves(placed) if a.sharding.memory_kind == "pinned_host"]
    assert len(away) == 16, len(away)
    assert hosted.host_bytes == sum(a.addressable_shards[0].data.nbytes for a in away)
    print("host= puts leaves into pinned memory, split: holds")

    model = nnx.Linear(WIDTH, 4 * WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    found = jaxmem.shard((model, optimizer), mesh, "zero1")
    for thing, shardings in zip((model, optimizer), found.shardings, strict=True):
        nnx.update(thing, jax.device_put(nnx.state(thing), shardings))
    assert model.kernel[...].sharding.is_fully_replicated
    mu = optimizer.opt_state[0].mu["kernel"][...]
    assert mu.addressable_shards[0].data.nbytes * 4 == mu.nbytes
    print("NNX objects: holds")

    dense = nn.Dense(
        4 * WIDTH,
        kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")),
    )
    variables = dense.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    logical = {"embed": "data", "mlp": "model"}
    found = jaxmem.shard(variables, mesh, logical=logical)
    placed = jax.device_put(variables, found.shardings)
    kernel = placed["params"]["kernel"].value
    assert kernel.sharding.spec == PartitionSpec("data", "model"), kernel.sharding
    print("Linen's logical axes: holds")


if __name__ == "__main__":
    main()
