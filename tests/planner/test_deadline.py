"""A time limit ends the search, not the answer: simple plans need no time."""

from __future__ import annotations

import math
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.planner import deadline as deadlines
from jaxmem.planner.deadline import Deadline
from jaxmem.planner.search import Search
from jaxmem.planner.simple import WHY
from tests.fitted_steps import DEEP_ARGS, DEEP_BUDGET, accumulated, deep
from tests.planner.lines import RATES, program
from tests.problems import PROBLEMS, assert_same, pure

TOO_SHORT = 1e-9


class AfterQuestions(Deadline):
    """Over once it was asked so often, whatever the time."""

    def __init__(self, most: int):
        super().__init__(math.inf)
        self.most = most

    def left(self) -> float:
        self.most -= 1
        return math.inf if self.most >= 0 else 0.0


@pytest.mark.parametrize("name", ["mlp", pytest.param("transformer_scan", marks=pytest.mark.wide)])
def test_whenever_it_ends_the_answer_fits_and_no_simple_one_is_faster(name: str):
    step = pure(PROBLEMS[name])
    traced = program(step.function, *step.args)
    unlimited = Search(traced, RATES)
    limit = int(0.6 * unlimited.keep_all.temp_bytes)
    best, simple = unlimited.solve(limit), unlimited.simple(limit)[0]
    assert best is not None
    seconds = []
    for most in (0, 3, 30, 300, 10**9):
        clock = AfterQuestions(most)
        found = Search(traced, RATES, deadline=clock).solve(limit)
        assert found is not None
        assert found.temp_bytes <= limit
        assert found.seconds <= simple.seconds
        assert clock.ran_out == (clock.most < 0)
        seconds.append(found.seconds)
    assert seconds[0] == simple.seconds
    assert seconds[-1] == best.seconds


def test_with_no_time_at_all_the_plan_is_a_simple_answer_and_says_so():
    fitted = jaxmem.fit(deep, budget=DEEP_BUDGET, time_limit=TOO_SHORT, progress=False)
    plan = fitted.plan(*DEEP_ARGS)
    assert plan.compiled_bytes <= plan.budget_bytes
    assert plan.recomputed()
    assert plan.why == WHY
    assert "the time limit of 1e-09 s ended the search: the plan is a simple answer" in str(plan)
    assert plan.larger is None
    assert_same(deep(*DEEP_ARGS), fitted(*DEEP_ARGS))


@pytest.mark.wide
def test_with_time_enough_it_changes_nothing(planned_deep):
    plan = jaxmem.plan(deep, *DEEP_ARGS, budget=DEEP_BUDGET, time_limit=1e6, progress=False)
    assert plan.to_json() == planned_deep.plan(*DEEP_ARGS).to_json()
    assert not any("time limit" in note for note in plan.notes)


def test_a_step_that_fits_needs_no_search():
    plan = jaxmem.plan(deep, *DEEP_ARGS, time_limit=TOO_SHORT, progress=False)
    assert (plan.solver, plan.notes) == ("keep-all", ())


def test_what_fits_in_no_time_is_refused_with_what_does():
    with pytest.raises(jaxmem.BudgetInfeasibleError, match="the time limit of 1e-09 s") as caught:
        jaxmem.plan(deep, *DEEP_ARGS, budget="1MiB", time_limit=TOO_SHORT, progress=False)
    smallest = caught.value.smallest_bytes
    options = {"budget": smallest, "time_limit": TOO_SHORT, "progress": False}
    assert jaxmem.plan(deep, *DEEP_ARGS, **options).compiled_bytes <= smallest


def test_microbatches_share_one_limit():
    args = jnp.eye(64), jnp.ones((1024, 64))
    plan = jaxmem.plan(accumulated, *args, budget="1.5MiB", time_limit=TOO_SHORT, progress=False)
    assert plan.compiled_bytes <= plan.budget_bytes
    assert plan.microbatches > 1 or plan.recomputed()


def test_it_runs_only_while_it_is_told_to(monkeypatch):
    now = 100.0
    monkeypatch.setattr(deadlines.time, "perf_counter", lambda: now)
    clock = Deadline(5.0)
    now += 50.0
    assert clock.left() == 5.0
    with clock.running(), clock.running():
        now += 2.0
        assert clock.left() == 3.0
    now += 50.0
    assert (clock.left(), clock.over(), clock.ran_out) == (3.0, False, False)
    with clock.running():
        now += 3.0
        assert clock.over()
    assert clock.ran_out
    assert time.perf_counter() == now


@pytest.mark.parametrize("limit", [0, -1, -0.5, True, False, "10", float("nan"), [1], 1j])
def test_what_is_no_number_of_seconds_is_refused(limit):
    with pytest.raises(jaxmem.ArgumentError, match=r"time_limit is .*: it takes a number of sec"):
        jaxmem.fit(deep, time_limit=limit)


def test_a_number_of_numpy_is_a_number_of_seconds():
    jaxmem.fit(deep, time_limit=np.float32(3))


def test_a_plan_needs_no_limit(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    with pytest.raises(jaxmem.ArgumentError, match="Leave time_limit out"):
        jaxmem.fit(deep, budget=DEEP_BUDGET, plan=plan, time_limit=10)
