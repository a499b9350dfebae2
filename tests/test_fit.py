"""The decorator as people use it: fitting, planning, placing, threads."""

from __future__ import annotations

import concurrent.futures

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from tests.fitted_steps import DEEP_ARGS, DEEP_BUDGET, X, deep
from tests.problems import assert_same

pytestmark = pytest.mark.default_code

# --- decorator and call --------------------------------------------------------------------------


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


# --- nothing runs before the call ----------------------------------------------------------------


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
