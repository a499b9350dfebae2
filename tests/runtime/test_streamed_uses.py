"""What ``host=`` takes and refuses, and how it works with libraries and odd results."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import CutError
from tests.streamed_steps import (
    MIB,
    OPTIMIZERS,
    WIDTH,
    X,
    fitted,
    kinds,
    same,
    state_with,
    step_with,
)

ADAM = OPTIMIZERS["adam"]


# --- wrong uses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"host": "state[2]*"}, jaxmem.ArgumentError, "less than 1.0MiB"),
        ({"host": "*.momemts*"}, jaxmem.ArgumentError, "matches no argument"),
        ({"host": 3}, jaxmem.ArgumentError, "patterns of argument paths"),
        ({"host": []}, jaxmem.ArgumentError, "patterns of argument paths"),
        ({"host": ["state[1]*", ""]}, jaxmem.ArgumentError, "patterns of argument paths"),
        ({"measure": True}, jaxmem.ArgumentError, "not timed yet"),
        ({"target": "cpu"}, jaxmem.ArgumentError, "computes in host memory"),
        ({"donate_argnums": ()}, CutError, "it is not donated"),
        ({"host_budget": "4MiB"}, jaxmem.BudgetError, "in host memory"),
        ({"host_budget": 0}, jaxmem.BudgetError, "in host memory"),
    ],
)
def test_wrong_uses_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        fitted(step_with(ADAM), **options).plan(state_with(ADAM), X)


def test_a_pattern_that_matches_nothing_is_told_what_there_is():
    with pytest.raises(jaxmem.ArgumentError, match=r"state\[1\]\[0\].nu\['w0'\]"):
        fitted(step_with(ADAM), host="state[1][0].nv['w0']").plan(state_with(ADAM), X)


def test_a_plan_and_patterns_exclude_each_other():
    plan = fitted(step_with(ADAM)).plan(state_with(ADAM), X)
    with pytest.raises(jaxmem.ArgumentError, match="a plan has decided"):
        fitted(step_with(ADAM), plan=plan)


def test_a_number_of_microbatches_that_is_to_be_chosen_is_refused():
    def step(state, x):
        w, m = state
        grads = jaxmem.accumulate(jax.grad(lambda w, x: ((x @ w) ** 2).mean()), jaxmem.AUTO)(w, x)
        m = 0.9 * m + grads
        return w - m, m

    big = jnp.zeros((WIDTH, WIDTH))
    with pytest.raises(jaxmem.ArgumentError, match=r"jaxmem.AUTO"):
        fitted(step).plan((big, big), X)


REPLICATED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jaxmem
from tests.streamed_steps import OPTIMIZERS, X, fitted, same, state_with, step_with
tx = OPTIMIZERS["adam"]
everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
expected = jax.jit(step_with(tx))(state_with(tx), X)
run = fitted(step_with(tx), target="2xh200")
found = run(*jax.device_put((state_with(tx), X), everywhere))
same(found, expected)
kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found[0]) if leaf.ndim == 2}
print(sorted(kinds), len(found[1].sharding.device_set))
"""


def test_a_state_that_two_devices_hold_whole_streams_too():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", REPLICATED],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "pinned_host" in found.stdout, found.stdout
    assert found.stdout.strip().endswith("] 2"), found.stdout


def test_results_that_are_constants_arguments_or_the_same_value_come_back():
    def step(state, x):
        m = 0.9 * state["m"] + x.sum()
        return {"m": m, "w": state["w"] - m}, {"one": 1.0, "x": x, "w": state["w"] - m, "u": x + 1}

    def fresh():
        return {"m": jnp.ones((WIDTH, WIDTH)), "w": jnp.ones((WIDTH, WIDTH))}

    run = fitted(step, host="state['m']")
    found, expected = run(fresh(), X), jax.jit(step)(fresh(), X)
    same(found, expected)
    assert found[0]["w"] is not found[1]["w"]


def test_leaves_that_do_not_change_or_are_made_anew_stay_on_the_host():
    def step(state, x):
        return {"same": state["same"], "new": jnp.zeros_like(state["new"]) + x.sum()}, x.sum()

    def fresh():
        return {"same": jnp.ones((WIDTH, WIDTH)), "new": jnp.ones((WIDTH, WIDTH))}

    run = fitted(step, host="state*")
    state = run.place(fresh(), X)[0]
    for _ in range(2):
        state, _ = run(state, X)
        assert kinds(state) == ["pinned_host"] * 2
    same(state, jax.jit(step)(fresh(), X)[0])


@pytest.mark.parametrize("host", ["anchor*", ["anchor*", "state[1]*"], "*"])
def test_leaves_that_only_updates_read_stay_as_they_are(host):
    """Weights decay towards others, as in fine-tuning."""
    optimizer_step = step_with(ADAM)

    def step(state, anchor, x):
        (params, *rest), loss = optimizer_step(state, x)
        params = {name: w - 0.1 * (w - anchor[name]) for name, w in params.items()}
        return (params, *rest), loss

    def fresh():
        anchor = {name: w + 1 for name, w in state_with(ADAM)[0].items()}
        return state_with(ADAM), anchor, X

    run = fitted(step, host=host, budget="30MiB")
    state, anchor, x = run.place(*fresh())
    assert kinds([w for w in anchor.values() if w.nbytes >= MIB]) == ["pinned_host"] * 3
    expected = fresh()[0]
    for _ in range(2):
        state, loss = run(state, anchor, x)
        expected, wanted = jax.jit(step)(expected, fresh()[1], X)
        same((state, loss), (expected, wanted))
    same(anchor, fresh()[1])


def test_what_is_made_anew_and_not_donated_is_refused():
    def step(moments, params, x):
        state, loss = step_with(ADAM)((params, *moments), x)
        return state[1:], state[0], loss

    params, *moments = state_with(ADAM)
    with pytest.raises(CutError, match=r"moments\[0\]\[0\].mu.*it is not donated"):
        fitted(step, host="moments*", donate_argnums=1).plan(moments, params, X)


# --- libraries ----------------------------------------------------------------------------------


def test_an_nnx_optimizer_waits_in_host_memory():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + jnp.tanh(layer(x))
            return x

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def made():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    run = fitted(step, donate_argnums=(0, 1), host="optimizer*opt_state*")
    model, optimizer = made()
    run.place(model, optimizer, X)
    expected = made()
    for _ in range(2):
        loss = run(model, optimizer, X)
        reference = nnx.jit(step)(*expected, X)
        np.testing.assert_allclose(loss, reference, rtol=1e-5)
    leaves = jax.tree.leaves(nnx.state(optimizer))
    assert [a.sharding.memory_kind for a in leaves if a.nbytes >= MIB] == ["pinned_host"] * 6
    same(nnx.state((model, optimizer)), nnx.state(expected))


def test_a_linen_train_state_waits_in_host_memory():
    linen = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    def step(state, x):
        def loss_fn(params):
            return (state.apply_fn({"params": params}, x) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    net = linen.Sequential([linen.Dense(WIDTH), jnp.tanh, linen.Dense(WIDTH)])
    params = net.init(jax.random.key(0), X)["params"]

    def made():
        copied = jax.tree.map(jnp.copy, params)
        return train_state.TrainState.create(apply_fn=net.apply, params=copied, tx=ADAM)

    run = fitted(step, host="*.opt_state*")
    state = run.place(made(), X)[0]
    found, expected = run(state, X), jax.jit(step)(made(), X)
    assert kinds(found[0].opt_state).count("pinned_host") == 4
    same(found, expected)
