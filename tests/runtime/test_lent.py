"""Parameters that wait in host memory and are fetched for the stages that read them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import BudgetError, BudgetInfeasibleError, CutError, StepInterruptedError
from jaxmem.runtime import copies, stream
from tests.streamed_steps import (
    MIB,
    OPTIMIZERS,
    X,
    fitted,
    in_small_buckets,
    kinds,
    net,
    same,
    state_with,
    step_with,
)

LAYERS = 6
ADAM = OPTIMIZERS["adam"]
SETTINGS = {"host": "*", "budget": 10 * MIB}


@pytest.fixture(autouse=True, scope="module")
def small_buckets():
    with in_small_buckets():
        yield


@functools.cache
def adam():
    """Everything of 18 MiB of state on the host, in a budget of 10."""
    return fitted(step_with(ADAM), **SETTINGS)


@functools.cache
def forward():
    """Not a train step: parameters are read, and stay the caller's."""
    return jaxmem.fit(net, host="params*", target="h200", budget=5 * MIB, progress=False)


def fresh():
    return state_with(ADAM, layers=LAYERS)


@pytest.mark.parametrize(
    "name",
    [
        "adam",
        "clipped gradients",
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("muon", "adamw with a mask")),
    ],
)
def test_steps_are_those_of_jit(name: str):
    tx = OPTIMIZERS[name]
    step = step_with(tx)
    # A norm of all gradients has to wait for all of them: they are on the device together.
    run = adam() if name == "adam" else fitted(step, host="*", budget=15 * MIB)
    state, expected = (state_with(tx, layers=LAYERS) for _ in range(2))
    state = run.place(state, X)[0]
    where = kinds(state)
    for _ in range(3):
        state, loss = run(state, X)
        expected, reference = jax.jit(step)(expected, X)
        assert kinds(state) == where
        np.testing.assert_allclose(loss, reference, rtol=1e-5)
    same(state, expected, rtol=1e-4)


def test_the_budget_is_less_than_what_the_step_has():
    plan = adam().plan(fresh(), X)
    assert plan.compiled_bytes <= plan.budget_bytes == 10 * MIB
    assert plan.keep_all_predicted_bytes > 18 * MIB
    assert plan.argument_bytes < MIB
    assert plan.host_bytes >= 18 * MIB
    told = plan.streamed
    assert told.stages > 2 and told.updates == LAYERS
    # Moments and parameters for the update, parameters in the forward pass and behind it, but for
    # what the last stage of the one and the first of the other share.
    assert (3 + 1) * LAYERS * MIB < told.fetched_bytes <= (3 + 2) * LAYERS * MIB
    assert told.sent_bytes == 3 * LAYERS * MIB
    assert all(f"state[0]['w{n}']" in plan.hosted for n in range(LAYERS))


def test_gradients_that_one_program_could_not_hold_leave_stage_by_stage():
    """Of 24 layers gradients alone are more than twice the budget."""
    deep = functools.partial(state_with, ADAM, layers=24)
    run = fitted(step_with(ADAM), host="*", budget=11 * MIB)
    plan = run.plan(deep(), X)
    assert plan.compiled_bytes <= plan.budget_bytes == 11 * MIB
    state, expected = run.place(deep(), X)[0], deep()
    for _ in range(2):
        state, loss = run(state, X)
        expected, reference = jax.jit(step_with(ADAM))(expected, X)
        np.testing.assert_allclose(loss, reference, rtol=1e-5)
    same(state, expected, rtol=1e-4)
    again = fitted(step_with(ADAM), plan=plan, host=None).plan(deep(), X)
    assert (again.streamed, again.compiled_bytes) == (plan.streamed, plan.compiled_bytes)
    with pytest.raises(BudgetInfeasibleError) as told:
        fitted(step_with(ADAM), host="*", budget=3 * MIB).plan(deep(), X)
    named = told.value.smallest_bytes
    assert fitted(step_with(ADAM), host="*", budget=named).plan(deep(), X).compiled_bytes <= named


def on_device_bytes():
    live = (a for a in jax.live_arrays() if not a.is_deleted() and a.size)
    return sum(a.nbytes for a in live if a.sharding.memory_kind == "device")


@pytest.mark.parametrize(
    "budget", [10, *(pytest.param(mib, marks=pytest.mark.wide) for mib in (9, 14))]
)
def test_what_is_on_the_device_is_never_more_than_the_budget(monkeypatch, budget: int):
    """Counted by JAX's own list of arrays, with what the program that starts takes beside them."""
    run = fitted(step_with(ADAM), host="*", budget=budget * MIB)
    state = run.place(fresh(), X)[0]
    plan = run.plan(state, X)
    run._make(run._caller.take((state, X), {}))
    before, seen, real = on_device_bytes() - X.nbytes, [], stream.Run._run

    def watched(self, item, alone):
        memory = item.run.memory_analysis()
        made = memory.output_size_in_bytes - memory.alias_size_in_bytes
        seen.append(on_device_bytes() - before + made)
        assert self.under_way <= max(item.room_bytes, item.way_bytes)
        real(self, item, alone)

    monkeypatch.setattr(stream.Run, "_run", watched)
    run(state, X)
    assert len(seen) > plan.streamed.stages
    assert max(seen) <= plan.compiled_bytes <= budget * MIB


def test_what_is_sent_counts_until_it_has_left():
    """A new parameter may leave from the buffer of its gradient, which was not fetched."""

    def loss_of(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        new = [m - 0.1 * g.astype(jnp.float32) for m, g in zip(state["m"], grads, strict=True)]
        return {"params": [m.astype(jnp.bfloat16) for m in new], "m": new}, loss

    def state():
        m = [jnp.eye(1024) * 0.9 for _ in range(6)]
        return {"params": [w.astype(jnp.bfloat16) for w in m], "m": m}

    x = jnp.linspace(-1, 1, 8 * 1024).reshape(8, 1024).astype(jnp.bfloat16)
    run = fitted(step, host="*", budget=30 * MIB)
    assert run.plan(state(), x).streamed.stages > 1
    (outcome,) = run._outcomes.values()
    sent = [item for item in outcome.stream.items if item.part.sent]
    assert any(item.part.sent_bytes > item.part.fetched_bytes for item in sent)
    assert all(item.way_bytes >= item.part.sent_bytes for item in sent)
    same(run(run.place(state(), x)[0], x), jax.jit(step)(state(), x), rtol=1e-2)


@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_a_mark_that_fails_is_made_up_for(monkeypatch, call: int):
    state, expected = adam().place(fresh(), X)[0], jax.jit(step_with(ADAM))(fresh(), X)
    count, real = [], copies.Copier.end

    def failing(self):
        count.append(1)
        if len(count) == call + 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: for a mark")
        return real(self)

    monkeypatch.setattr(copies.Copier, "end", failing)
    with pytest.warns(UserWarning, match="for a mark"):
        found = adam()(state, X)
    same(found[0], expected[0], rtol=1e-4)


def test_it_says_what_fits_if_nothing_does():
    tight = fitted(step_with(ADAM), host="*", budget=int(2.5 * MIB))
    with pytest.raises(BudgetInfeasibleError, match="budget=") as raised:
        tight.plan(fresh(), X)
    smallest = raised.value.smallest_bytes
    assert 2.5 * MIB < smallest
    plan = fitted(step_with(ADAM), host="*", budget=2 * smallest).plan(fresh(), X)
    assert plan.compiled_bytes <= 2 * smallest


def test_what_is_donated_is_gone_and_what_is_read_stays():
    state = adam().place(fresh(), X)[0]
    new, _ = adam()(state, X)
    assert all(a.is_deleted() for a in jax.tree.leaves(state) if a.nbytes >= MIB)
    assert not any(a.is_deleted() for a in jax.tree.leaves(new))
    params = forward().place(fresh()[0], X)[0]
    assert kinds(params).count("pinned_host") == LAYERS
    first, again = forward()(params, X), forward()(params, X)
    np.testing.assert_allclose(first, jax.jit(net)(fresh()[0], X), rtol=1e-6)
    assert first == again
    assert not any(a.is_deleted() for a in jax.tree.leaves(params))


def test_forward_only_fetches_each_layer_once():
    plan = forward().plan(fresh()[0], X)
    assert plan.streamed.fetched_bytes == LAYERS * MIB and plan.streamed.sent_bytes == 0
    assert plan.streamed.stages > LAYERS / 2
    assert plan.compiled_bytes <= 5 * MIB < LAYERS * MIB


def test_gradients_alone_stay_on_the_device():
    def gradients(params, x):
        return jax.value_and_grad(net)(params, x)

    run = jaxmem.fit(gradients, host="params*", target="h200", budget=11 * MIB, progress=False)
    params = fresh()[0]
    same(run(run.place(params, X)[0], X), jax.jit(gradients)(fresh()[0], X), rtol=1e-4)


def test_frozen_parameters_are_read_and_others_trained():
    def step(adapters, frozen, x):
        def loss(adapters):
            y = x
            for n, (a, b) in enumerate(adapters):
                y = jnp.tanh(y @ frozen[f"w{n}"] + (y @ a) @ b)
            return (y**2).mean()

        value, grads = jax.value_and_grad(loss)(adapters)
        return jax.tree.map(lambda a, g: a - 0.1 * g, adapters, grads), value

    frozen = fresh()[0]
    adapters = [(jnp.ones((512, 4)) * 0.01, jnp.ones((4, 512)) * 0.01) for _ in range(LAYERS)]
    run = jaxmem.fit(
        step, host="frozen*", target="h200", budget=5 * MIB, donate_argnums=0, progress=False
    )
    expected = jax.jit(step)(adapters, frozen, X)
    _, placed, _ = run.place(adapters, frozen, X)
    same(run([(a + 0, b + 0) for a, b in adapters], placed, X), expected)
    same(run(adapters, placed, X), expected)


def test_a_copy_that_fails_once_is_made_up_for(monkeypatch):
    state, real, count = adam().place(fresh(), X)[0], jax.device_put, iter(range(10**6))

    def failing(*args, **kwargs):
        if next(count) == 12:
            raise RuntimeError("RESOURCE_EXHAUSTED: injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", failing)
    with pytest.warns(UserWarning, match="worked with nothing else under way"):
        found = adam()(state, X)
    monkeypatch.undo()
    same(found, jax.jit(step_with(ADAM))(fresh(), X))


def test_a_step_that_stops_in_the_forward_pass_can_be_completed(monkeypatch):
    state, real, count = adam().place(fresh(), X)[0], jax.device_put, iter(range(10**6))

    def failing(*args, **kwargs):
        if next(count) >= 6:
            raise RuntimeError("RESOURCE_EXHAUSTED: injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", failing)
    with pytest.raises(StepInterruptedError, match="a stage of") as raised:
        adam()(state, X)
    monkeypatch.undo()
    same(raised.value.resume(), jax.jit(step_with(ADAM))(fresh(), X))


def test_effects_do_not_run_in_stages():
    def step(params, x):
        jax.debug.print("here")
        return net(params, x)

    run = jaxmem.fit(step, host="params*", target="h200", budget=5 * MIB, progress=False)
    with pytest.raises(CutError, match=r"params\['w0'\] in host memory: .* has an effect"):
        run.plan(fresh()[0], X)


def test_a_plan_is_followed(tmp_path):
    plan = adam().plan(fresh(), X)
    plan.save(tmp_path / "plan.json")
    again = jaxmem.fit(
        step_with(ADAM),
        plan=jaxmem.Plan.load(tmp_path / "plan.json"),
        target="h200",
        budget=10 * MIB,
        donate_argnums=0,
        progress=False,
    )
    assert again.plan(fresh(), X).streamed == plan.streamed
    same(again(again.place(fresh(), X)[0], X), jax.jit(step_with(ADAM))(fresh(), X))


def test_what_is_only_read_is_told_in_words_of_its_own():
    plan = forward().plan(fresh()[0], X)
    shown = " ".join(str(plan).split())
    assert f"6.0MiB fetched in {plan.streamed.stages} stages" in shown
    assert any(
        f"read in {plan.streamed.stages} stages, with 6.0MiB fetched" in said
        for said in plan.explain().sentences
    )
    assert forward().report(fresh()[0], X).function == "net"


def test_a_parameter_that_is_made_from_others_on_the_device_is_refused():
    def step(state, x):
        loss, grads = jax.value_and_grad(net)(state["params"], x)
        master = jax.tree.map(lambda w, g: w - 0.1 * g, state["master"], grads)
        return {"params": jax.tree.map(lambda w: w * 1, master), "master": master}, loss

    params = fresh()[0]
    state = {"params": params, "master": params}
    run = jaxmem.fit(
        step, host="state['params']*", target="h200", budget=40 * MIB, donate_argnums=0
    )
    with pytest.raises(CutError, match=r"needs nothing of what waits there"):
        run.plan(state, X)


def test_a_full_check_passes_and_a_smaller_host_is_refused():
    checked = fitted(step_with(ADAM), verify="full", **SETTINGS)
    same(checked(fresh(), X), jax.jit(step_with(ADAM))(fresh(), X))
    small = fitted(step_with(ADAM), host_budget="16MiB", **SETTINGS)
    with pytest.raises(BudgetError, match="in host memory"):
        small.plan(fresh(), X)


def test_what_is_on_the_host_already_is_planned_alike():
    placed = adam().place(fresh(), X)[0]
    again = fitted(step_with(ADAM), **SETTINGS)
    assert again.plan(placed, X).streamed == adam().plan(fresh(), X).streamed
    same(again(placed, X), jax.jit(step_with(ADAM))(fresh(), X))
