"""Plans used again, and steps that are compared with the step as written."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.runtime.compiler import Compiler
from jaxmem.targets import Target
from jaxmem.targets.options import memory_schedules
from tests.fitted_steps import DEEP_ARGS, DEEP_BUDGET, X, deep
from tests.planner.lines import program
from tests.problems import assert_same

# --- plans used again ----------------------------------------------------------------------------


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


def test_a_damaged_option_is_a_plan_mismatch(planned_deep):
    data = json.loads(planned_deep.plan(*DEEP_ARGS).to_json())
    data["options"] = [[["x"], "b"]]
    with pytest.raises(jaxmem.PlanMismatchError, match=r"options\[0\]\[0\] is a list, not text"):
        jaxmem.Plan.from_json(json.dumps(data))


def test_a_keep_all_plan_is_compiled_with_its_own_options():
    """Whatever the budget of the step that follows it would have chosen."""

    def step(x):
        return sum((y @ y).sum() for y in [jnp.sin(x @ x * n) for n in range(6)])

    x = jnp.ones((128, 128))
    plain = jaxmem.plan(step, x, progress=False)
    compiler = Compiler(program(step, x), Target("cpu"))
    for options in ({}, *memory_schedules(Target("cpu"))):
        plan = dataclasses.replace(plain, options=tuple(options.items()))
        followed = jaxmem.fit(step, budget="1MiB", plan=plan, progress=False).plan(x)
        expected = compiler.compile(None, options=options).memory.total_bytes
        assert (followed.options, followed.compiled_bytes) == (plan.options, expected)
    with pytest.raises(jaxmem.VerificationError, match="Plan again"):
        jaxmem.fit(step, budget="128KiB", plan=plain, progress=False).plan(x)


def test_a_keep_all_plan_is_followed():
    plan = jaxmem.plan(deep, *DEEP_ARGS, budget="64MiB", progress=False)
    again = jaxmem.fit(deep, budget="64MiB", plan=plan, progress=False)
    assert_same(jax.jit(deep)(*DEEP_ARGS), again(*DEEP_ARGS))


def test_a_plan_that_does_not_fit_the_budget_it_is_used_with(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    smaller = jaxmem.fit(deep, budget=plan.compiled_bytes - 1, plan=plan, progress=False)
    with pytest.raises(jaxmem.VerificationError, match=r"deep: the plan compiles to .* budget is"):
        smaller(*DEEP_ARGS)


# --- verify="full" -------------------------------------------------------------------------------


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
