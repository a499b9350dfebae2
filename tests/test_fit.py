"""The decorator as people use it: any way to write a step, any way to call it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxmem
from tests.problems import assert_same

WIDTH = 64
X = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)
ADAM = optax.adam(1e-2, eps=1e-3)

# Ten layers hold ten activations of 512 KiB; arguments and results are 0.6 MiB.
DEEP_ARGS = (jnp.eye(128) * 1.2, jnp.linspace(-1, 1, 2**17).reshape(1024, 128))
DEEP_BUDGET = "4.5MiB"


def deep(w, x):
    """A step that keeps 6.2 MiB as written."""

    def loss(w):
        y = x
        for _ in range(10):
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


@pytest.fixture(scope="module")
def planned_deep():
    """``deep`` fitted into less than it keeps as written; planned once for all tests."""
    fitted = jaxmem.fit(deep, budget=DEEP_BUDGET, progress=False)
    assert fitted.plan(*DEEP_ARGS).recomputed()
    return fitted


class Counted:
    """A function that counts how often Python runs it, that is how often it is traced."""

    def __init__(self, function):
        self.function, self.traces = function, 0
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.function(*args, **kwargs)


# --- decorator and call ------------------------------------------------------------------------


def test_decorator_with_and_without_options_and_call_form_are_the_same():
    @jaxmem.fit(budget="1MiB")
    def first(x):
        """Doubles."""
        return x * 2

    @jaxmem.fit
    def second(x):
        return x * 2

    third = jaxmem.fit(lambda x: x * 2, budget="1MiB")
    for fitted in (first, second, third):
        assert jnp.array_equal(fitted(X), X * 2)
    assert (first.__name__, first.__doc__) == ("first", "Doubles.")
    assert first.plan(X).function == "first"


def test_a_budget_below_keep_all_is_kept_and_computes_the_same(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    keep_all = jaxmem.analyze(deep, *DEEP_ARGS).compiled_bytes
    assert plan.compiled_bytes <= plan.budget_bytes == int(4.5 * 2**20) < keep_all
    assert plan.keep_all_compiled_bytes == keep_all
    assert_same(jax.jit(deep)(*DEEP_ARGS), planned_deep(*DEEP_ARGS))


def test_a_step_that_fits_is_left_as_written():
    plan = jaxmem.plan(deep, *DEEP_ARGS, budget="64MiB", progress=False)
    assert (plan.solver, plan.kept, len(plan.rounds)) == ("keep-all", (), 1)
    assert plan.predicted_seconds == plan.keep_all_seconds


def test_progress_tells_every_compile():
    said: list[str] = []
    plan = jaxmem.plan(deep, *DEEP_ARGS, budget=DEEP_BUDGET, progress=said.append)
    searches = [r for r in plan.rounds if r.name in ("search", "smallest")]
    assert len(searches) == sum("predicted" in text for text in said) > 0
    assert len(plan.rounds) <= 12


# --- functions that are jitted already ---------------------------------------------------------


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


# --- libraries ---------------------------------------------------------------------------------


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


# --- shapes ------------------------------------------------------------------------------------


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


# --- nothing runs before the call --------------------------------------------------------------


def test_planning_never_runs_the_step():
    ran: list[float] = []

    def step(w, x):
        jax.debug.callback(lambda value: ran.append(float(value)), x.sum())
        return deep(w, x)

    fitted = jaxmem.fit(step, budget=DEEP_BUDGET, progress=False)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), DEEP_ARGS)
    for args in (DEEP_ARGS, shapes):
        assert fitted.plan(*args).recomputed()
        assert fitted.lower(*args).compile().memory_analysis() is not None
        assert fitted.report(*args).compiled_bytes <= fitted.plan(*args).budget_bytes
        fitted.place(*args)
    jaxmem.analyze(step, *shapes)
    jax.effects_barrier()
    assert ran == []
    fitted(*DEEP_ARGS)
    jax.effects_barrier()
    assert ran == pytest.approx([float(DEEP_ARGS[1].sum())], abs=1e-2)


def test_place_returns_every_argument_as_it_is_used(planned_deep):
    placed = planned_deep.place(*DEEP_ARGS)
    assert_same(DEEP_ARGS, placed)
    assert_same(planned_deep(*DEEP_ARGS), planned_deep(*placed))


def test_what_lower_returns_is_what_is_run(planned_deep):
    compiled = planned_deep.lower(*DEEP_ARGS).compile()
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total = held + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert total == planned_deep.plan(*DEEP_ARGS).compiled_bytes
    assert_same(list(planned_deep(*DEEP_ARGS)), list(compiled(*DEEP_ARGS)), multiple=0)


# --- arguments and results ---------------------------------------------------------------------


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


def test_a_step_without_arguments_or_results():
    assert jaxmem.fit(lambda: jnp.arange(3), budget="1MiB")()[2] == 2
    assert jaxmem.fit(lambda x: None, budget="1MiB")(X) is None


def test_one_buffer_passed_twice_with_donation():
    def step(a, b):
        return a + 1, b * 2

    fitted = jaxmem.fit(step, budget="1MiB", donate_argnums=(0, 1))
    x = X + 0
    assert_same((X + 1, X * 2), fitted(x, x))


# --- methods -----------------------------------------------------------------------------------


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


# --- what is part of a signature ---------------------------------------------------------------


def test_static_arguments_of_equal_value_and_other_type_are_other_programs():
    fitted = jaxmem.fit(lambda x, factor: x * factor, budget="1MiB", static_argnums=1)
    x = jnp.arange(3)
    assert (fitted(x, 2).dtype, fitted(x, 2.0).dtype) == (jnp.int32, jnp.float32)
    flag = jaxmem.fit(lambda x, up: x + (1 if up is True else -1), budget="1MiB", static_argnums=1)
    assert (int(flag(x, 1)[0]), int(flag(x, True)[0])) == (-1, 1)


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


# --- plans used again --------------------------------------------------------------------------


def test_a_plan_that_was_changed_is_refused(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    first = plan.kept[0]
    for kept, message in (
        (dataclasses.replace(first, names=("nothing",)), "keeps nothing, which deep does not have"),
        (dataclasses.replace(first, turn=10**6), "which deep does not have"),
    ):
        changed = dataclasses.replace(plan, kept=(kept,))
        with pytest.raises(jaxmem.PlanMismatchError, match=message):
            jaxmem.fit(deep, budget=DEEP_BUDGET, plan=changed, progress=False)(*DEEP_ARGS)
    elsewhere = dataclasses.replace(plan, target="h200")
    with pytest.raises(jaxmem.PlanMismatchError, match="was made for h200, and this is cpu"):
        jaxmem.fit(deep, budget=DEEP_BUDGET, plan=elsewhere, progress=False)(*DEEP_ARGS)


def test_a_followed_plan_reports_the_budget_it_was_given(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    again = jaxmem.fit(deep, budget="32MiB", plan=plan, progress=False).plan(*DEEP_ARGS)
    assert again.budget_bytes == 32 * 2**20


def test_a_plan_is_followed_without_searching(planned_deep, tmp_path, monkeypatch):
    plan = planned_deep.plan(*DEEP_ARGS)
    plan.save(tmp_path / "plan.json")
    searched: list[int] = []
    from jaxmem.planner.search import Search

    monkeypatch.setattr(Search, "solve", lambda self, limit: searched.append(limit))
    loaded = jaxmem.Plan.load(tmp_path / "plan.json")
    again = jaxmem.fit(deep, budget=DEEP_BUDGET, plan=loaded, progress=False)
    followed = again.plan(*DEEP_ARGS)
    assert followed.kept == plan.kept
    assert followed.compiled_bytes == plan.compiled_bytes
    assert [r.name for r in followed.rounds] == ["as planned"]
    assert_same(planned_deep(*DEEP_ARGS), again(*DEEP_ARGS), multiple=0)
    assert searched == []


def test_a_plan_sets_no_options_but_those_of_jaxmem(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    assert dict(plan.options)
    changed = dataclasses.replace(plan, options=(("xla_dump_to", "/somewhere"),))
    with pytest.raises(jaxmem.PlanMismatchError, match="compiler options"):
        jaxmem.fit(deep, budget=DEEP_BUDGET, plan=changed, progress=False)(*DEEP_ARGS)


def test_a_keep_all_plan_is_followed():
    plan = jaxmem.plan(deep, *DEEP_ARGS, budget="64MiB", progress=False)
    again = jaxmem.fit(deep, budget="64MiB", plan=plan, progress=False)
    assert_same(jax.jit(deep)(*DEEP_ARGS), again(*DEEP_ARGS))


def test_a_plan_that_does_not_fit_the_budget_it_is_used_with(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    smaller = jaxmem.fit(deep, budget=plan.compiled_bytes - 1, plan=plan, progress=False)
    with pytest.raises(jaxmem.VerificationError, match=r"deep: the plan compiles to .* budget is"):
        smaller(*DEEP_ARGS)


# --- verify="full" -----------------------------------------------------------------------------


def test_full_verification_of_a_right_program(planned_deep):
    fitted = jaxmem.fit(deep, budget=DEEP_BUDGET, verify="full", donate_argnums=0, progress=False)
    w, x = jax.tree.map(jnp.copy, DEEP_ARGS)
    assert_same(planned_deep(*DEEP_ARGS), fitted(w, x))
    assert w.is_deleted(), "the copies it verified on were not the caller's"


def test_full_verification_of_complex_results():
    def step(x):
        y = jnp.fft.fft(x * (1 + 2j))
        return y, jnp.abs(y) > 1

    fitted = jaxmem.fit(step, budget="1MiB", verify="full")
    assert_same(jax.jit(step)(X), fitted(X))


def test_full_verification_of_a_wrong_program(monkeypatch):
    from jaxmem.rewrite.emit import as_function
    from jaxmem.runtime import compiler

    def wrong(block):
        run = as_function(block)
        return lambda *args: [out + 0.1 for out in run(*args)]

    monkeypatch.setattr(compiler, "as_function", wrong)
    for verify in (True, "full"):
        fitted = jaxmem.fit(deep, budget="64MiB", verify=verify, progress=False)
        if verify is True:
            assert fitted(*DEEP_ARGS)[0][0, 1] != jax.jit(deep)(*DEEP_ARGS)[0][0, 1]
            continue
        with pytest.raises(jaxmem.VerificationError, match=r"result \[0\] differs .* by"):
            fitted(*DEEP_ARGS)


def test_a_plan_of_a_fitted_step_takes_no_other_settings(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    assert jaxmem.plan(planned_deep, *DEEP_ARGS) == plan
    assert jaxmem.analyze(planned_deep, *DEEP_ARGS).compiled_bytes == plan.compiled_bytes
    with pytest.raises(jaxmem.ArgumentError, match=r"deep is fitted already .* own budget"):
        jaxmem.plan(planned_deep, *DEEP_ARGS, budget="1GiB")
    with pytest.raises(jaxmem.ArgumentError, match="own target, donate_argnums"):
        jaxmem.analyze(planned_deep, *DEEP_ARGS, target="h200", donate_argnums=0)


def test_threads_that_call_first_at_once_plan_once():
    traces: list[int] = []

    def step(x):
        traces.append(1)
        return jnp.tanh(x).sum()

    fitted = jaxmem.fit(step, budget="1MiB", progress=False)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(fitted, [jnp.ones(8)] * 8))
    assert len(traces) == 1
    assert_same(results, [step(jnp.ones(8))] * 8)
