"""Calls taken apart: where every leaf sits, what is donated, and which calls share a step."""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.program.calling import Call, Caller

X = jnp.ones((2, 3))


class State(NamedTuple):
    w: jax.Array
    rest: dict


def step(state, batch, *more, scale=1.0, **kwargs):
    return state


def take(*args, donate=(), static=(), fun=step, **kwargs) -> Call:
    return Caller(fun, donate, static).take(args, kwargs)


def test_paths_are_those_of_the_signature():
    call = take(State(X, {"m": [X, X]}), (X,), X, scale=2.0, mask={"a": X})
    assert call.paths == (
        "state.w",
        "state.rest['m'][0]",
        "state.rest['m'][1]",
        "batch[0]",
        "args[2]",
        "mask['a']",
        "scale",
    )


def test_paths_of_nnx_objects():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    caller = Caller(lambda model, x: model(x))
    with jaxmem.program.nnx.context(((model, X), {})):
        paths = caller.take((model, X), {}).paths
    assert paths == ("model['bias'].value", "model['kernel'].value", "x")


@pytest.mark.parametrize(
    ("donate", "expected"),
    [((), "000"), (0, "110"), (1, "001"), (-1, "001"), ((0, 1), "111"), ((-2,), "110")],
)
def test_donation_covers_all_leaves_of_an_argument(donate, expected: str):
    call = take({"a": X, "b": X}, X, donate=donate, fun=lambda state, batch: state)
    assert "".join(str(int(flag)) for flag in call.donated) == expected


def test_donation_by_name():
    call = take(batch=X, state={"a": X}, donate=0, fun=lambda state, batch: state)
    assert dict(zip(call.paths, call.donated, strict=True)) == {"batch": False, "state['a']": True}


def test_static_arguments_are_no_leaves():
    call = take(X, "mode", fun=lambda x, mode: x, static=1)
    assert call.paths == ("x",)
    assert call.static == ((1, "mode"),)
    assert take(X, mode="mode", fun=lambda x, mode: x, static=1).static == (("mode", "mode"),)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (X + 1, True),
        (np.ones((2, 3), np.float32), True),
        (jax.ShapeDtypeStruct((2, 3), jnp.float32), True),
        (X.astype(jnp.float16), False),
        (X.T, False),
        ([X], False),
    ],
    ids=["values", "numpy", "abstract", "dtype", "shape", "tree"],
)
def test_which_calls_share_a_step(other, same: bool):
    caller = Caller(step)
    assert (caller.take((X, X), {}).key == caller.take((X, other), {}).key) is same


def test_weak_numbers_and_settings_are_other_signatures():
    caller = Caller(step)
    assert caller.take((1.0, X), {}).key != caller.take((np.float32(1), X), {}).key
    assert caller.take((1.0, X), {}).key == caller.take((2.5, X), {}).key
    plain = caller.take((X, X), {}).key
    with jax.default_matmul_precision("float32"):
        assert caller.take((X, X), {}).key != plain


def test_equinox_leaves_that_are_no_arrays_are_part_of_the_signature():
    def module(activation):
        return eqx.nn.MLP(3, 3, 3, 1, activation, key=jax.random.key(0))

    caller = Caller(lambda model, x: jax.vmap(model)(x))
    call = caller.take((module(jax.nn.relu), X), {})
    assert jax.nn.relu in call.fixed.values()
    assert all(isinstance(leaf, jax.Array) for leaf in call.leaves)
    assert call.key == caller.take((module(jax.nn.relu), X), {}).key
    assert call.key != caller.take((module(jnp.tanh), X), {}).key


def test_what_jit_was_told_is_kept():
    def inner(state, mode, x):
        return state

    jitted = functools.partial(jax.jit, static_argnums=1, donate_argnums=0)(inner)
    caller = Caller(jitted)
    call = caller.take((X, "mode", X), {})
    assert call.static == ((1, "mode"),)
    traced = caller.trace(call)
    assert [leaf.donated for leaf in traced.program.arguments] == [True, False]
    assert traced.program.name == "inner"


def test_results_are_put_back_into_their_tree():
    def nested(x):
        return {"b": (x, None), "a": State(x * 2, {"k": [x + 1]})}

    caller = Caller(nested)
    traced = caller.trace(caller.take((X,), {}))
    rebuilt = traced.rebuild([X, X + 1, X + 2], [X])
    assert isinstance(rebuilt["a"], State)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(nested(X))
    assert [leaf.path for leaf in traced.program.results] == [
        "['a'].w",
        "['a'].rest['k'][0]",
        "['b'][0]",
    ]


def test_a_callable_object_and_a_partial_can_be_fitted():
    class Adds:
        def __call__(self, x):
            return x + 1

    assert Caller(Adds()).name == "Adds"
    for fun in (Adds(), functools.partial(jnp.add, 1)):
        assert jnp.array_equal(jaxmem.fit(fun, budget="1MiB")(X), X + 1)
