"""Gradients that are tied to what comes next: not where that saves nothing."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.planner.inorder import is_tied
from jaxmem.planner.plan import Plan
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime import rounds
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.following import decisions_of
from jaxmem.runtime.tries import Outcome
from jaxmem.runtime.untying import UNTIED
from jaxmem.targets import Target
from tests.planner.lines import program
from tests.planner.test_inorder import halves, narrow, transformer_step, two_halves
from tests.runtime.test_rounds import scanned, scanned_args

H200 = Target("h200")


def with_more_beside(weights, x):
    """Most is there outside the loops, however late gradients are made in them."""
    wide = jnp.tile(x[:256], (1, 64))
    beside = jnp.square(jnp.tanh(x @ wide) @ wide.T).mean()
    return two_halves(weights, x), beside


# XLA puts off the gradients of the transformer.
STEPS = {"as well without": (with_more_beside, halves(1280)), "saves": transformer_step()}
SHARES = {"as well without": 0.9, "saves": 0.5}


def compiler_of(name: str) -> Compiler:
    step, args = STEPS[name]
    return Compiler(program(step, *args, donate=(0,)), H200)


@functools.cache
def fitted(name: str) -> Outcome:
    compiler = compiler_of(name)
    budget = compiler.program.fixed_bytes + int(SHARES[name] * compiler.search.keep_all.temp_bytes)
    return rounds.fit(compiler, budget, lambda said: None)


@pytest.mark.parametrize("name", STEPS)
def test_ties_stay_where_they_save_memory_and_only_there(name):
    outcome = fitted(name)
    plan, last = outcome.plan, outcome.plan.rounds[-1]
    assert last.name == UNTIED
    assert is_tied(outcome.block) == plan.in_order == (name == "saves")
    tied = [r.compiled_bytes for r in plan.rounds[:-1] if r.fits and not r.problem]
    if name == "saves":
        assert last.compiled_bytes > 1.01 * plan.compiled_bytes
        assert plan.compiled_bytes in tied
    else:
        assert plan.compiled_bytes == last.compiled_bytes <= 1.01 * min(tied)
    assert plan.compiled_bytes == outcome.compiled.memory.total_bytes <= plan.budget_bytes
    assert len(plan.rounds) <= 15


def test_without_ties_the_plan_is_followed_and_says_so():
    outcome = fitted("as well without")
    plan = Plan.from_json(outcome.plan.to_json())
    compiler = compiler_of("as well without")
    solution = decisions_of(compiler, plan)
    assert solution is not None
    assert not is_tied(compiler.block(solution))
    assert compiler.compile(solution).memory.total_bytes == plan.compiled_bytes
    tied = dataclasses.replace(plan, in_order=True)
    again = decisions_of(compiler, tied)
    assert again is not None
    assert is_tied(compiler.block(again))
    assert "the compiler makes gradients when it likes" in str(plan.explain())
    assert "the compiler makes gradients when it likes" not in str(tied.explain())
    assert "gradients in loops" in str(tied.diff(plan))


def test_without_ties_results_are_the_same():
    step, shapes = STEPS["as well without"]
    outcome = fitted("as well without")
    rng = np.random.default_rng(0)
    args = [jnp.asarray(0.03 * rng.normal(size=s.shape), s.dtype) for s in jax.tree.leaves(shapes)]
    expected = jax.jit(step)(args[:2], args[2])
    found = jax.jit(as_function(outcome.block))(*args)
    for one, other in zip(jax.tree.leaves(expected), found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def no_kernel_without_ties(monkeypatch):
    compile_it = Compiler.compile

    def failing(self, solution, **options):
        if solution is not None and not solution.in_order:
            raise jax.errors.JaxRuntimeError("INTERNAL: no kernel found\nsomewhere")
        return compile_it(self, solution, **options)

    monkeypatch.setattr(Compiler, "compile", failing)


@pytest.mark.usefixtures("no_kernel_without_ties")
@pytest.mark.parametrize("fits_as_written", [False, True])
def test_where_xla_fails_without_ties_the_program_with_them_is_taken(fits_as_written):
    if fits_as_written:
        plan = jaxmem.plan(scanned, *scanned_args(), budget=None, target="h200", progress=False)
        assert plan.rounds[0].fits
    else:
        compiler = compiler_of("as well without")
        room = int(0.9 * compiler.search.keep_all.temp_bytes)
        plan = rounds.fit(compiler, compiler.program.fixed_bytes + room, lambda said: None).plan
    assert plan.kept
    assert plan.in_order
    assert any("did not compile: INTERNAL: no kernel found" in note for note in plan.notes)


def test_both_are_kept_where_they_will_be_timed():
    compiler = compiler_of("as well without")
    room = compiler.program.fixed_bytes + 3 * compiler.search.keep_all.temp_bytes
    run = rounds._Rounds(compiler, room, lambda said: None)
    solution = compiler.search.smallest()
    run.compile("smallest", solution.temp_bytes, solution)
    run.untie(both=True)
    assert [c.solution and c.solution.in_order for c in run.fitting] == [True, False]
    run.fitting.pop()
    run.untie(both=False)
    assert [c.solution and c.solution.in_order for c in run.fitting] == [False]


def test_a_plan_without_ties_where_there_are_none_is_refused():
    weights = jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)
    traced = program(narrow, weights, jax.ShapeDtypeStruct((4096, 256), jnp.float32))
    compiler = Compiler(traced, H200)
    room = traced.fixed_bytes + int(0.7 * compiler.search.keep_all.temp_bytes)
    plan = rounds.fit(compiler, room, lambda said: None).plan
    assert plan.in_order
    assert plan.kept
    assert all(r.name != UNTIED for r in plan.rounds)
    untied = dataclasses.replace(plan, in_order=False)
    with pytest.raises(jaxmem.PlanMismatchError, match="none of its gradients would be tied"):
        decisions_of(Compiler(traced, H200), untied)
    given = json.loads(untied.to_json())
    with pytest.raises(jaxmem.PlanMismatchError, match="in_order is False, not true where"):
        Plan.from_json(json.dumps({**given, "kept": [], "segments": []}))
