"""Stacks of gradients wait in host memory where every update needs all of them."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.errors import BudgetInfeasibleError
from jaxmem.runtime import line, room, streamed
from tests.scanned_nets import LAYERS, WIDTH, X, checkpointed, params_of, plain, with_rows_of_both
from tests.streamed_steps import MIB, failing, fitted, kinds, on_device, same, step_of

STACKS = 2 * LAYERS * WIDTH * WIDTH * 4
ADAM = optax.adam(1e-2, eps=1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)


def beside_others(params, x):
    """Leaves that are in no loop have a part in the norm as well."""
    x = x * params["bias"].sum(0)[:WIDTH] + params["bias"][0]
    return plain(params, x)


def finite_only(tx):
    """Updates that are left out where a gradient is not finite: no sum of squares."""

    def update(grads, state, params):
        fine = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        updates, new = tx.update(grads, state, params)
        updates = jax.tree.map(lambda u: jnp.where(fine, u, 0), updates)
        return updates, jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, state)

    return optax.GradientTransformation(tx.init, update)


def by_the_largest(tx):
    """Gradients divided by the largest of all."""

    def update(grads, state, params):
        largest = jnp.stack([jnp.abs(g).max() for g in jax.tree.leaves(grads)]).max()
        return tx.update(jax.tree.map(lambda g: g / (1 + largest), grads), state, params)

    return optax.GradientTransformation(tx.init, update)


# Of each the net, the optimizer, and the bytes of stacks that wait.
STEPS: dict = {
    "plain": (plain, CLIPPED, STACKS),
    "checkpointed": (checkpointed, CLIPPED, STACKS),
    "with rows of both": (with_rows_of_both, CLIPPED, STACKS),
    "beside others": (beside_others, CLIPPED, STACKS),
    "decayed": (
        plain,
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)),
        STACKS,
    ),
    "each leaf for itself": (plain, optax.chain(optax.clip_by_block_rms(1e-4), ADAM), STACKS),
    "finite": (plain, finite_only(ADAM), STACKS),
    "by the largest": (plain, by_the_largest(ADAM), STACKS),
    "lion": (plain, optax.chain(optax.clip_by_global_norm(0.1), optax.lion(1e-3)), STACKS),
}


@pytest.fixture(autouse=True)
def in_small_buckets(monkeypatch):
    monkeypatch.setattr(streamed, "_BUCKET_BYTES", 2 * MIB)
    monkeypatch.setattr(room, "_WINDOW_BYTES", 8 * MIB)
    monkeypatch.setattr(line.Inside, "taken", lambda self, computing, link: computing)


def states_of(tx):
    params = params_of()
    return params, tx.init(params)


def compared(run, step, state, steps=3, rtol=1e-4):
    """Assert that steps give what those of ``jax.jit`` do; the last state of both."""
    mine, theirs = run.place(jax.tree.map(jnp.copy, state), X)[0], state
    where = kinds(mine)
    for _ in range(steps):
        mine, found = run(mine, X)
        theirs, expected = jax.jit(step)(theirs, X)
        same(found, expected, rtol=rtol)
        assert kinds(mine) == where
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    return mine, theirs


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "plain" else pytest.mark.slow) for n in STEPS],
)
def test_steps_are_those_of_jit(name: str):
    """In less than the stacks alone take, with all that is updated in host memory."""
    net, tx, nbytes = STEPS[name]
    step, state = step_of(net, tx), states_of(tx)
    run = fitted(step, host="*", budget=10 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.kept_bytes == nbytes
    assert plan.compiled_bytes <= 10 * MIB < STACKS
    assert "of gradients wait there too" in " ".join(str(plan.explain()).split())
    same(*compared(run, step, state), rtol=1e-2)


@pytest.mark.wide
def test_parameters_may_stay_on_the_device():
    """And the norm may be a result."""

    def step(state, x):
        params, moments = state
        loss, grads = jax.value_and_grad(plain)(params, x)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)
        updates, moments = ADAM.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), (loss, norm)

    state = states_of(ADAM)
    run = fitted(step, budget=20 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.kept_bytes == STACKS
    same(*compared(run, step, state), rtol=1e-2)


@pytest.mark.wide
def test_where_there_is_room_they_stay():
    """They are copied for nothing else."""
    step, state = step_of(plain, CLIPPED), states_of(CLIPPED)
    plan = fitted(step, host="*", budget=60 * MIB).plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.kept_bytes == 0


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.lamb(1e-2, eps=1e-3), id="lamb", marks=pytest.mark.wide),
        pytest.param(CLIPPED, id="clipped twice", marks=pytest.mark.slow),
    ],
)
def test_updates_that_need_all_rows_are_refused_as_before(tx):
    """The norm of a leaf of LAMB is of its update, a second norm of what the first one clipped."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), tx)
    with pytest.raises(BudgetInfeasibleError, match=r"no plan fits budget=10\.0MiB"):
        fitted(step_of(plain, tx), host="*", budget=10 * MIB).plan(states_of(tx), X)


@pytest.mark.slow
def test_the_smallest_budget_is_one_in_which_it_runs():
    step, state = step_of(plain, CLIPPED), states_of(CLIPPED)
    with pytest.raises(BudgetInfeasibleError, match="updates in the loops that make") as raised:
        fitted(step, host="*", budget=6 * MIB).plan(state, X)
    assert 6 * MIB < raised.value.smallest_bytes < STACKS
    plan = fitted(step, host="*", budget=raised.value.smallest_bytes).plan(state, X)
    assert plan.compiled_bytes <= raised.value.smallest_bytes


@pytest.mark.slow
def test_host_memory_counts_them(monkeypatch):
    step, state = step_of(plain, CLIPPED), states_of(CLIPPED)
    few = fitted(step, host="*", budget=40 * MIB).plan(state, X).host_bytes
    plan = fitted(step, host="*", budget=10 * MIB).plan(state, X)
    assert few + STACKS <= plan.host_bytes <= few + STACKS + STACKS // LAYERS
    with pytest.raises(BudgetInfeasibleError) as raised:
        fitted(step, host="*", budget=10 * MIB, host_budget=few).plan(state, X)
    (note,) = raised.value.__notes__
    assert "With gradients in host memory as well" in note
    assert "host_budget=" in note


@pytest.mark.wide
def test_a_plan_is_followed(tmp_path):
    step, state = step_of(plain, CLIPPED), states_of(CLIPPED)
    plan = fitted(step, host="*", budget=10 * MIB).plan(state, X)
    plan.save(tmp_path / "plan.json")
    again = jaxmem.fit(
        step,
        plan=jaxmem.Plan.load(tmp_path / "plan.json"),
        target="h200",
        donate_argnums=0,
        progress=False,
    )
    assert again.plan(state, X).streamed == plan.streamed
    same(*compared(again, step, state, steps=1), rtol=1e-2)


@pytest.mark.wide
def test_one_set_of_buffers_serves_all_calls():
    """Neither handed out nor made anew: what is in host memory does not grow."""
    step, state = step_of(plain, CLIPPED), states_of(CLIPPED)
    run = fitted(step, host="*", budget=10 * MIB)
    state, _ = run(run.place(jax.tree.map(jnp.copy, state), X)[0], X)

    def held():
        return sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind != "device")

    before = held()
    for _ in range(3):
        state, _ = run(state, X)
        assert held() == before


@pytest.mark.slow
def test_calls_at_the_same_time_have_buffers_of_their_own():
    step = step_of(plain, CLIPPED)
    run = fitted(step, host="*", budget=10 * MIB)
    given = [jax.tree.map(lambda a, n=n: a * (1 + n), states_of(CLIPPED)) for n in range(2)]
    expected = [jax.jit(step)(state, X) for state in given]
    placed = [run.place(jax.tree.map(jnp.copy, state), X)[0] for state in given]
    run.plan(placed[0], X)
    found = [None, None]

    def call(n):
        found[n] = run(placed[n], X)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(found, expected, strict=True):
        same(on_device(mine), theirs, rtol=1e-2)


@pytest.mark.parametrize(
    "times", [pytest.param(1, marks=pytest.mark.wide), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_step_that_fails_between_updates_is_completed(times: int, monkeypatch):
    step, state = step_of(plain, CLIPPED), states_of(CLIPPED)
    run = fitted(step, host="*", budget=10 * MIB)
    mine = run.place(jax.tree.map(jnp.copy, state), X)[0]
    found = failing(run, (mine, X), times, "failed twice", monkeypatch)
    same(found, jax.jit(step)(state, X), rtol=1e-2)
    again = run(found[0], X)
    same(again, jax.jit(step)(jax.jit(step)(state, X)[0], X), rtol=1e-2)
