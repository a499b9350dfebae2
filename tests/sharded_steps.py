"""Steps over four CPU devices; run by test_sharded.py in a process that has them.

Prints one line for every check that holds and ends with an error at the first that does not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxmem

X = jax.random.normal(jax.random.key(9), (1024, 64))
W = [jax.random.normal(jax.random.key(i), (64, 64)) / 8 for i in range(8)]


def loss(ws, x):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return (x**2).mean()


def step(ws, x):
    return jax.tree.map(lambda a, g: a - 0.1 * g, ws, jax.grad(loss)(ws, x))


def mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh((4,), ("d",), axis_types=(axis_type,))


def total_bytes(function: Callable, *args) -> int:
    memory = jax.jit(function).lower(*args).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def same(expected, found) -> None:
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


def keys_and_one_device() -> None:
    """Typed keys on other devices, and meshes of one device, are signatures of their own."""

    def draw(key):
        return jax.random.normal(key, (4,))

    key = jax.random.key(0)
    keys = [key, jax.device_put(key, jax.devices()[1])]
    for order in (keys, keys[::-1]):
        fitted = jaxmem.fit(draw, progress=False)
        for each in order:
            same(jax.jit(draw)(each), fitted(each))
    alone = Mesh(np.array(jax.devices()[:1]), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones(4), NamedSharding(alone, PartitionSpec("d")))
    fitted = jaxmem.fit(jnp.sin, progress=False)
    for each in (jnp.ones(4), x):
        assert fitted(each).sharding == jax.jit(jnp.sin)(each).sharding


def nothing_temporary() -> None:
    """A step without temporaries on any device has no plan smaller than itself."""
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh(AxisType.Auto), PartitionSpec("d")))
    step = jax.grad(lambda x: jnp.sin(jnp.cos(x)).sum())
    try:
        jaxmem.plan(step, x, budget=6000, progress=False)
    except jaxmem.BudgetInfeasibleError as error:
        assert error.smallest_bytes <= total_bytes(step, x)
    else:
        raise AssertionError("6000 bytes hold a quarter of two arrays of 16384")


def data_parallel(axis_type: AxisType) -> None:
    """A budget of each device's bytes, results laid out as under jit."""
    over = mesh(axis_type)
    ws = jax.device_put(W, NamedSharding(over, PartitionSpec()))
    x = jax.device_put(X, NamedSharding(over, PartitionSpec("d")))
    budget = int(0.7 * total_bytes(step, ws, x))
    fitted = jaxmem.fit(step, budget=budget, progress=False)
    same(jax.jit(step)(ws, x), fitted(ws, x))
    plan = fitted.plan(ws, x)
    assert plan.recomputed()
    assert plan.compiled_bytes <= budget
    assert 0.8 < plan.predicted_bytes / plan.compiled_bytes < 1.25


def scanned(axis_type: AxisType) -> None:
    """What loops stack lies on the mesh as its rows do; six layers are not split over four."""
    over = mesh(axis_type)
    ws = jax.device_put(jnp.stack(W[:6]), NamedSharding(over, PartitionSpec()))
    x = jax.device_put(X, NamedSharding(over, PartitionSpec("d")))

    def layer(x, w):
        for _ in range(3):
            x = x + jnp.tanh(x @ w)
        return x, None

    def scan_step(ws, x):
        return ws - 0.1 * jax.grad(lambda ws: (jax.lax.scan(layer, x, ws)[0] ** 2).mean())(ws)

    budget = int(0.7 * total_bytes(scan_step, ws, x))
    fitted = jaxmem.fit(scan_step, budget=budget, progress=False)
    same(jax.jit(scan_step)(ws, x), fitted(ws, x))
    assert fitted.plan(ws, x).recomputed()


def accumulated(axis_type: AxisType) -> None:
    """Every microbatch has rows of every device, so none moves; AUTO keeps it so."""
    over = mesh(axis_type)
    ws = jax.device_put(W, NamedSharding(over, PartitionSpec()))
    x = jax.device_put(X, NamedSharding(over, PartitionSpec("d")))

    def rows(ws, x):
        return loss(ws, x), (x**2).sum(1)

    grad = jax.value_and_grad(rows, has_aux=True)
    whole, four = jax.jit(grad), jax.jit(jaxmem.accumulate(grad, 4))
    same(whole(ws, x), four(ws, x))
    moving = re.compile(r"= \S+ (all-gather|all-to-all|collective-permute)\(")
    assert not moving.search(four.lower(ws, x).compile().as_text())

    split = jax.device_put(W, NamedSharding(over, PartitionSpec(None, "d")))
    columns = jax.value_and_grad(lambda w, x: (jnp.tanh(x) ** 2).sum() * (w**2).sum())
    several = jaxmem.accumulate(columns, 4, reduce=("mean", "sum"), dtype=jnp.float32)
    (_, grads), (_, expected) = jax.jit(several)(split[0], x), jax.jit(columns)(split[0], x)
    same(expected, grads)

    def train(ws, x):
        grads = jaxmem.accumulate(jax.grad(loss), jaxmem.AUTO)(ws, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, ws, grads)

    budget = int(0.5 * total_bytes(step, ws, x))
    fitted = jaxmem.fit(train, budget=budget, progress=False)
    same(jax.jit(step)(ws, x), fitted(ws, x))
    plan = fitted.plan(ws, x)
    assert plan.microbatches > 1
    assert 256 % plan.microbatches == 0
    assert plan.compiled_bytes <= budget


def rows_of_each_device() -> None:
    """Twelve rows over four devices are three each, which two microbatches cannot share."""
    x = jax.device_put(X[:12], NamedSharding(mesh(AxisType.Explicit), PartitionSpec("d")))
    try:
        jaxmem.accumulate(jax.grad(loss), 2)(W, x)
    except jaxmem.MicrobatchError as error:
        assert "has 3 of its 12 rows on each device" in str(error), error
    else:
        raise AssertionError("a row was on two devices")


def too_small_names_a_budget_that_works() -> None:
    over = mesh(AxisType.Auto)
    args = jax.device_put(W, NamedSharding(over, PartitionSpec())), X
    try:
        jaxmem.plan(step, *args, budget="300KiB", progress=False)
    except jaxmem.BudgetInfeasibleError as error:
        plan = jaxmem.plan(step, *args, budget=error.smallest_bytes, progress=False)
        assert plan.compiled_bytes <= error.smallest_bytes
    else:
        raise AssertionError("300 KiB were enough")


def fully_sharded_state() -> None:
    """Parameters of 4 MiB over four devices are 1 MiB on each."""
    params = [jnp.zeros((512, 1024))] * 2
    params = jax.device_put(params, NamedSharding(mesh(AxisType.Auto), PartitionSpec("d")))

    def decay(params):
        return jax.tree.map(lambda p: p * 0.9, params)

    fitted = jaxmem.fit(decay, budget="1.5MiB", donate_argnums=0, progress=False)
    assert fitted.plan(params).argument_bytes == 2**20
    assert fitted(params)[0].sharding.spec == PartitionSpec("d")


def measured() -> None:
    """Programs are timed over all devices, on copies and on zeros laid out like the arguments."""
    over = mesh(AxisType.Auto)
    # Replicated arrays share a buffer with what they were made from, and these are donated.
    ws = jax.device_put([w.copy() for w in W], NamedSharding(over, PartitionSpec()))
    x = jax.device_put(X, NamedSharding(over, PartitionSpec("d")))
    budget = int(0.7 * total_bytes(step, ws, x))
    options = {"budget": budget, "donate_argnums": 0, "measure": True, "progress": False}
    fitted = jaxmem.fit(step, **options)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in (*ws, x)]
    for args in ((ws, x), (shapes[:-1], shapes[-1])):
        plan = jaxmem.fit(step, **options).plan(*args)
        times = [r.measured_seconds for r in plan.rounds if r.measured_seconds is not None]
        assert plan.measured_seconds == min(times)
        assert plan.compiled_bytes <= budget
    expected = jax.jit(step)(ws, x)
    same(expected, fitted(ws, x))


def jitted_with_shardings() -> None:
    """The shardings a jitted step was made with are kept, and what is inside is planned."""
    over = mesh(AxisType.Auto)
    whole, rows = NamedSharding(over, PartitionSpec()), NamedSharding(over, PartitionSpec("d"))
    jitted = jax.jit(step, in_shardings=([whole] * 8, rows), out_shardings=[whole] * 8)
    budget = int(0.8 * total_bytes(jitted, W, X))
    fitted = jaxmem.fit(jitted, budget=budget, progress=False)
    same(jitted(W, X), fitted(W, X))
    assert fitted.plan(W, X).recomputed()


def another_device() -> None:
    """An array that was put on a device is used there; one per device, one program each."""
    fitted = jaxmem.fit(lambda x: x * 2, budget="1MiB", progress=False)
    for device in jax.devices()[:2]:
        x = jax.device_put(X, device)
        same(jax.jit(lambda x: x * 2)(x), fitted(x))


def ambient_mesh() -> None:
    """The mesh that is set when a step is called is part of what it means."""

    def constrain(x):
        return jax.lax.with_sharding_constraint(x, PartitionSpec("d"))

    fitted = jaxmem.fit(constrain, budget="8MiB", progress=False)
    for size in (4, 2):
        over = Mesh(np.array(jax.devices()[:size]), ("d",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(over):
            same(jax.jit(constrain)(X), fitted(X))


CHECKS = {
    "data parallel": lambda: data_parallel(AxisType.Auto),
    "explicit axes": lambda: data_parallel(AxisType.Explicit),
    "scanned": lambda: scanned(AxisType.Auto),
    "scanned, explicit axes": lambda: scanned(AxisType.Explicit),
    "accumulated": lambda: accumulated(AxisType.Auto),
    "accumulated, explicit axes": lambda: accumulated(AxisType.Explicit),
    "rows of each device": rows_of_each_device,
    "too small": too_small_names_a_budget_that_works,
    "fully sharded": fully_sharded_state,
    "jitted with shardings": jitted_with_shardings,
    "measured": measured,
    "another device": another_device,
    "ambient mesh": ambient_mesh,
    "keys and one device": keys_and_one_device,
    "nothing temporary": nothing_temporary,
}

if __name__ == "__main__":
    for name, check in CHECKS.items():
        check()
        print(name)
