"""jaxmem bench: both programs are timed on this device, and the caller's arguments stay."""

from __future__ import annotations

import json
import statistics

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import benched
from jaxmem.errors import ArgumentError, BudgetInfeasibleError
from jaxmem.runtime import bench
from tests.fitted_steps import DEEP_ARGS, deep
from tests.streamed_steps import OPTIMIZERS, X, fitted, in_small_buckets, state_with, step_with


@pytest.fixture(scope="module")
def found(planned_deep):
    return benched.bench(planned_deep, *DEEP_ARGS)


def test_both_programs_are_timed(found, planned_deep):
    written, planned = found.programs
    plan = planned_deep.plan(*DEEP_ARGS)
    assert written.compiled_bytes == plan.keep_all_compiled_bytes > found.budget_bytes
    assert planned.compiled_bytes == plan.compiled_bytes <= found.budget_bytes
    for program, predicted in ((written, plan.keep_all_seconds), (planned, plan.predicted_seconds)):
        assert program.predicted_seconds == predicted
        assert len(program.seconds) >= 5
        assert min(program.seconds) <= program.median_seconds <= max(program.seconds)
        assert not program.why


def test_what_is_printed_and_what_is_json(found):
    told = json.loads(found.to_json())
    for program, shown in zip(found.programs, told["programs"], strict=True):
        assert shown["median_seconds"] == statistics.median(shown["seconds"])
        assert shown["seconds"] == list(program.seconds)
    rows = [line.split() for line in str(found).splitlines()[-2:]]
    assert [row[0] for row in rows] == ["as", "planned"]
    assert str(len(found.programs[1].seconds)) == rows[1][-1]


def test_donated_arguments_are_still_there():
    w = jnp.ones((64, 64))
    step = jax.jit(lambda w: w * 2, donate_argnums=0)
    benched.bench(step, w, progress=False)
    assert not w.is_deleted()
    assert float(w[0, 0]) == 1


def test_a_fitted_step_brings_its_own_settings(planned_deep):
    with pytest.raises(ArgumentError, match="is fitted already and brings its own budget"):
        benched.bench(planned_deep, *DEEP_ARGS, budget="1GiB")


def test_a_step_as_written_that_is_too_large_is_not_run(monkeypatch, planned_deep):
    """The room that there is lies between the two programs."""
    plan = planned_deep.plan(*DEEP_ARGS)
    monkeypatch.setattr(bench, "usable_bytes", lambda target: plan.compiled_bytes)
    written, planned = benched.bench(planned_deep, *DEEP_ARGS).programs
    assert (written.seconds, written.median_seconds) == ((), None)
    assert written.why.startswith("not run: it needs ")
    assert planned.median_seconds > 0


def test_what_cannot_be_timed_here(planned_deep):
    with pytest.raises(ArgumentError, match="jaxmem bench times programs on the device that is"):
        benched.bench(jaxmem.fit(deep, target="h100", progress=False), *DEEP_ARGS)

    def prints(x):
        jax.debug.print("{}", x.sum())
        return x

    with pytest.raises(ArgumentError, match=r"jaxmem bench runs the step many times, and it has"):
        benched.bench(prints, jnp.ones(3), progress=False)
    with pytest.raises(BudgetInfeasibleError):
        benched.bench(deep, *DEEP_ARGS, budget="100KiB", progress=False)


def test_a_step_with_state_in_host_memory_is_refused_with_the_way_to_its_seconds(monkeypatch):
    """Planned for an H200 as such steps are; that none is here must not be what is said."""
    monkeypatch.setattr(bench.Bench, "check", lambda self, program: None)
    tx = OPTIMIZERS["adam"]
    run = fitted(step_with(tx))
    with in_small_buckets(python_seconds=0.0), pytest.raises(ArgumentError) as refused:
        benched.bench(run, state_with(tx), X)
    assert "updates leaves in host memory piece by piece (host=)" in str(refused.value)
    # The way out is a method of the step; where there is no GPU it says so and runs nothing.
    assert "results, profile = step.profile(state, batch)" in str(refused.value)
    with in_small_buckets(python_seconds=0.0):
        state = run.place(state_with(tx), X)[0]
        with pytest.raises(ArgumentError, match="a profile tells which copies a GPU waits for"):
            run.profile(state, X)
        assert not any(a.is_deleted() for a in jax.tree.leaves(state))


def test_microbatches_that_the_planner_chose():
    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(w, x):
        return jaxmem.accumulate(jax.value_and_grad(loss), jaxmem.AUTO)(w, x)

    args = jnp.eye(32), jnp.ones((2048, 32))
    found = benched.bench(step, *args, budget="700KiB", progress=False)
    written, planned = found.programs
    assert written.compiled_bytes > found.budget_bytes >= planned.compiled_bytes
    assert written.median_seconds > 0 < planned.median_seconds
