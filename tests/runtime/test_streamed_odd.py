"""Steps that treat their state in odd ways, with some of it in host memory."""

from __future__ import annotations

import itertools
import signal
import time

import jax
import jax.numpy as jnp
import optax.contrib
import pytest
from flax import nnx

import jaxmem
from jaxmem.errors import StepInterruptedError
from tests.problems import assert_same
from tests.streamed_steps import (
    MIB,
    OPTIMIZERS,
    WIDTH,
    X,
    fitted,
    in_small_buckets,
    kinds,
    same,
    state_with,
    step_with,
)


@pytest.fixture(autouse=True)
def small_buckets():
    with in_small_buckets():
        yield


def big(value=1.0):
    return jnp.full((512, 512), value)


def adapter(s, x):
    """The base weights are read by the loss, and returned as they are."""
    loss, g = jax.value_and_grad(lambda a: (((x @ s["m"]) @ a) ** 2).mean())(s["a"])
    return {"m": s["m"], "a": s["a"] - 0.1 * g}, loss


def shifted(s, x):
    m = 0.9 * s["m"] + x.sum()
    return {"m": m, "a": s["m"]}, m.mean()


def swapped(s, x):
    return {"m": s["a"], "a": s["m"]}, x.sum()


def shown(s, x):
    return {"m": 0.9 * s["m"] + x.sum(), "a": s["a"] + 1}, s["m"]


def twice(s, x):
    m = 0.9 * s["m"] + x.sum()
    return {"m": m, "a": s["a"] - m}, m


def constant(s, x):
    return {"m": jnp.zeros_like(s["m"]), "a": s["a"] + s["m"]}, x.sum()


# Where "a" is only updated it waits on the host beside "m".
ODD = {
    "s['m']": (adapter, shifted, swapped, shown, twice, constant),
    "s['a']": (shifted, swapped, constant),
    "s*": (adapter, shifted, swapped, shown, twice, constant),
}


@pytest.mark.parametrize(
    ("step", "host"), [(step, host) for host, steps in ODD.items() for step in steps]
)
def test_leaves_may_be_read_shown_kept_and_passed_on(step, host: str):
    def fresh():
        return {"m": big(0.01), "a": big(0.5)}

    run, plain = fitted(step, host=host), jax.jit(step)
    state, expected = run.place(fresh(), X)[0], fresh()
    where = kinds(state)
    assert "pinned_host" in where
    for _ in range(3):
        state, out = run(state, X)
        expected, reference = plain(expected, X)
        assert kinds(state) == where
        assert not any(a.is_deleted() for a in jax.tree.leaves((state, out)))
        same((state, out), (expected, reference))


def test_prodigy_which_keeps_the_first_parameters():
    tx = optax.contrib.prodigy()
    step = step_with(tx)
    run, state, expected = fitted(step), state_with(tx), state_with(tx)
    state = run.place(state, X)[0]
    for _ in range(2):
        state, _ = run(state, X)
        expected, _ = jax.jit(step)(expected, X)
    same(state, expected)


def test_plain_arrays_take_the_place_of_what_they_are_made_of():
    def step(params, mu, nu, x):
        g = jax.grad(lambda w: ((x @ w) ** 2).mean())(params)
        mu, nu = 0.9 * mu + g, 0.9 * nu + g * g
        return x.sum(), mu, nu, params - 0.1 * mu / (nu + 1)

    run = fitted(step, host="mu", donate_argnums=(0, 1, 2))
    found, expected = (big(0.1), big(), big()), (big(0.1), big(), big())
    for _ in range(2):
        _, mu, nu, params = run(*found, X)
        assert kinds((mu, nu, params)) == ["pinned_host", "device", "device"]
        found = params, mu, nu
        _, mu, nu, params = jax.jit(step)(*expected, X)
        expected = params, mu, nu
    same(found, expected)


def test_one_array_that_is_two_leaves_is_two_after_a_step():
    run = fitted(twice, host="s['m']")
    a = big()
    state = run.place({"m": a, "a": a}, X)[0]
    found, expected = run(state, X), jax.jit(twice)({"m": big(), "a": big()}, X)
    same(found, expected)
    same(run(found[0], X), jax.jit(twice)(expected[0], X))


def test_what_was_copied_to_the_host_for_a_step_is_given_up_on_the_device():
    run, state = fitted(twice, host="s['m']"), {"m": big(), "a": big()}
    run(state, X)
    assert state["m"].is_deleted() and state["a"].is_deleted()


def test_results_that_stay_beside_what_was_sent_count():
    def copies(s, x):
        m = {k: 0.9 * v + x.sum() for k, v in s["m"].items()}
        return {"m": m}, dict(m)

    def sums(s, x):
        return {"m": {k: 0.9 * v + x.sum() for k, v in s["m"].items()}}, x.sum()

    state = {"m": {f"w{n}": big() for n in range(12)}}
    with pytest.raises(jaxmem.BudgetInfeasibleError):
        fitted(copies, host="s*", budget="9MiB").plan(state, X)
    both = [fitted(f, host="s*").plan(state, X).compiled_bytes for f in (copies, sums)]
    assert both[0] >= both[1] + 4 * MIB >= 16 * MIB


def test_the_full_check_takes_a_placed_state():
    step = step_with(OPTIMIZERS["adam"])
    run, state = fitted(step, verify="full"), state_with(OPTIMIZERS["adam"])
    state = run.place(state, X)[0]
    same(run(state, X), jax.jit(step)(state_with(OPTIMIZERS["adam"]), X))


class Waits:
    """``jax.block_until_ready`` that fails for some of the copies to the host."""

    def __init__(self, real, calls):
        self.real, self.calls, self.count = real, calls, 0

    def __call__(self, arrays):
        on_host = isinstance(arrays, list) and arrays and kinds(arrays)[0] == "pinned_host"
        self.count += bool(on_host)
        if on_host and self.count in self.calls:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while copying")
        return self.real(arrays)


@pytest.fixture
def deep():
    step = step_with(OPTIMIZERS["adam"])
    run = fitted(step, budget="40MiB")
    state = run.place(state_with(OPTIMIZERS["adam"], layers=10), X)[0]
    run._make(run._caller.take((state, X), {}))
    return run, state, jax.jit(step)(state_with(OPTIMIZERS["adam"], layers=10), X)


def test_a_copy_that_fails_on_its_way_is_copied_again(monkeypatch, deep):
    run, state, expected = deep
    # The same copy fails when it is waited for and when the step settles.
    monkeypatch.setattr(jax, "block_until_ready", Waits(jax.block_until_ready, {2, 3}))
    with pytest.warns(UserWarning, match="while copying"):
        found = run(state, X)
    monkeypatch.undo()
    same(found, expected)


def test_ctrl_c_while_a_step_is_resumed_waits_for_it(monkeypatch, deep):
    run, state, expected = deep
    monkeypatch.setattr(jax, "block_until_ready", Waits(jax.block_until_ready, range(2, 99)))
    with pytest.raises(StepInterruptedError) as raised:
        run(state, X)
    monkeypatch.undo()
    real, count = jax.device_put, []

    def interrupted(*args, **kwargs):
        count.append(1)
        if len(count) == 2:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found = raised.value.resume()
        time.sleep(10)  # Ended by the interrupt, which comes as soon as the step is complete.
    monkeypatch.undo()
    same(found, expected)


def test_a_result_that_cannot_be_copied_does_not_lose_the_state(monkeypatch):
    """One value that is two results is copied for the second when all else is done."""
    one = step_with(OPTIMIZERS["adam"])

    def step(state, x):
        new, loss = one(state, x)
        return new, loss, loss

    run, state = fitted(step), state_with(OPTIMIZERS["adam"])
    state, real = run.place(state, X)[0], jax.device_put

    def broken(*args, **kwargs):
        if kwargs.get("may_alias") is False:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: for a result")
        return real(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", broken)
    with pytest.raises(StepInterruptedError) as raised:
        run(state, X)
    monkeypatch.undo()
    expected = jax.jit(one)(state_with(OPTIMIZERS["adam"]), X)
    same(raised.value.resume()[:2], expected)


def test_a_result_that_could_be_copied_only_later_is_told(monkeypatch):
    """There was no room for it beside what was still on its way to the host."""
    one = step_with(OPTIMIZERS["adam"])

    def step(state, x):
        new, loss = one(state, x)
        return new, loss, loss

    run, state = fitted(step), state_with(OPTIMIZERS["adam"])
    state, real, failed = run.place(state, X)[0], jax.device_put, []

    def broken(*args, **kwargs):
        if kwargs.get("may_alias") is False and not failed:
            failed.append(1)
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", broken)
    with pytest.warns(UserWarning, match="last copy .* nothing else under way: MemoryError$"):
        found = run(state, X)
    monkeypatch.undo()
    same(found[:2], jax.jit(one)(state_with(OPTIMIZERS["adam"]), X))


def test_an_error_that_more_room_does_not_mend_does_not_ask_for_room(monkeypatch, deep):
    run, state, _ = deep
    real, count = jax.device_put, []

    def broken(*args, **kwargs):
        count.append(1)
        if len(count) > 6:
            raise ValueError("not of this device")
        return real(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", broken)
    with pytest.raises(StepInterruptedError, match="Mend that") as raised:
        run(state, X)
    assert "Make room" not in str(raised.value)


def test_stages_with_a_callback_are_planned_for_an_absent_gpu():
    """They are compiled there without, and run here with it."""

    def step(params, x):
        def loss(params):
            y = x
            for w in params:
                y = y + jnp.tanh(y @ w)
            return (y**2).mean() * told(jax.lax.stop_gradient(y).mean())

        def told(mean):
            return jax.pure_callback(lambda a: a + 1, jax.ShapeDtypeStruct((), mean.dtype), mean)

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [0.05 * jax.random.normal(jax.random.key(n), (512, 512)) for n in range(6)]
    found = fitted(step, host="params*")
    expected = jax.jit(step)(params, X)
    same(found([jnp.copy(w) for w in params], X), expected)
    assert len(found.plan(params, X).hosted) == 6


def test_the_budget_that_an_error_names_holds_for_the_updates_too():
    """What computes the first part here is a sum; the update has the leaf and its new value.

    Each row is multiplied by the largest of all, so the update cannot go by rows.
    """

    def step(s, t, x):
        return s * s.max() + x.sum() + t.mean(), t.sum()

    leaf = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    told = r"what computes the gradients takes 1\.0MiB, and the largest update beside it 2\.0MiB"
    with pytest.raises(jaxmem.BudgetInfeasibleError, match=told) as error:
        fitted(step, host="s", budget=MIB).plan(leaf, leaf, X)
    smallest = error.value.smallest_bytes
    assert fitted(step, host="s", budget=smallest).plan(leaf, leaf, X).compiled_bytes <= smallest


class Stack(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k)) for k in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def fourth_copy_fails(patch):
    put, calls = jax.device_put, itertools.count()

    def broken(*args, **options):
        if next(calls) >= 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: pinned host memory")
        return put(*args, **options)

    patch.setattr(jax, "device_put", broken)


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_a_step_that_is_resumed_updates_the_modules(monkeypatch, fails: int):
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def run(interrupted: int | None):
        model = Stack()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)
        fitted = jaxmem.fit(
            step,
            budget="60MiB",
            target="h200",
            host="optimizer*",
            donate_argnums=(0, 1),
            progress=False,
        )
        fitted.place(model, optimizer, X)
        losses = []
        for n in range(5):
            if n != interrupted:
                losses.append(fitted(model, optimizer, X))
                continue
            with monkeypatch.context() as patch:
                fourth_copy_fails(patch)
                with pytest.raises(StepInterruptedError) as raised:
                    fitted(model, optimizer, X)
            losses.append(raised.value.resume())
        return losses, nnx.state(model), nnx.state(optimizer)

    assert_same(run(None), run(fails), multiple=0)
