"""Fitted steps of states laid out over eight devices; prints what holds. See test_sharding.py.

    python tests/state/sharded_steps.py NET RULES

Both as named below. What a device has is read from the compiler, here and for eight absent GPUs.
"""

from __future__ import annotations

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem

WIDTH, LAYERS, DEVICES = 256, 4, 8
TX = optax.adam(1e-2, eps=1e-3)
RULES = {
    "zero1": "zero1",
    "zero3": "zero3",
    "tp": {"*up*": PartitionSpec(None, None, "model"), "*down*": PartitionSpec(None, "model")},
}
RULES["tp and zero1"] = [RULES["tp"], "zero1"]
RULES["tp and zero3"] = [RULES["tp"], "zero3"]


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"]


def unrolled(params, x):
    for n in range(LAYERS):
        x = layer(x, jax.tree.map(lambda a, n=n: a[n], params))
    return (x**2).mean()


def scanned(params, x):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0] ** 2).mean()


def dropping(params, x):
    """With random numbers, and one layer that is checkpointed by hand."""
    keys = jax.random.split(jax.random.key(3), LAYERS)
    for n in range(LAYERS):
        kept = jax.random.bernoulli(keys[n], 0.9, x.shape)
        own = jax.tree.map(lambda a, n=n: a[n], params)
        x = jnp.where(kept, (jax.checkpoint(layer) if n == 1 else layer)(x, own), x)
    return (x**2).mean()


NETS = {net.__name__: net for net in (unrolled, scanned, dropping)}


def first_state():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) / 16,
        "down": jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) / 32,
        "bias": jnp.zeros((LAYERS, WIDTH)),
    }
    return {"params": params, "opt_state": TX.init(params)}


def step_of(net):
    """A step that gives its gradients, too."""

    def step(state, x):
        loss, grads = jax.value_and_grad(net)(state["params"], x)
        updates, opt = TX.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt}, (loss, grads)

    return step


def parts(tree, shardings) -> int:
    """Bytes of a tree on each device."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return sum(int(np.prod(s.shard_shape(a.shape))) * a.dtype.itemsize for a, s in pairs)


def close(found, expected) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def tight(step, roomy, state, x):
    """The step in the first of a few budgets in which something is computed again."""
    temp_bytes = roomy.compiled_bytes - laid_out(roomy)
    for share in (0.6, 0.7, 0.8, 0.9):
        budget = laid_out(roomy) + int(temp_bytes * share)
        fitted = jaxmem.fit(step, budget=budget, donate_argnums=0, progress=False)
        try:
            if fitted.plan(state, x).recomputed():
                return fitted
        except jaxmem.BudgetInfeasibleError:
            continue
    raise AssertionError("nothing was to be computed again")


def laid_out(plan) -> int:
    """Bytes of arguments and results."""
    return plan.argument_bytes + plan.output_bytes - plan.aliased_bytes


def main(net: str, rules: str) -> None:
    warnings.simplefilter("error")
    shape = ((4, 2), ("data", "model")) if "tp" in rules else ((8,), ("data",))
    mesh = jax.make_mesh(*shape, axis_types=(AxisType.Auto,) * len(shape[0]))
    step, state = step_of(NETS[net]), jax.tree.map(np.asarray, first_state())
    batch = np.asarray(jax.random.normal(jax.random.key(1), (4096, WIDTH)))
    laid = jaxmem.shard(state, mesh, RULES[rules])
    split = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(batch, split)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, laid.shardings
    )
    roomy = jaxmem.fit(step, donate_argnums=0, progress=False).plan(abstract, x)
    fitted = tight(step, roomy, abstract, x)
    plan = fitted.plan(abstract, x)
    assert plan.compiled_bytes <= plan.budget_bytes < roomy.compiled_bytes
    mine, theirs = jax.device_put(state, laid.shardings), state
    for _ in range(3):
        mine, (loss, grads) = fitted(mine, x)
        theirs, expected = jax.jit(step)(theirs, batch)
        close((mine, loss, grads), (theirs, *expected))
        for array, layout in zip(
            jax.tree.leaves(mine), jax.tree.leaves(laid.shardings), strict=True
        ):
            assert array.sharding.is_equivalent_to(layout, array.ndim), (array.sharding, layout)
    assert len(fitted._steps) == 1, "the next step is another program"
    for_gpus = jaxmem.fit(step, donate_argnums=0, target="8xh200", progress=False)
    for one in (plan, roomy, for_gpus.plan(abstract, x)):
        memory = one.argument_bytes - x.nbytes // mesh.shape["data"]
        assert memory == laid.device_bytes, (memory, laid.device_bytes)
        assert one.aliased_bytes >= laid.device_bytes * 0.999
        given = one.output_bytes - laid.device_bytes
        whole = sum(a.nbytes for a in jax.tree.leaves(state))
        params = sum(a.nbytes for a in jax.tree.leaves(state["params"]))
        moments = laid.device_bytes - parts(state["params"], laid.shardings["params"])
        if rules == "zero3":
            assert memory <= whole / DEVICES * 1.05
            assert given <= params / DEVICES * 1.05, (given, params)
        if rules == "zero1":
            assert moments <= (whole - params) / DEVICES * 1.05
    print("held")


if __name__ == "__main__":
    main(*sys.argv[1:])
