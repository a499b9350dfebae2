"""Arguments and options that make no sense: each error says what to do instead."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.targets import Target, compile_for, topology
from jaxmem.units import KIB

X = jnp.ones((64, 64))
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def double(x):
    return x * 2


def update(state, batch):
    return {"w": state["w"] + batch}, batch.sum()


@pytest.mark.parametrize(
    ("argument", "shown"),
    [("a.txt", "str ('a.txt')"), (object, "type"), ({1, 2}, "set ({1, 2})"), (b"x", "bytes")],
)
def test_an_argument_that_is_no_array_is_named(argument, shown: str):
    def step(x, options):
        return x

    with pytest.raises(jaxmem.ArgumentError) as caught:
        jaxmem.fit(step, budget="1MiB").plan(X, {"deep": [argument]})
    message = str(caught.value)
    assert message.startswith(f"argument options['deep'][0] of step is a {shown}")
    assert "static_argnums" in message


def test_a_dataclass_that_is_no_pytree_says_how_it_becomes_one():
    @dataclasses.dataclass
    class State:
        w: jax.Array

    told = r"argument state of <lambda> is a State .* jax\.tree_util\.register_dataclass"
    with pytest.raises(jaxmem.ArgumentError, match=told):
        jaxmem.fit(lambda state: state.w * 2)(State(jnp.ones(300)))
    jax.tree_util.register_dataclass(State)
    found = jaxmem.fit(lambda state: State(state.w * 2), progress=False)(State(jnp.ones(3)))
    np.testing.assert_array_equal(found.w, 2)


@pytest.mark.parametrize(
    ("flag", "result", "message"),
    [
        ("jax_debug_nans", lambda x: jnp.log(x - 2), r"invalid value \(nan\) .* of <lambda>"),
        ("jax_debug_infs", lambda x: 1 / (x - 1), r"invalid value \(inf\) .* of <lambda>"),
    ],
)
def test_what_debugging_finds_is_the_error_that_jit_has(flag: str, result, message: str):
    found = jaxmem.fit(lambda x: result(x), progress=False)
    found(X + 2)
    jax.config.update(flag, True)
    try:
        for _ in range(2):
            with pytest.raises(FloatingPointError, match=message):
                found(X)
        found(X + 2)
    finally:
        jax.config.update(flag, False)


def test_debugging_looks_at_results_however_the_program_was_called_before():
    """Once JAX has compiled for another backend, its own look is at first calls only."""

    def step(x):
        return {"low": jnp.log(x - 2).astype(jnp.bfloat16), "key": jax.random.key(0), "n": 1}

    with topology.tracing_for(Target("h200")):
        compile_for("h200", lambda x: jnp.log(x), [SHAPE])
    found = jaxmem.fit(step, progress=False)
    for _ in range(3):
        found(X + 2)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) .* of step"):
        found(X)
    assert jnp.isnan(found(X)["low"]).all()


def test_an_abstract_argument_can_be_planned_on_and_not_run():
    fitted = jaxmem.fit(update, budget="1MiB")
    assert fitted.plan({"w": SHAPE}, SHAPE).solver == "keep-all"
    message = r"argument state\['w'\] of update is a ShapeDtypeStruct, which has no data\. Plan on"
    with pytest.raises(jaxmem.AbstractCallError, match=message):
        fitted({"w": SHAPE}, X)
    with pytest.raises(jaxmem.AbstractCallError, match="argument batch of update"):
        fitted({"w": X}, SHAPE)


def test_a_donated_buffer_cannot_be_used_again():
    fitted = jaxmem.fit(update, budget="1MiB", donate_argnums=0)
    state = {"w": jnp.ones((64, 64))}
    new, _ = fitted(state, X)
    message = r"argument state\['w'\] of update was donated to an earlier call .* Use the state"
    with pytest.raises(jaxmem.DonatedBufferError, match=message):
        fitted(state, X)
    assert fitted(new, X)[0]["w"][0, 0] == 3
    with pytest.raises(jaxmem.DonatedBufferError, match="was donated"):
        jaxmem.fit(double, budget="1MiB")(state["w"])


def test_a_fitted_step_is_not_transformed_again():
    fitted = jaxmem.fit(double, budget="1MiB")
    for transformed in (jax.jit(fitted), jax.vmap(fitted), jax.grad(lambda x: fitted(x).sum())):
        with pytest.raises(jaxmem.ArgumentError, match="transform the plain function, then fit"):
            transformed(X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"donate_argnums": 2}, "there is no argument 2 of update, which takes 2"),
        ({"static_argnums": -3}, "there is no argument -3 of update, which takes 2"),
        ({"donate_argnums": 0, "static_argnums": 0}, "argument 0 of update is both static and"),
        ({"donate_argnums": 1, "static_argnums": -1}, "argument 1 of update is both static and"),
    ],
)
def test_argument_numbers_that_make_no_sense(options: dict, message: str):
    with pytest.raises(jaxmem.ArgumentError, match=message):
        jaxmem.fit(update, budget="1MiB", **options)


def test_a_static_argument_must_be_hashable():
    with pytest.raises(jaxmem.ArgumentError, match="static argument 1 is a list, which cannot be"):
        jaxmem.fit(lambda x, sizes: x, budget="1MiB", static_argnums=1)(X, [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "ful"}, "verify is 'ful': it takes True, False or \"full\""),
        ({"plan": {}}, "plan is a dict: it takes a jaxmem.Plan"),
        ({"plan": "plan.json"}, "plan is a str: it takes a jaxmem.Plan"),
        ({"donate_argnums": "W"}, "donate_argnums is 'W': it takes the number of an argument"),
        ({"static_argnums": None}, "static_argnums is None: it takes the number of an argument"),
    ],
)
def test_options_are_checked_when_a_step_is_fitted(options, message: str):
    with pytest.raises(jaxmem.ArgumentError, match=re.escape(message)):
        jaxmem.fit(double, budget="1MiB", **options)


def test_a_target_is_checked_when_a_step_is_fitted():
    with pytest.raises(jaxmem.UnknownTargetError, match="no target is called 'h999'"):
        jaxmem.fit(double, budget="1MiB", target="h999")


def test_a_step_is_fitted_once():
    with pytest.raises(jaxmem.ArgumentError, match="double is fitted already: fit it once"):
        jaxmem.fit(jaxmem.fit(double, budget="1MiB"), budget="1MiB")


def test_shardings_of_nnx_jit_are_not_lost_silently():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(jaxmem.ArgumentError, match=r"under nnx.jit with in_shardings or out_shard"):
        jaxmem.fit(nnx.jit(double, out_shardings=sharding), budget="1MiB")


def test_an_array_of_strings_is_named():
    with pytest.raises(jaxmem.ArgumentError, match="argument x of double is a ndarray"):
        jaxmem.fit(double, budget="1MiB")(np.array(["a"]))


def test_captured_arrays_are_named_among_what_fills_memory():
    captured = jnp.ones((512, 512))
    with pytest.raises(jaxmem.BudgetInfeasibleError) as caught:
        jaxmem.plan(lambda x: x + captured, captured, budget="64KiB", progress=False)
    assert "array [512, 512] that the step closes over (1.0MiB, constant)" in str(caught.value)
    assert "as an argument" in str(caught.value)


def test_no_budget_is_named_that_the_device_does_not_have():
    small = jaxmem.Target("cpu", device_bytes=20 * KIB)
    with pytest.raises(jaxmem.BudgetInfeasibleError, match=r"a target with 32\.0KiB or more"):
        jaxmem.plan(double, X, budget="8KiB", target=small, progress=False)


def test_what_is_no_function_is_refused():
    with pytest.raises(jaxmem.ArgumentError, match="jaxmem needs a function, got int: 3"):
        jaxmem.fit(3, budget="1MiB")
    compiled = jax.jit(double).lower(X).compile()
    with pytest.raises(jaxmem.ArgumentError, match="is compiled: pass what it was compiled from"):
        jaxmem.analyze(compiled, X)


def test_full_verification_of_a_step_with_effects_is_refused():
    def prints(x):
        jax.debug.print("{}", x.sum())
        return x * 2

    message = r"it has effects .* would then happen twice"
    with pytest.raises(jaxmem.VerificationError, match=message):
        jaxmem.fit(prints, budget="1MiB", verify="full")(X)


@pytest.mark.parametrize(("told", "instead"), [("plan", "plan"), ("analyze", "report")])
def test_a_setting_that_only_fit_has_is_no_argument_of_the_step(told: str, instead: str):
    with pytest.raises(jaxmem.ArgumentError) as caught:
        getattr(jaxmem, told)(double, X, host="*")
    message = str(caught.value)
    assert f"host= is a setting of jaxmem.fit and not of jaxmem.{told}" in message
    assert f"jaxmem.fit(double, host=...).{instead}(...)" in message


def test_an_argument_of_the_step_may_have_the_name_of_a_setting():
    assert jaxmem.plan(lambda x, host: x * host, X, host=X).budget_bytes > 0
    assert jaxmem.plan(lambda x, **more: x * more["host"], X, host=X).budget_bytes > 0
