"""Which leaves wait in host memory where the planner is to say: planned for an H200, run here."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import ArgumentError, BudgetInfeasibleError
from jaxmem.runtime import choosing, streamed, timeline
from tests.planner.lines import program
from tests.streamed_steps import MIB, OPTIMIZERS, fitted, same, state_with, step_with

ADAM = OPTIMIZERS["adam"]
STEP = step_with(ADAM)
# 2 MiB of weights, 4 of moments; at least 18 MiB where nothing waits, 17 with half of the moments
# and 16 with all of them.
ROWS = jnp.linspace(-1, 1, 1024 * 512).reshape(1024, 512)
TIGHT = 35 * MIB // 2


@pytest.fixture(autouse=True, scope="module")
def small_buckets():
    """What is fetched at once is 1/32 of what it is for useful nets, and Python takes no time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streamed, "_BUCKET_BYTES", 2 * MIB)
        patched.setattr(streamed, "_WINDOW_BYTES", 8 * MIB)
        patched.setattr(timeline, "_PYTHON_SECONDS", 0.0)
        yield


@functools.cache
def chosen(budget: int | str):
    return fitted(STEP, host=jaxmem.AUTO, budget=budget)


@functools.cache
def state():
    return state_with(ADAM, layers=2)


def test_what_may_wait_is_told_apart_by_what_reads_it():
    step = program(STEP, state(), ROWS, donate=0)
    half, moments, everything = choosing.ways(step)
    paths = [leaf.path for leaf in step.arguments]

    def named(way: choosing.Way) -> list[str]:
        return [paths[n] for n in way.leaves]

    assert len(moments.leaves) == 4 and all("mu" in p or "nu" in p for p in named(moments))
    assert set(half.leaves) < set(moments.leaves) < set(everything.leaves)
    assert len(half.leaves) == 2 and half.nbytes == 2 * MIB
    assert not any("x" == p or "b" in p.split("[")[-1] for p in named(everything))


def test_nothing_waits_where_nothing_need_be_recomputed():
    plan = chosen("2GiB").plan(state(), ROWS)
    assert plan.streamed is None and not plan.hosted
    assert "host=AUTO: nothing waits in host memory" in plan.notes[-1]


def test_the_quickest_of_what_fits_is_taken_and_computes_what_jit_does():
    step = chosen(TIGHT)
    with pytest.raises(BudgetInfeasibleError):
        fitted(STEP, host=None, host_budget=0, budget=TIGHT).plan(state(), ROWS)
    plan = step.plan(state(), ROWS)
    assert plan.compiled_bytes <= TIGHT and plan.streamed is not None
    others = [plan_with(way) for way in choosing.ways(program(STEP, state(), ROWS, donate=0))]
    assert plan.predicted_seconds == min(p.predicted_seconds for p in others if p is not None)
    (given,) = step.place(jax.tree.map(jnp.copy, state()), ROWS)[:1]
    found, _ = step(given, ROWS)
    found, loss = step(found, ROWS)
    expected, _ = jax.jit(STEP)(state(), ROWS)
    same((found, loss), jax.jit(STEP)(expected, ROWS))


def plan_with(way: choosing.Way) -> jaxmem.Plan | None:
    """The plan with these leaves in host memory; ``None`` where nothing fits."""
    leaves = program(STEP, state(), ROWS, donate=0).arguments
    step = fitted(STEP, host=[leaves[n].path for n in way.leaves], budget=TIGHT)
    try:
        return step.plan(state(), ROWS)
    except BudgetInfeasibleError:
        return None


def test_a_plan_that_was_chosen_is_saved_and_followed(tmp_path):
    plan = chosen(TIGHT).plan(state(), ROWS)
    plan.save(tmp_path / "plan.json")
    again = fitted(
        STEP, host=None, budget=TIGHT, plan=jaxmem.Plan.load(tmp_path / "plan.json")
    ).plan(state(), ROWS)
    assert again.hosted == plan.hosted and again.compiled_bytes <= TIGHT


@pytest.mark.wide
def test_an_error_names_a_budget_that_works_and_what_was_tried():
    with pytest.raises(
        BudgetInfeasibleError, match=r"host=jaxmem.AUTO tried .* nothing: at least"
    ) as told:
        chosen(4 * MIB).plan(state(), ROWS)
    smallest = told.value.smallest_bytes
    assert fitted(STEP, host=jaxmem.AUTO, budget=smallest).plan(state(), ROWS).compiled_bytes <= (
        smallest
    )


def test_where_there_is_one_memory_nothing_is_moved_and_the_plan_says_so():
    plan = fitted(STEP, host=jaxmem.AUTO, budget="1GiB", target="cpu").plan(state(), ROWS)
    assert not plan.hosted and "no other was tried: a CPU has one memory" in plan.notes[-1]


@pytest.mark.parametrize("options", [{"measure": True}, {"host": 3}, {"host": [jaxmem.AUTO]}])
def test_wrong_uses_are_refused(options):
    with pytest.raises(ArgumentError, match="host"):
        fitted(STEP, **{"host": jaxmem.AUTO, **options})
