"""Train steps whose optimizer state may wait in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxmem
from jaxmem.errors import StepInterruptedError
from jaxmem.runtime import room, stream, streamed, timeline

WIDTH, LAYERS, MIB = 512, 3, 2**20
X = jnp.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)

# Each leaf of moments is 1 MiB, the least that is worth a copy.
OPTIMIZERS = {
    "adam": optax.adam(1e-2, eps=1e-3),
    "adamw with a mask": optax.adamw(
        1e-2, eps=1e-3, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p)
    ),
    "clipped gradients": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-3)),
    "clipped updates": optax.chain(
        optax.scale_by_adam(eps=1e-3), optax.clip_by_global_norm(0.1), optax.scale(-1e-2)
    ),
    "clipped twice": optax.chain(
        optax.scale_by_adam(eps=1e-3),
        optax.clip_by_global_norm(0.1),
        optax.trace(0.9),
        optax.clip_by_global_norm(0.01),
        optax.scale(-1.0),
    ),
    "scheduled": optax.adam(optax.cosine_decay_schedule(1e-2, 10), eps=1e-3),
    "averaged": optax.chain(optax.adam(1e-2, eps=1e-3), optax.ema(0.9)),
    "several": optax.multi_transform(
        {"a": optax.adam(1e-2, eps=1e-3), "b": optax.sgd(1e-2, momentum=0.9)},
        lambda p: {k: "a" if k.startswith("w") else "b" for k in p},
    ),
    "adafactor": optax.adafactor(1e-2, momentum=0.9),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-2, eps=1e-3),
    "muon": optax.contrib.muon(1e-2),
    "noise": optax.chain(optax.adam(1e-2, eps=1e-3), optax.add_noise(0.1, 0.5, 0)),
    "bfloat16 moments": optax.adam(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16),
    "only if finite": optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), 3),
    "several steps": optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2),
}
# All of them on one Python; on the other those that differ most in how they are cut.
SPREAD = [
    name
    if name in {"adam", "clipped twice", "several", "muon"}
    else pytest.param(name, marks=pytest.mark.wide)
    for name in OPTIMIZERS
]


def net(params, x):
    """The mean square of ``x`` [rows, WIDTH] after residual layers with biases."""
    for n in range(len(params) // 2):
        x = x + jnp.tanh(x @ params[f"w{n}"] + params[f"b{n}"])
    return (x**2).mean()


def step_with(tx, *, norm=False):
    """A train step of ``(params, optimizer state, count)``; with ``norm`` it tells its updates'."""

    def step(state, x):
        params, moments, count = state
        loss, grads = jax.value_and_grad(net)(params, x)
        updates, moments = tx.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        state = (params, moments, count + 1)
        return state, {"loss": loss, "norm": optax.tree.norm(updates)} if norm else loss

    return step


def step_of(net, tx):
    """A train step of ``(params, optimizer state)`` for a net that gives a loss."""

    def step(state, x):
        params, moments = state
        loss, grads = jax.value_and_grad(net)(params, x)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return step


def state_with(tx, layers=LAYERS, width=WIDTH):
    """Its first state."""
    params = {}
    for n in range(layers):
        params[f"w{n}"] = jax.random.normal(jax.random.key(n), (width, width)) * 0.05
        params[f"b{n}"] = jnp.zeros(width)
    return params, tx.init(params), jnp.int32(0)


@contextlib.contextmanager
def in_small_buckets(*, python_seconds: float | None = None) -> Iterator[None]:
    """What is fetched at once is 1/32 of what it is for nets of a useful size; leaves are whole.

    Args:
        python_seconds: what Python takes for a part of a step on paper; ``None`` for what it does.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streamed, "_BUCKET_BYTES", 2 * MIB)
        patched.setattr(room, "_WINDOW_BYTES", 8 * MIB)
        patched.setattr(streamed, "_WHOLE_SHARE", 1)
        if python_seconds is not None:
            patched.setattr(timeline, "_PYTHON_SECONDS", python_seconds)
        yield


def on_device(tree):
    """The arrays of ``tree`` where they can be computed with."""
    return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device), tree)


def fitted(step, **options):
    """``step`` with what is in its optimizer's state in host memory, planned for an H200."""
    settings = {"target": "h200", "donate_argnums": 0, "host": "state[1]*", "progress": False}
    return jaxmem.fit(step, **{**settings, **options})


def same(found, expected, rtol=3e-5):
    """Assert that two trees hold the same numbers but for the order of sums."""
    for a, b in zip(jax.tree.leaves(on_device(found)), jax.tree.leaves(expected), strict=True):
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=3e-5)


def kinds(state):
    """In which memory each leaf is."""
    return [a.sharding.memory_kind for a in jax.tree.leaves(state)]


def failing(run, args, times: int, where: str, monkeypatch):
    """The results of a step in which a part that goes by rows fails once, or twice and is resumed.

    Args:
        run: a fitted step, and ``args`` what it is called with.
        times: how often.
        where: what the error of a second failure names.
        monkeypatch: pytest's.
    """
    real, left = stream.Run._run, [times]

    def fails(self, item, alone):
        if item.part.chunks and left[0]:
            left[0] -= 1
            raise RuntimeError("RESOURCE_EXHAUSTED: injected")
        return real(self, item, alone)

    monkeypatch.setattr(stream.Run, "_run", fails)
    if times == 1:
        with pytest.warns(UserWarning, match="worked with nothing else under way"):
            return run(*args)
    with pytest.raises(StepInterruptedError, match=where) as raised:
        run(*args)
    return raised.value.resume()
