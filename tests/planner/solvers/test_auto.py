"""Which solver answers, what it says of that, and what limits do to it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jaxmem.errors import ArgumentError
from jaxmem.planner.problem import Kernel, Problem
from jaxmem.planner.solvers import auto, blocks, exhaustive, milp
from jaxmem.planner.solvers.answer import Limits
from tests.planner.solvers.dags import dag
from tests.planner.solvers.test_chain import heterogeneous, homogeneous

pytestmark = pytest.mark.wide  # Arithmetic of ours: no version of JAX changes it.

SOLVERS = ("auto", "milp", "chain", "local")


def wide(count: int) -> Problem:
    """Kernels that read the input and are read late, all of them at once: no chain."""
    early = [Kernel(1.0, (0,), (n + 1,)) for n in range(count)]
    late = Kernel(1.0, tuple(range(1, count + 1)), (count + 1,))
    last = [Kernel(1.0, (count + 1, n), ()) for n in range(1, count + 1)]
    return Problem((*early, late, *last), (4,) * (count + 2), count)


def linked(problem: Problem, rate: float = 100.0) -> Problem:
    return dataclasses.replace(problem, d2h_bytes_per_second=rate, h2d_bytes_per_second=rate)


@pytest.mark.parametrize(
    ("problem", "solver", "why"),
    [
        (homogeneous(6), "every choice", "6 values can be dropped, few enough to try all: optimal"),
        (homogeneous(20), "MILP", "20 values can be dropped, few enough for MILP: "),
        (homogeneous(40), "MILP per block + chain DP", "a chain of 41 stages: "),
        (wide(30), "greedy + local search", "30 values can be dropped, too many for MILP, and it"),
    ],
)
def test_the_solver_that_suits_the_line(problem: Problem, solver: str, why: str):
    answer = auto.solve(problem, Limits(problem.run(problem.keep_all).peak_bytes))
    assert answer is not None
    assert answer.solver == solver
    assert answer.why.startswith(why)
    assert answer.run.recompute_seconds == 0.0


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_stays_within_the_limits_and_finds_the_same(solver: str):
    problem = heterogeneous(random.Random(3), 5)
    limit = problem.run(problem.keep_all).peak_bytes - 1
    answer, best = auto.solve(problem, Limits(limit), solver), auto.solve(problem, Limits(limit))
    assert answer is not None
    assert best is not None
    assert answer.run == problem.run(answer.choice)
    assert answer.run.peak_bytes <= limit
    assert answer.run.seconds == best.run.seconds
    assert answer.run.recompute_seconds > 0


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("count", (6, 40))
def test_nothing_fits_no_bytes(solver: str, count: int):
    assert auto.solve(homogeneous(count), Limits(0), solver) is None


def test_an_unknown_solver():
    with pytest.raises(ArgumentError, match=r"solver='simplex' is not one of 'auto', 'milp'"):
        auto.solve(homogeneous(3), Limits(9), "simplex")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("count", (6, 40))
def test_without_time_the_answer_is_what_there_is_and_says_so(solver: str, count: int):
    """Keeping everything is seen at once and fits; with more time the same would be found."""
    problem = homogeneous(count)
    answer = auto.solve(problem, Limits(count, seconds=0.0), solver)
    assert answer is not None
    assert "its time limit ended" in answer.why
    assert answer.run.peak_bytes <= count
    limited = auto.solve(problem, Limits(count, seconds=1e6), solver)
    assert limited is not None
    assert "time limit" not in limited.why


def test_without_time_and_without_anything_that_fits_at_once():
    problem = homogeneous(40)
    assert blocks.solve(problem, Limits(9)) is not None
    assert blocks.solve(problem, Limits(9, seconds=0.0)) is None
    assert exhaustive.solve(problem, Limits(9, seconds=0.0)) is None
    assert milp.solve(problem, Limits(9, seconds=0.0)) is None


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_host_too_small_for_anything_changes_nothing(solver: str):
    problem = linked(heterogeneous(random.Random(5), 5))
    limit = problem.run(problem.keep_all).peak_bytes - 1
    smallest = min(problem.nbytes[v] for v in problem.droppable)
    plain = auto.solve(problem, Limits(limit), solver)
    assert plain is not None
    assert plain.run.host_bytes == 0
    assert auto.solve(problem, Limits(limit, smallest - 1), solver) == plain


def test_a_host_without_a_link_changes_nothing():
    problem = heterogeneous(random.Random(5), 5)
    limit = problem.run(problem.keep_all).peak_bytes - 1
    assert auto.solve(problem, Limits(limit, 10**9)) == auto.solve(problem, Limits(limit))


@pytest.mark.parametrize("solver", ("auto", "milp", "local"))
def test_a_fast_link_is_used(solver: str):
    problem = linked(heterogeneous(random.Random(5), 5))
    limit = problem.run(problem.keep_all).peak_bytes - 1
    plain = auto.solve(problem, Limits(limit), solver)
    moved = auto.solve(problem, Limits(limit, 10**9), solver)
    assert plain is not None
    assert moved is not None
    assert moved.run.host_bytes > 0
    assert moved.run.seconds < plain.run.seconds


def test_what_the_exact_solver_cannot_prove_has_a_bound():
    """Without a cut it may only know how far it is."""
    gaps = []
    for seed in range(40):
        problem = dag(random.Random(seed), 6).problem
        most = problem.run(problem.keep_all).peak_bytes
        start = auto.solve(problem, Limits(most - 4), "local")
        answer = milp.solve(problem, Limits(most - 4), start, most_cuts=0)
        if answer is not None and not answer.why.startswith("optimal"):
            assert answer.why == "stopped after 0 cuts"
            assert answer.gap is not None
            gaps.append(answer.gap)
    assert gaps
    assert all(gap >= 0 for gap in gaps)
    assert max(gaps) > 0
