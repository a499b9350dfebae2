"""NNX modules taken apart: an ``nnx.State`` is a pytree like any other, as under ``jax.jit``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from tests.problems import assert_same

X = jnp.linspace(-1, 1, 8 * 64).reshape(8, 64)


def parts():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return nnx.split(model)


GRAPH, _ = parts()


def sgd(state, x):
    def loss(state):
        return (nnx.merge(GRAPH, state)(x) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def test_a_donated_state_is_not_kept_beside_the_new_one():
    plan = jaxmem.plan(sgd, parts()[1], X, donate_argnums=0)
    assert plan.output_bytes < plan.aliased_bytes + 100  # XLA:CPU counts pointers to results.
    assert plan.aliased_bytes == (64 * 64 + 64) * 4


def test_a_state_that_is_read_is_no_result():
    plan = jaxmem.plan(lambda state, x: nnx.merge(GRAPH, state)(x).sum(), parts()[1], X)
    assert plan.output_bytes == 4


def test_a_module_that_is_read_keeps_its_arrays():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    step = jaxmem.fit(lambda model, x: model(x).sum(), progress=False)
    assert step.plan(model, X).output_bytes == 4
    kernel = model.kernel[...]
    step(model, X)
    assert model.kernel[...] is kernel


class Pair(nnx.Module):
    def __init__(self):
        self.a, self.b = (nnx.Linear(64, 64, rngs=nnx.Rngs(n)) for n in range(2))


def copies(pair, x):
    pair.a.kernel[...] = pair.b.kernel[...]
    return pair.a(x).sum()


def swaps(pair, x):
    pair.a, pair.b = pair.b, pair.a
    return pair.a(x).sum()


def keeps_an_argument(pair, x):
    pair.seen = nnx.Variable(x)
    return pair.a(x).sum()


@pytest.mark.parametrize("step", [copies, swaps, keeps_an_argument])
def test_no_two_variables_share_an_array(step):
    pair, expected, x = Pair(), Pair(), X + 0
    np.testing.assert_allclose(
        jaxmem.fit(step, progress=False)(pair, x), nnx.jit(step)(expected, x), rtol=1e-6
    )
    assert_same(jax.tree.leaves(nnx.state(expected)), jax.tree.leaves(nnx.state(pair)))
    held = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((nnx.state(pair), x))]
    assert len(set(held)) == len(held)


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_steps_are_those_of_jit(donated):
    step = jaxmem.fit(sgd, donate_argnums=donated, progress=False)
    state, expected = step.place(parts()[1], X)[0], parts()[1]
    for _ in range(3):
        given = state
        state, loss = step(state, X)
        expected, reference = jax.jit(sgd)(expected, X)
        np.testing.assert_allclose(loss, reference, rtol=1e-6)
        assert isinstance(state, nnx.State)
        gone = [leaf.is_deleted() for leaf in jax.tree.leaves(given)]
        assert all(gone) if donated else not any(gone)
    assert_same(jax.tree.leaves(expected), jax.tree.leaves(state))


def test_what_a_step_changes_in_a_variable_is_the_callers():
    def count(variable, other, x):
        variable[...] = variable[...] + x.sum()
        return other[...] * 2

    counter, other = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.ones(3))
    step = jaxmem.fit(count, progress=False)
    for _ in range(2):
        result = step(counter, other, jnp.ones(5))
    assert counter[...] == 10
    assert_same(result, jnp.full(3, 2.0))
    assert_same(other[...], jnp.ones(3))


def test_arrays_of_variables_are_placed():
    variable = nnx.Variable(np.ones(3))
    step = jaxmem.fit(lambda tree: tree["a"][...] * 2, progress=False)
    assert step.place({"a": variable})[0]["a"] is variable
    assert isinstance(variable[...], jax.Array)
