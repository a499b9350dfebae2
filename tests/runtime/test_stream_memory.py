"""No stream ever takes more than its budget, however slow the link: on a device on paper."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.runtime import streamplan
from jaxmem.runtime.rehearsal import rehearsed
from tests.streamed_steps import MIB, OPTIMIZERS, X, in_small_buckets, net, state_with, step_with

pytestmark = pytest.mark.wide  # What it holds does not depend on the version of Python.

LAYERS = 8
ADAM = optax.adam(1e-4)


@pytest.fixture
def small_buckets():
    with in_small_buckets(python_seconds=0.0):
        yield


def mixed(state, x):
    """New parameters leave from the buffers of their gradients."""

    def loss_of(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return (y.astype(jnp.float32) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    new = [m - 0.1 * g.astype(jnp.float32) for m, g in zip(state["m"], grads, strict=True)]
    return {"params": [m.astype(jnp.bfloat16) for m in new], "m": new}, loss


def masters():
    m = [jnp.eye(1024) for _ in range(LAYERS)]
    return {"params": [w.astype(jnp.bfloat16) for w in m], "m": m}


def step_and_state(name: str):
    """A step, what it is called with, and what waits on the host."""
    if name == "forward":
        return net, (state_with(OPTIMIZERS["adam"], layers=LAYERS)[0], X), "params*"
    if name == "mixed":
        return mixed, (masters(), jnp.ones((8, 1024), jnp.bfloat16)), "*"
    tx = OPTIMIZERS[name.split(",")[0]]
    host = "state[1]*" if name.endswith("moments") else "*"
    return step_with(tx), (state_with(tx, layers=LAYERS), X), host


def plan_of(name: str, budget: int):
    """The plan of a step."""
    return fitted(name, budget).plan(*step_and_state(name)[1])


@functools.cache
def fitted(name: str, budget: int) -> Any:
    """A step that keeps a budget."""
    step, _, host = step_and_state(name)
    return jaxmem.fit(
        step,
        host=host,
        budget=budget,
        target="h200",
        donate_argnums=() if name == "forward" else (0,),
        progress=False,
    )


@functools.cache
def planned(name: str, budget: int):
    """The stream of a step, and its budget."""
    run, arguments = fitted(name, budget), step_and_state(name)[1]
    plan = run.plan(*arguments)
    assert plan.compiled_bytes <= budget
    (outcome,) = run._outcomes.values()
    assert outcome.stream is not None
    return outcome.stream


@pytest.mark.parametrize("bytes_per_second", [1e6, 1e9, 1e15], ids=["slow", "even", "fast"])
@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("forward", 5),
        ("mixed", 18),
        ("mixed", 30),
        ("adam", 12),
        ("adam", 16),
        ("clipped gradients", 18),
        ("clipped twice, moments", 40),
    ],
)
@pytest.mark.usefixtures("small_buckets")
def test_memory_of_steps_in_a_row_stays_within_the_budget(
    name: str, mib: int, bytes_per_second: float
):
    stream = planned(name, mib * MIB)
    rng = random.Random(name)
    seconds = [rng.random() * 5e-3 for _ in range(len(stream.items) + 1)]
    device = rehearsed(stream, bytes_per_second, seconds.__getitem__, steps=3)
    assert 0 < device.most and device.allocator.most <= mib * MIB


# In a window of three leaves Adam's update has one temporary leaf more from newer XLA.
ADAM_WITHIN = 0.03 if jax.__version_info__ < (0, 11) else 0.10


@pytest.mark.parametrize(
    ("name", "mib", "within"),
    [
        ("forward", 5, 0.03),
        ("mixed", 18, 0.03),
        ("mixed", 30, 0.03),
        ("adam", 12, ADAM_WITHIN),
        ("adam", 16, 0.03),
        ("clipped twice, moments", 40, 0.03),
        ("clipped gradients", 18, 0.06),
    ],
)
@pytest.mark.usefixtures("small_buckets")
def test_what_is_predicted_of_a_step_in_pieces_is_about_what_its_programs_take(
    name: str, mib: int, within: float
):
    """Its copies on the way and stages that hand over what the whole would hold at once."""
    plan = plan_of(name, mib * MIB)
    given_out = streamplan.given_out_for(planned(name, mib * MIB), jaxmem.Target("h200"))
    assert 1 - within < plan.predicted_bytes / given_out.likely < 1 + within


@pytest.mark.parametrize(
    ("name", "mib", "more"),
    [("mixed", 16.3, 8), ("adam", 12.1, 8), ("clipped gradients", 18.1, 6)],
)
@pytest.mark.usefixtures("small_buckets")
def test_a_budget_for_what_the_allocator_adds_is_named_and_works(
    name: str, mib: float, more: int, monkeypatch
):
    given_out = streamplan.given_out_for
    monkeypatch.setattr(
        streamplan,
        "given_out_for",
        lambda *given: streamplan.GivenOut(*(n + more * MIB for n in given_out(*given))),
    )
    with pytest.raises(jaxmem.BudgetInfeasibleError, match="XLA's allocator gives out") as raised:
        plan_of(name, int(mib * MIB))
    smallest = raised.value.smallest_bytes
    assert mib * MIB < smallest <= (mib + more) * MIB
    assert "Use budget=" in str(raised.value)
    plan = plan_of(name, smallest)
    assert plan.budget_bytes == smallest
    # Followed, it is planned in what it was planned in.
    step, arguments, _ = step_and_state(name)
    settings = {"budget": smallest, "plan": plan, "target": plan.target}
    again = jaxmem.fit(step, donate_argnums=0, progress=False, **settings).plan(*arguments)
    assert again.streamed == plan.streamed and again.compiled_bytes == plan.compiled_bytes


@pytest.mark.parametrize(("name", "mib"), [("adam", 16), ("clipped twice, moments", 40)])
@pytest.mark.usefixtures("small_buckets")
def test_a_plan_that_is_followed_says_what_it_said(name: str, mib: int):
    plan = plan_of(name, mib * MIB)
    step, arguments, _ = step_and_state(name)
    for _ in range(2):
        settings = {"budget": mib * MIB, "plan": plan, "target": plan.target}
        run = jaxmem.fit(step, donate_argnums=0, progress=False, **settings)
        plan, before = run.plan(*arguments), plan
        assert plan.predicted_bytes == before.predicted_bytes
        assert plan.compiled_bytes == before.compiled_bytes


@pytest.mark.usefixtures("small_buckets")
def test_a_plan_in_less_than_it_was_made_for_names_both_budgets():
    step, arguments, _ = step_and_state("adam")
    settings = {"budget": 11 * MIB, "plan": plan_of("adam", 16 * MIB), "target": "h200"}
    run = jaxmem.fit(step, donate_argnums=0, progress=False, **settings)
    with pytest.raises(jaxmem.VerificationError, match=r"made for budget=16.0MiB .* fit 11.0MiB"):
        run.plan(*arguments)


def deep(state, x):
    """A net of large matrices with Adam, whose parameters stay on the device."""

    def loss_of(params):
        y = x
        for w in params:
            y = y + jnp.tanh(y @ w)
        return (y.astype(jnp.float32) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, moments = ADAM.update(grads, state["moments"])
    master = optax.apply_updates(state["master"], updates)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
    return {"params": params, "master": master, "moments": moments}, loss


@pytest.mark.parametrize(
    ("gib", "bytes_per_second"),
    [
        (23, 50e9),
        pytest.param(24, 20e9, marks=pytest.mark.wide),
        pytest.param(23, 20e9, marks=pytest.mark.slow),
        pytest.param(24, 50e9, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_the_allocator_rounds_up_stay_within_the_budget(
    gib: int, bytes_per_second: float
):
    def state():
        master = [jnp.zeros((4096, 4096)) for _ in range(60)]
        params = [w.astype(jnp.bfloat16) for w in master]
        return {"params": params, "master": master, "moments": ADAM.init(master)}

    x = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)
    host = ("state['master']*", "state['moments']*")
    budget = gib * 2**30
    run: Any = jaxmem.fit(
        deep, host=host, budget=budget, target="h200", donate_argnums=0, progress=False
    )
    run.plan(jax.eval_shape(state), x)
    (outcome,) = run._outcomes.values()
    stream = outcome.stream
    computing = [n for n, item in enumerate(stream.items) if item.part.stage]
    seconds = dict.fromkeys([*computing, len(stream.items)], 0.4 / (len(computing) + 1))
    device = rehearsed(stream, bytes_per_second, lambda n: seconds.get(n, 2e-4), steps=4)
    assert 0.95 * budget < device.allocator.most <= budget
