"""Steps of Flax NNX, Flax Linen and Equinox, and fitted methods of their modules."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxmem
from tests.fitted_steps import ADAM, SHAPE, WIDTH, X
from tests.problems import assert_same

pytestmark = pytest.mark.default_code

# --- libraries -----------------------------------------------------------------------------------


class Net(nnx.Module):
    """Two layers that count their calls."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.second(jnp.tanh(self.first(x)))


def nnx_step(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return value


def nnx_objects():
    model = Net()
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def test_nnx_objects_are_mutated_as_with_nnx_jit():
    ours, reference = nnx_objects(), nnx_objects()
    fitted, jitted = jaxmem.fit(nnx_step, budget="4MiB"), nnx.jit(nnx_step)
    model = ours[0]
    for _ in range(3):
        assert_same(jitted(*reference, X), fitted(*ours, X))
    assert_same(nnx.state(reference), nnx.state(ours))
    assert ours[0] is model
    assert model.calls[...] == 3


def test_nnx_planning_changes_nothing():
    model, optimizer = nnx_objects()
    kernel = model.first.kernel[...]
    fitted = jaxmem.fit(nnx_step, budget="4MiB")
    fitted.plan(model, optimizer, SHAPE)
    fitted.report(model, optimizer, X)
    assert model.first.kernel[...] is kernel
    assert model.calls[...] == 0


def test_nnx_structure_changes_reach_the_callers_object():
    def grow(model, x):
        model.extra = nnx.Variable(x.sum(0))
        model.shared = model.first
        return model(x)

    model = Net()
    out = jaxmem.fit(grow, budget="4MiB")(model, X)
    assert model.shared is model.first
    assert_same(X.sum(0), model.extra[...])
    assert_same(model(X), out)


def test_a_step_under_nnx_jit_is_fitted_as_the_step_inside():
    ours, reference = nnx_objects(), nnx_objects()
    fitted = jaxmem.fit(nnx.jit(nnx_step), budget="4MiB")
    assert_same(nnx.jit(nnx_step)(*reference, X), fitted(*ours, X))
    assert_same(nnx.state(reference), nnx.state(ours))


def test_a_linen_train_state():
    model = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH)])
    variables = model.init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=ADAM)

    def step(state, x):
        def loss(params):
            return (state.apply_fn({"params": params}, x) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    new, value = jaxmem.fit(step, budget="4MiB")(state, X)
    assert isinstance(new, TrainState)
    assert_same(jax.jit(step)(state, X), (new, value))
    assert int(new.step) == 1


def test_an_equinox_module_with_functions_for_leaves():
    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, jax.nn.silu, key=jax.random.key(0))

    def step(model, x):
        value, grads = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        return eqx.apply_updates(model, grads), value

    new, value = jaxmem.fit(step, budget="4MiB")(model, X)
    assert new.activation is model.activation
    expected = eqx.filter_jit(step)(model, X)
    assert_same(eqx.filter(expected, eqx.is_array), eqx.filter((new, value), eqx.is_array))


# --- methods -------------------------------------------------------------------------------------


class Trainer:
    """No pytree: it must be static."""

    rate = 0.5

    @functools.partial(jaxmem.fit, budget="1MiB", static_argnums=0)
    def step(self, x):
        return x * self.rate


def test_a_fitted_method_of_a_plain_object():
    trainer = Trainer()
    assert_same(X * 0.5, trainer.step(X))
    assert trainer.step.plan(SHAPE).function == "step"
    assert trainer.step.report(SHAPE).function == "step"
    assert trainer.step.lower(X).compile().memory_analysis() is not None
    assert_same((X,), trainer.step.place(np.asarray(X)))
    assert jaxmem.plan(trainer.step, SHAPE) == trainer.step.plan(SHAPE)


def test_a_fitted_method_of_a_module():
    class Module(eqx.Module):
        factor: jax.Array

        @jaxmem.fit(budget="1MiB")
        def scaled(self, x):
            return x * self.factor

    assert_same(X * 3, Module(jnp.float32(3)).scaled(X))


def test_placing_a_module_keeps_what_it_shares():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.second = self.first

        def __call__(self, x):
            return self.second(self.first(x))

    model = Tied(nnx.Rngs(0))
    fitted = jaxmem.fit(lambda model, x: model(x).sum(), budget="1MiB")
    placed, x = fitted.place(model, np.ones((2, 4), np.float32))
    assert placed is model
    assert placed.first is placed.second
    assert isinstance(x, jax.Array)


def test_flags_and_numbers_of_equinox_modules_are_python_values():
    class Scaled(eqx.Module):
        weight: jax.Array
        times: float
        twice: bool

        def __call__(self, x):
            return x * self.weight * self.times * (2 if self.twice else 1)

    model = Scaled(jnp.float32(3), 0.5, True)
    fitted = jaxmem.fit(lambda model, x: (model, model(x)), budget="1MiB")
    returned, y = fitted(model, X)
    assert_same(X * 3, y)
    assert (type(returned.times), type(returned.twice)) == (float, bool)
    dropout = eqx.nn.Sequential([eqx.nn.Dropout(0.5)])

    def drop(model, x, key):
        return model(x, key=key)

    key = jax.random.key(0)
    assert_same(
        eqx.filter_jit(drop)(dropout, X, key), jaxmem.fit(drop, budget="1MiB")(dropout, X, key)
    )
