"""Any way to call a step: static, donated and named arguments, and when it is planned anew."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.fitted_steps import DEEP_ARGS, SHAPE, WIDTH, Counted, X, deep
from tests.problems import assert_same

# --- functions that are jitted already -----------------------------------------------------------


def test_a_jitted_function_keeps_its_static_and_donated_arguments():
    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def step(x, times):
        return functools.reduce(lambda y, _: y + 1, range(times), x)

    fitted = jaxmem.fit(step, budget="1MiB")
    x = jnp.zeros((WIDTH, WIDTH))
    assert fitted(x, 3)[0, 0] == 3
    assert x.is_deleted()
    assert fitted.plan(jnp.zeros((WIDTH, WIDTH)), 2).aliased_bytes == WIDTH * WIDTH * 4


def test_a_jitted_function_keeps_its_static_names():
    @functools.partial(jax.jit, static_argnames="mode")
    def step(x, mode):
        return x + 1 if mode == "up" else x - 1

    fitted = jaxmem.fit(step, budget="1MiB")
    assert fitted(X, mode="up")[0, 0] == X[0, 0] + 1
    assert fitted(X, mode="down")[0, 0] == X[0, 0] - 1


def test_static_arguments_by_position_and_by_name_are_part_of_the_program():
    fitted = jaxmem.fit(
        lambda x, mode, scale: x * scale if mode == "times" else x + scale,
        budget="1MiB",
        static_argnums=1,
    )
    assert fitted(X, "times", 3.0)[0, 0] == X[0, 0] * 3
    assert fitted(X, mode="plus", scale=3.0)[0, 0] == X[0, 0] + 3
    assert fitted(X, mode="times", scale=3.0)[0, 0] == X[0, 0] * 3


def test_donation_counts_the_shared_bytes_once_and_takes_the_buffer():
    def step(state, x):
        return {"w": state["w"] + x}, x.sum()

    plain = jaxmem.plan(step, {"w": SHAPE}, SHAPE, budget="1MiB")
    donating = jaxmem.fit(step, budget="1MiB", donate_argnums=0)
    plan = donating.plan({"w": SHAPE}, SHAPE)
    assert plain.compiled_bytes - plan.compiled_bytes == X.nbytes
    state = {"w": X + 0}
    donating(state, X)
    assert state["w"].is_deleted()
    assert not X.is_deleted()


# --- shapes --------------------------------------------------------------------------------------


def test_new_shapes_are_planned_anew_and_old_ones_never_traced_again():
    step = Counted(deep)
    fitted = jaxmem.fit(step, budget="64MiB", progress=False)
    w, x = DEEP_ARGS
    for _ in range(3):
        fitted(w, x)
        fitted.plan(w, jax.ShapeDtypeStruct(x.shape, x.dtype))
        fitted.report(w, x)
    assert step.traces == 1
    assert fitted(w, x[:512])[1].shape == ()
    assert step.traces == 2
    assert fitted.plan(w, x[:512]) != fitted.plan(w, x)
    fitted(w, x)
    assert step.traces == 2


@pytest.mark.parametrize(
    "other", [X.astype(jnp.bfloat16), X[:2], {"x": X}, 1.0], ids=["dtype", "shape", "tree", "weak"]
)
def test_what_makes_another_signature(other):
    step = Counted(lambda x: jax.tree.map(lambda leaf: leaf * 2, x))
    fitted = jaxmem.fit(step, budget="1MiB")
    for argument in (X, other, X + 1, other):
        assert_same(jax.jit(step.function)(argument), fitted(argument))
    assert step.traces == 2


def test_settings_that_change_the_program_are_part_of_the_signature():
    fitted = jaxmem.fit(lambda x: x * 2, budget="1MiB")
    assert fitted(np.ones(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert fitted(np.ones(3)).dtype == jnp.float64


# --- arguments and results -----------------------------------------------------------------------


def test_keyword_arguments_and_defaults():
    def step(x, *, scale, batch=None):
        return (x * scale, None if batch is None else batch["y"] + scale)

    fitted = jaxmem.fit(step, budget="1MiB")
    assert_same(step(X, scale=X), fitted(X, scale=X))
    batch = {"y": X + 1}
    assert_same(step(X, scale=X, batch=batch), fitted(X, batch=batch, scale=X))


def test_donated_arguments_may_be_passed_by_name():
    fitted = jaxmem.fit(lambda x, state: state + x, budget="1MiB", donate_argnums=1)
    state = X + 0
    fitted(X, state=state)
    assert state.is_deleted()


def test_more_positional_arguments_than_names():
    fitted = jaxmem.fit(lambda *xs: sum(xs), budget="1MiB", donate_argnums=2)
    last = X + 0
    assert_same(3 * X, fitted(X, X + 0, last))
    assert last.is_deleted()


@pytest.mark.parametrize("number", [3, 2.5, True, 1j, np.float32(2), np.arange(3)])
def test_python_and_numpy_numbers_come_out_as_under_jit(number):
    def step(x, number):
        return x[0, :3] * number, number, number + number

    expected, found = jax.jit(step)(X, number), jaxmem.fit(step, budget="1MiB")(X, number)
    assert_same(expected, found)
    weak = [[leaf.weak_type for leaf in leaves] for leaves in (expected, found)]
    assert weak[0] == weak[1]


def test_arguments_that_are_returned_as_they_are():
    def step(state, x, key):
        return {"w": state["w"] + 1, "frozen": state["frozen"]}, x, key, state["frozen"]

    args = ({"w": X, "frozen": X + 3}, X * 2, jax.random.key(1))
    for donate in ((), (0,)):
        fitted = jaxmem.fit(step, budget="1MiB", donate_argnums=donate)
        fresh = jax.tree.map(jnp.copy, args)
        assert_same(step(*args), fitted(*fresh), multiple=0)
    plan = jaxmem.plan(step, *args, budget="1MiB")
    compiled = jax.jit(step).lower(*args).compile().memory_analysis()
    assert plan.output_bytes == compiled.output_size_in_bytes, "as with jax.jit"


def test_donating_a_result_leaves_the_argument_it_was():
    step = jaxmem.fit(lambda params, frozen: (params + 1, frozen), budget="1MiB")
    consume = jaxmem.fit(lambda x: x * 2, budget="1MiB", donate_argnums=0)
    _, handed_through = step(X, X + 0)
    kept = X + 0
    _, handed_through = step(X, kept)
    assert handed_through is not kept
    consume(handed_through)
    assert jnp.array_equal(kept, X)


def test_results_that_are_constants_or_repeated():
    captured = np.linspace(0, 1, WIDTH, dtype=np.float32)

    def step(x):
        y = x + captured
        return y, y, 2.0, jnp.zeros(3), None, captured

    assert_same(jax.jit(step)(X), jaxmem.fit(step, budget="1MiB")(X), multiple=0)


def test_gradients_of_integers_beside_a_lookup_are_planned_and_returned():
    """The zeros of a float0 are like no number, and a lookup's gradient adds to zeros."""

    def loss(table, rows):
        return jnp.square(table[rows] * table[rows].sum()).mean()

    def step(table, rows):
        grads = jax.grad(loss, argnums=(0, 1), allow_int=True)(table, rows)
        return table - grads[0], grads[1]

    args = X, jnp.arange(4)
    made, expected = jaxmem.fit(step, budget="1MiB")(*args), jax.jit(step)(*args)
    assert_same(expected[0], made[0])
    assert made[1].dtype == expected[1].dtype == jax.dtypes.float0
    assert made[1].shape == (4,)


def test_a_step_without_arguments_or_results():
    assert jaxmem.fit(lambda: jnp.arange(3), budget="1MiB")()[2] == 2
    assert jaxmem.fit(lambda x: None, budget="1MiB")(X) is None


def test_one_buffer_passed_twice_with_donation():
    def step(a, b):
        return a + 1, b * 2

    fitted = jaxmem.fit(step, budget="1MiB", donate_argnums=(0, 1))
    x = X + 0
    assert_same((X + 1, X * 2), fitted(x, x))


# --- what is part of a signature -----------------------------------------------------------------


def test_static_arguments_of_equal_value_and_other_type_are_other_programs():
    fitted = jaxmem.fit(lambda x, factor: x * factor, budget="1MiB", static_argnums=1)
    x = jnp.arange(3)
    assert (fitted(x, 2).dtype, fitted(x, 2.0).dtype) == (jnp.int32, jnp.float32)
    flag = jaxmem.fit(lambda x, up: x + (1 if up is True else -1), budget="1MiB", static_argnums=1)
    assert (int(flag(x, 1)[0]), int(flag(x, True)[0])) == (-1, 1)


def test_rank_promotion_is_checked_when_the_setting_changes():
    fitted = jaxmem.fit(lambda x, y: x + y, budget="1MiB")
    fitted(X, X[0])
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        fitted(X, X[0])


def test_a_negative_argument_number_counts_from_the_last_parameter():
    fitted = jaxmem.fit(lambda x, y, z=3: (x + 1, y + 2), budget="1MiB", donate_argnums=-1)
    x, y = X + 0, X + 0
    fitted(x, y)
    assert not (x.is_deleted() or y.is_deleted())


def test_an_array_that_is_captured_and_donated():
    captured = X + 0
    fitted = jaxmem.fit(lambda x: x + captured, budget="1MiB", donate_argnums=0)
    assert_same(2 * X, fitted(captured))


def test_under_disable_jit_a_step_runs_as_written():
    seen = []
    fitted = jaxmem.fit(lambda x: seen.append(type(x)) or x * 2, budget="1MiB")
    with jax.disable_jit():
        assert_same(X * 2, fitted(X))
    assert not issubclass(seen[0], jax.core.Tracer)
