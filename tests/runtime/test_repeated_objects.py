"""Repeated calls with Flax NNX objects: what the caller holds is what the step changed."""

from __future__ import annotations

import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.fitted_steps import roomy as fit

X = jnp.linspace(-1, 1, 8 * 16).reshape(8, 16)


def test_a_variable_that_is_returned_is_the_callers_own():
    def step(scale, x):
        scale[...] = scale[...] * 2
        return scale, x.sum()

    fitted = fit(step)
    scale = nnx.Param(jnp.ones(3))
    for n in range(4):
        returned, _ = fitted(scale, X)
        assert returned is scale
        assert scale[0] == 2.0 ** (n + 1)


def test_a_module_that_is_returned_is_the_callers_own():
    def step(model, x):
        model.kernel[...] = model.kernel[...] + 1
        return model, x.sum()

    fitted = fit(step)
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    for _ in range(6):
        assert fitted(model, X)[0] is model
    np.testing.assert_allclose(model.kernel[...], before + 6)


# --- what has changed since -----------------------------------------------------------------------


class Switch(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.full((16,), 2.0))
        self.double = False

    def __call__(self, x):
        return (x * self.weight[...] * (2 if self.double else 1)).sum()


def test_a_module_that_has_changed_is_seen(taken):
    fitted = fit(lambda model, x: model(x))
    model, ones = Switch(), jnp.ones((16,))
    assert [float(fitted(model, ones)) for _ in range(3)] == [32, 32, 32]
    assert taken() == 1
    model.double = True
    assert [float(fitted(model, ones)) for _ in range(2)] == [64, 64]
    assert taken() == 1
    model.weight = nnx.Param(jnp.full((16,), 3.0))
    assert float(fitted(model, ones)) == 96
    model.weight[...] = jnp.full((16,), 5.0)
    assert float(fitted(model, ones)) == 160
    model.weight = nnx.Param(jnp.full((16,), 3.0), tag="frozen")
    taken()
    assert float(fitted(model, ones)) == 96
    assert taken() == 1
    model.double = False
    taken()
    assert float(fitted(model, ones)) == 48


def test_weights_that_are_tied_later_are_seen():
    def step(pair, x):
        pair["a"].kernel[...] = pair["a"].kernel[...] + 1
        return (pair["b"].kernel[...] * x).sum()

    fitted = fit(step)
    pair = {name: nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0)) for name in "ab"}
    for linear in pair.values():
        linear.kernel[...] = jnp.zeros((1, 1))
    one = jnp.ones((1, 1))
    assert [float(fitted(pair, one)) for _ in range(3)] == [0, 0, 0]
    pair["b"] = pair["a"]
    assert [float(fitted(pair, one)) for _ in range(3)] == [4, 5, 6]


def test_variables_that_swap_what_they_hold_still_do():
    def step(a, b):
        a[...], b[...] = b[...], a[...]

    fitted = fit(step)
    a, b = nnx.Param(jnp.zeros(2)), nnx.Param(jnp.ones(2))
    for n in range(5):
        fitted(a, b)
        assert a[0] == (n + 1) % 2
        assert b[0] == n % 2


def test_a_step_that_counts_in_python_still_does():
    def step(model, x):
        model.calls = model.calls + 1
        return x * model.calls

    model = Switch()
    model.calls = 0
    fitted = fit(step)
    assert [float(fitted(model, jnp.ones(()))) for _ in range(4)] == [1, 2, 3, 4]


# --- objects that are no tree of modules with variables as leaves --------------------------------


class Raw(nnx.Module):
    def __init__(self):
        self.weight = nnx.data(jnp.zeros(3))


def test_arrays_that_are_no_variables_are_updated():
    def step(module, x):
        module.weight = module.weight + x
        return x.sum()

    fitted = fit(step, donate_argnums=0)
    module = Raw()
    for n in range(5):
        fitted(module, jnp.ones(3))
        np.testing.assert_array_equal(module.weight, np.full(3, n + 1.0))


def test_a_module_without_arrays_is_the_callers_own():
    class Empty(nnx.Module):
        pass

    fitted = fit(lambda module, x: (module, x * 2))
    module = Empty()
    assert all(fitted(module, X)[0] is module for _ in range(4))


class Linked(nnx.Module):
    def __init__(self, parent=None):
        self.weight = nnx.Param(jnp.full(2, 2.0))
        self.parent = nnx.data(parent)


def test_objects_that_hold_each_other_are_taken():
    parent = Linked()
    parent.parent = nnx.data(Linked(parent))

    def step(module, x):
        module.weight[...] = module.parent.weight[...] + 1
        return (module.parent.parent.weight[...] * x).sum()

    fitted = fit(step)
    for _ in range(4):
        assert fitted(parent, jnp.ones(2)) == 6


def test_shared_modules_are_opened_once():
    class Twice(nnx.Module):
        def __init__(self, inner):
            self.a = self.b = inner

    module = Linked()
    for _ in range(40):  # 2**40 paths
        module = Twice(module)
    fitted = fit(lambda module, x: x * 2)
    for _ in range(3):
        assert fitted(module, jnp.ones(())) == 2


@pytest.mark.parametrize("pytree", [True, False])
def test_modules_that_jax_does_not_open_are_taken(pytree):
    class Closed(nnx.Module, pytree=pytree):
        def __init__(self, value):
            self.weight = nnx.Param(value)

    def step(module, x):
        module.weight[...] = module.weight[...] + x
        return module.weight[...].sum()

    fitted = fit(step)
    module = Closed(jnp.zeros(1))
    assert [float(fitted(module, jnp.ones(1))) for _ in range(4)] == [1, 2, 3, 4]


def test_results_that_jax_does_not_open_are_made_anew():
    class Closed(nnx.Module, pytree=False):
        def __init__(self, value):
            self.weight = nnx.Param(value)

    class Empty(nnx.Module):
        pass

    fitted = fit(lambda module, x: Closed(x * 2))
    module = Empty()
    found = [fitted(module, jnp.full(1, n)).weight[0] for n in range(4)]
    assert found == [0, 2, 4, 6]


def test_which_modules_are_the_same_is_seen():
    class Empty(nnx.Module):
        pass

    def step(pair, x):
        return x * (2 if pair["a"] is pair["b"] else 3)

    fitted = fit(step)
    one, other = Empty(), Empty()
    assert [float(fitted({"a": one, "b": other}, 1.0)) for _ in range(3)] == [3, 3, 3]
    assert [float(fitted({"a": one, "b": one}, 1.0)) for _ in range(3)] == [2, 2, 2]


def test_a_new_variable_in_two_places_is_one():
    def step(scale, x):
        new = nnx.Param(x * scale[...])
        return {"a": new, "b": new}

    fitted = fit(step)
    scale = nnx.Param(jnp.ones(()))
    for _ in range(4):
        found = fitted(scale, X)
        assert found["a"] is found["b"]


def test_nothing_is_kept_alive():
    fitted = fit(lambda model, x: model(x))
    model = Switch()
    for _ in range(3):
        fitted(model, jnp.ones((16,)))
    gone = weakref.ref(model.weight.get_raw_value())
    del model
    gc.collect()
    assert gone() is None
