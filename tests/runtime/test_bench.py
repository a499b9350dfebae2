"""fit(measure=True): what is in fact fastest is taken, and timing leaves no trace."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.program.calling import Caller
from jaxmem.runtime import bench, rounds
from jaxmem.runtime.bench import Bench
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.tries import MOST_COMPILES
from jaxmem.targets import Target
from tests.fitted_steps import DEEP_ARGS, DEEP_BUDGET, accumulated, deep
from tests.problems import assert_same

CPU = Target("cpu")


def quiet(message: str) -> None:
    pass


@pytest.fixture(scope="module")
def traced():
    caller = Caller(deep)
    call = caller.take(DEEP_ARGS, {})
    return call, Compiler(caller.trace(call).program, CPU)


@pytest.mark.parametrize("budget", [int(64e6), int(4.5 * 2**20)], ids=["fits", "does not fit"])
def test_whatever_is_fastest_is_taken(traced, budget: int):
    """Every program that is timed is made the fastest in turn, by the timer alone."""
    call, compiler = traced
    timed = {}

    def equally_fast(run) -> float:
        run()
        timed[id(run.chosen.compiled)] = run.chosen
        return 1.0

    first = rounds.fit(compiler, budget, quiet, bench=Bench(call, CPU, equally_fast))
    programs = list(timed.values())
    assert 2 <= len(programs) <= 5
    assert (programs[0].solution is None) == (budget > first.plan.keep_all_compiled_bytes)
    assert first.compiled is programs[0].compiled, "the first of equals"
    for wanted in programs:
        figures = {id(p.compiled): 0.5 if p is wanted else 0.7 for p in programs}
        outcome = rounds.fit(
            compiler,
            budget,
            quiet,
            bench=Bench(call, CPU, lambda run, f=figures: f[id(run.chosen.compiled)]),
        )
        plan = outcome.plan
        assert outcome.compiled is wanted.compiled
        assert plan.compiled_bytes == wanted.compiled.memory.total_bytes <= budget
        assert plan.measured_seconds == 0.5
        measured = [r.measured_seconds for r in plan.rounds if r.measured_seconds is not None]
        assert sorted(measured) == [0.5] + [0.7] * (len(programs) - 1)
        assert all(r.fits and not r.problem for r in plan.rounds if r.measured_seconds)
        assert len(plan.rounds) <= MOST_COMPILES
        assert (plan.solver == "keep-all") == (wanted.solution is None)
        if wanted.solution is None:
            assert outcome.block is compiler.program.block, "returned unchanged"
        assert jaxmem.Plan.from_json(plan.to_json()) == plan
        assert "measured" in str(plan)


def test_simple_answers_are_among_those_timed(traced):
    call, compiler = traced
    solvers = set()

    def timer(run) -> float:
        solvers.add(run.chosen.solution and run.chosen.solution.solver)
        return 1.0

    rounds.fit(compiler, int(64e6), quiet, bench=Bench(call, CPU, timer))
    assert None in solvers
    simple = {s.solver for s in compiler.search.simple(int(64e6))}
    assert simple & solvers


def momentum(state, x, tokens, key):
    """A step with donated state, integer indices and a random key."""
    table, moments = state

    def loss(table):
        y = x + table[tokens]
        for _ in range(5):
            y = jnp.tanh(y @ table[:64])
        y = y + jax.random.normal(key, (64,))
        return jnp.square(y).mean()

    value, gradient = jax.value_and_grad(loss)(table)
    moments = 0.9 * moments + gradient
    return (table - 0.1 * moments, moments), value


def arguments():
    table = jnp.sin(jnp.arange(100 * 64.0)).reshape(100, 64)
    tokens = jnp.arange(1024) % 100
    return (table, table * 0), jnp.ones((1024, 64)), tokens, jax.random.key(3)


def shapes():
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments())


@functools.cache
def budget() -> int:
    return int(0.8 * jaxmem.analyze(momentum, *arguments(), donate_argnums=0).compiled_bytes)


@pytest.mark.wide
def test_real_runs_choose_the_least_and_consume_nothing():
    fitted = jaxmem.fit(momentum, budget=budget(), donate_argnums=0, measure=True, progress=False)
    state, *rest = arguments()
    plan = fitted.plan(state, *rest)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert_same(arguments()[0], state, multiple=0)
    measured = [r.measured_seconds for r in plan.rounds if r.measured_seconds is not None]
    assert plan.measured_seconds == min(measured) > 0
    assert len(measured) > 1
    assert plan.compiled_bytes <= plan.budget_bytes
    expected = jax.jit(momentum)(*arguments())
    assert_same(expected, fitted(state, *rest))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "donated as ever"


def test_the_first_call_times_on_copies():
    fitted = jaxmem.fit(momentum, donate_argnums=0, measure=True, verify="full", progress=False)
    assert_same(jax.jit(momentum)(*arguments()), fitted(*arguments()))
    plan = fitted.plan(*arguments())
    assert plan.measured_seconds is not None
    assert plan.rounds[0].measured_seconds is not None, "the step as written is timed, too"


@pytest.mark.wide
def test_shapes_are_timed_on_zeros_and_the_call_uses_that_plan():
    said: list[str] = []
    fitted = jaxmem.fit(
        momentum, budget=budget(), donate_argnums=0, measure=True, progress=said.append
    )
    plan = fitted.plan(*shapes())
    assert plan.measured_seconds is not None
    assert sum("timing" in text for text in said) == 1
    assert_same(jax.jit(momentum)(*arguments()), fitted(*arguments()))
    assert fitted.plan(*arguments()) is plan


def decay(state):
    """A step without a backward pass: there is only one program."""
    return jax.tree.map(lambda leaf: leaf * 0.9, state)


def test_an_array_whose_data_was_given_away_is_a_shape_too():
    state = arguments()[0]
    jax.tree.map(lambda leaf: leaf.delete(), state)
    plan = jaxmem.plan(decay, state, donate_argnums=0, measure=True, progress=False)
    assert [r.measured_seconds for r in plan.rounds] == [plan.measured_seconds] != [None]


def test_the_number_of_microbatches_stays_that_of_the_prediction():
    args = jnp.eye(64), jnp.ones((1024, 64))
    fitted = jaxmem.fit(accumulated, budget="1.3MiB", measure=True, progress=False)
    plan = fitted.plan(*args)
    assert plan.microbatches > 1
    assert plan.measured_seconds is not None
    assert len(plan.rounds) <= MOST_COMPILES
    assert_same(step_with_one(accumulated, args), fitted(*args))


def step_with_one(step, args):
    return jaxmem.fit(step, progress=False)(*args)


# --- wrong uses --------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["yes", 1, None])
def test_measure_is_true_or_false(measure):
    with pytest.raises(jaxmem.ArgumentError, match="it takes True or False"):
        jaxmem.fit(deep, measure=measure)


def test_a_plan_leaves_nothing_to_measure(planned_deep):
    plan = planned_deep.plan(*DEEP_ARGS)
    with pytest.raises(jaxmem.ArgumentError, match="a plan has decided already"):
        jaxmem.fit(deep, budget=DEEP_BUDGET, plan=plan, measure=True)


def test_only_what_is_here_can_be_timed():
    with pytest.raises(jaxmem.ArgumentError, match=r"the target is h200\. Leave target out"):
        jaxmem.plan(deep, *DEEP_ARGS, budget="1GiB", target="h200", measure=True, progress=False)


def test_effects_would_be_repeated():
    ran: list[float] = []

    def step(w, x):
        jax.debug.callback(lambda value: ran.append(float(value)), x.sum())
        return deep(w, x)

    fitted = jaxmem.fit(step, budget=DEEP_BUDGET, measure=True, progress=False)
    with pytest.raises(jaxmem.ArgumentError, match=r"effects \(.* at test_bench\.py:\d+\)"):
        fitted(*DEEP_ARGS)
    jax.effects_barrier()
    assert ran == []


def test_processes_must_not_choose_each_for_itself(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda backend=None: 2)
    with pytest.raises(jaxmem.ArgumentError, match="in 2 processes could choose"):
        jaxmem.plan(deep, *DEEP_ARGS, measure=True, progress=False)


def test_copies_need_room_beside_what_is_donated(monkeypatch):
    state = arguments()[0]
    state_bytes = sum(leaf.nbytes for leaf in state)
    needed = jaxmem.analyze(decay, state, donate_argnums=0).compiled_bytes
    monkeypatch.setattr(bench, "usable_bytes", lambda target: needed + state_bytes - 1)
    options = {"budget": needed, "donate_argnums": 0, "measure": True, "progress": False}
    fitted = jaxmem.fit(decay, **options)
    with pytest.raises(jaxmem.ArgumentError, match=r"decay\.plan\(\.\.\.\) with jax\.ShapeD"):
        fitted(state)
    assert not state[0].is_deleted()
    assert fitted.plan(shapes()[0]).measured_seconds is not None, "as the message says"
    assert_same(decay(arguments()[0]), fitted(state))


def test_a_plan_that_was_measured_can_be_followed(planned_deep):
    plan = dataclasses.replace(planned_deep.plan(*DEEP_ARGS), measured_seconds=0.25)
    followed = jaxmem.fit(deep, budget=DEEP_BUDGET, plan=plan, progress=False).plan(*DEEP_ARGS)
    assert followed.measured_seconds == 0.25
    assert not planned_deep.plan(*DEEP_ARGS).diff(plan)
