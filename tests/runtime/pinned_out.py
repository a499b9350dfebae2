"""Pinned host memory that runs out in the middle of a step, on a GPU.

    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=8 python tests/runtime/pinned_out.py ROOM_BYTES

A ballast takes all that may be pinned but room for a few leaves, so copies back to the host fail
between updates. The step must say so, complete once there is room, and give what it would have.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

import jaxmem
from jaxmem.errors import StepInterruptedError

LAYERS, WIDTH = 24, 4096
TX = optax.adam(1e-4)


def net(params: dict, x: jax.Array) -> jax.Array:
    for w in params.values():
        x = x + jnp.tanh(x @ w)
    return (x**2).mean()


def step(state, x):
    params, moments = state
    loss, grads = jax.value_and_grad(net)(params, x)
    updates, moments = TX.update(grads, moments)
    return (optax.apply_updates(params, updates), moments), loss


def state_of() -> tuple:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {f"w{n:02d}": jax.random.normal(k, (WIDTH, WIDTH)) * 0.01 for n, k in enumerate(keys)}
    return params, TX.init(params)


def filled(room_bytes: int) -> list[jax.Array]:
    """Pinned arrays that take all there is but about ``room_bytes``."""
    there = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    ballast, size = [], 2**32
    while size >= 2**24:
        try:
            ballast.append(jax.block_until_ready(jax.device_put(np.empty(size, np.uint8), there)))
        except jax.errors.JaxRuntimeError:
            size //= 2
    while room_bytes > 0 and ballast:
        room_bytes -= ballast.pop().nbytes
    gc.collect()
    return ballast


def run(room_bytes: int) -> dict:
    """What was seen: how the step failed, and whether it came out right in the end."""
    x = jax.random.normal(jax.random.key(1), (512, WIDTH))
    plain = jax.jit(step)
    expected = state_of()
    for _ in range(2):
        expected, loss = plain(expected, x)
    expected = jax.device_get(expected)
    fitted = jaxmem.fit(step, budget="16GiB", host="state[1]*", donate_argnums=0, progress=False)
    state = fitted.place(state_of(), x)[0]
    state, _ = fitted(state, x)
    jax.block_until_ready(state)
    ballast = filled(room_bytes)
    held = sum(a.nbytes for a in ballast)
    found: dict = {"ballast_bytes": held, "error": None, "warned": []}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, mine = fitted(state, x)
        found["warned"] = [str(one.message) for one in caught]
    except StepInterruptedError as error:
        found["error"] = str(error)
        with contextlib.suppress(StepInterruptedError):
            error.resume()
            found["resumed_without_room"] = True
        for array in ballast:
            array.delete()
        state, mine = error.resume()
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    worst = max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs)
    found |= {"largest_difference": worst, "losses": [float(mine), float(loss)]}
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(state[1]) if a.nbytes > 2**20}
    return found | {"moments_in": sorted(kinds)}


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1])), indent=1))
