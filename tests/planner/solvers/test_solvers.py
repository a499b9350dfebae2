"""Solvers against everything there is to choose, at every budget, judged by the written program."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planner.problem import Problem
from jaxmem.planner.solvers import auto, local, milp
from jaxmem.planner.solvers.answer import Answer, Limits
from tests.planner.solvers.dags import Dag, all_runs, best_seconds, budgets, dag

pytestmark = pytest.mark.wide  # Arithmetic of ours: no version of JAX changes it.

PLENTY = 10**9
# What HiGHS may leave open, and more for the sums.
EXACT = 1e-5
# More values than this are not drawn: 3 to that power is what there is to choose.
MOST_OFFLOADED = 6
# Later cuts take longer and longer; nine of ten lines and budgets need none or a few.
MOST_CUTS = 15
# Where local search finds nothing to start from either: a few lines in a thousand.
MANY_CUTS = 400


@dataclass
class Ratios:
    """Seconds over those of the best choice there is, one for each line and budget."""

    found: list[float] = field(default_factory=list)
    nothing: int = 0

    def note(self, answer: Answer | None, best: float) -> None:
        if answer is None:
            self.nothing += 1
        else:
            self.found.append(answer.run.seconds / best if best else 1.0)

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(sum(map(math.log, self.found)) / len(self.found))

    @property
    def worst(self) -> float:
        return max(self.found)


@dataclass
class Tally:
    """How solvers did on many lines."""

    auto: Ratios = field(default_factory=Ratios)
    local: Ratios = field(default_factory=Ratios)
    lines: int = 0
    written: int = 0
    proven: int = 0

    @property
    def share_proven(self) -> float:
        """The part of lines and budgets whose optimum MILP proved."""
        return self.proven / len(self.auto.found)


def compare(seeds: Iterable[int], most: int, *, offload: bool = False) -> Tally:
    """Every solver on every line at every budget, MILP held to the best choice there is."""
    tally = Tally()
    for seed in seeds:
        rng = random.Random(seed)
        drawn = dag(rng, most, offload=offload)
        if offload and len(drawn.problem.droppable) > MOST_OFFLOADED:
            continue
        tally.lines += 1
        runs = all_runs(drawn.problem, offload=offload)
        host_bytes = rng.choice((PLENTY, 24)) if offload else 0
        for budget in budgets(drawn.problem, runs):
            limits = Limits(budget, host_bytes)
            best = best_seconds(runs, limits)
            exact = check(drawn, limits, best)
            if best is None or exact is None:
                continue
            tally.written += judged(drawn, exact)
            tally.proven += exact.why.startswith("optimal")
            tally.auto.note(auto.solve(drawn.problem, limits), best)
            tally.local.note(local.solve(drawn.problem, limits), best)
    return tally


def check(drawn: Dag, limits: Limits, best: float | None) -> Answer | None:
    """MILP finds the best choice there is without help; what it proves is true where it gives up.

    The start is what gives it something to answer with then.
    """
    exact = milp.solve(drawn.problem, limits, most_cuts=MOST_CUTS)
    if exact is None and best is not None:
        start = local.solve(drawn.problem, limits)
        exact = milp.solve(drawn.problem, limits, start, MOST_CUTS if start else MANY_CUTS)
    if best is None or exact is None:
        assert best is None
        assert exact is None
        return None
    assert exact.bound_seconds is not None
    assert exact.bound_seconds <= best * (1 + EXACT) + EXACT
    if exact.why.startswith("optimal"):
        assert exact.run.seconds == pytest.approx(best, rel=EXACT, abs=EXACT)
        assert exact.gap == pytest.approx(0.0, abs=EXACT)
    assert exact.run == drawn.problem.run(exact.choice)
    assert limits.allow(exact.run)
    return exact


def judged(drawn: Dag, answer: Answer) -> bool:
    """Whether the written-out program was held against the answer; one without transfers is."""
    if answer.choice[0].offload:
        return False
    written = drawn.written(answer.choice)
    assert written.temp_bytes == answer.run.peak_bytes
    assert written.seconds == pytest.approx(answer.run.seconds)
    return True


def assert_good(tally: Tally, lines: int) -> None:
    assert tally.lines >= lines
    assert tally.auto.nothing == 0
    assert tally.local.nothing <= 0.01 * len(tally.local.found)
    assert tally.auto.mean <= 1.01
    assert tally.auto.worst <= 1.10
    assert tally.share_proven >= 0.85
    # Local search sees all single changes and exchanges, which is nearly everything here.
    assert tally.local.mean <= 1.02


def test_against_everything_there_is_to_keep():
    tally = compare(range(100), 6)
    assert_good(tally, 100)
    assert tally.written >= 150


def test_against_everything_there_is_to_keep_or_offload():
    tally = compare(range(45), 4, offload=True)
    assert_good(tally, 30)
    assert 0 < tally.written < len(tally.auto.found), "some offload and some do not"


@pytest.mark.slow
def test_against_everything_there_is_to_keep_slow():
    tally = compare(range(1000, 2400), 8)
    report("keep or drop", tally)
    assert_good(tally, 1400)


@pytest.mark.slow
def test_against_everything_there_is_to_keep_or_offload_slow():
    tally = compare(range(3000, 3800), 6, offload=True)
    report("keep, drop or offload", tally)
    assert_good(tally, 600)


def report(name: str, tally: Tally) -> None:
    """What the slow tests found, shown with ``-s``."""
    for solver, ratios in (("auto", tally.auto), ("local", tally.local)):
        print(
            f"{name}: {tally.lines} lines, {len(ratios.found)} budgets, {solver} mean "
            f" {ratios.mean:.6f}, worst {ratios.worst:.3f}; MILP proved {tally.share_proven:.1%}"
        )


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 200))
def test_the_exact_solver_on_drawn_lines(rng: random.Random, budget: int):
    drawn = dag(rng, 5)
    limits = Limits(budget)
    exact = check(drawn, limits, best_seconds(all_runs(drawn.problem), limits))
    if exact is not None:
        assert judged(drawn, exact)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_played_on_paper_as_written_out(rng: random.Random):
    """Kernels in place, with working bytes, several results, results of the step among them."""
    drawn = dag(rng, 5)
    runs = all_runs(drawn.problem)
    for choice, run in rng.sample(runs, min(4, len(runs))):
        written = drawn.written(choice)
        assert written.temp_bytes == run.peak_bytes
        assert written.seconds == pytest.approx(run.seconds)


def test_the_lines_have_all_kinds_of_kernels():
    problems = [dag(random.Random(seed), 6).problem for seed in range(70)]
    early = [k for p in problems for k in p.kernels[: p.turn]]
    assert any(len(k.makes) > 1 for k in early)
    assert any(k.working_bytes for k in early)
    assert any(k.in_place for k in early)
    assert any(not k.repeatable for k in early)
    assert any(p.made[v] < p.turn for p in problems for v in p.results)
    assert any(_late_readers(p) > 1 for p in problems)
    assert max(len(p.droppable) for p in problems) >= 6


def _late_readers(problem: Problem) -> int:
    late = [v for k in problem.kernels[problem.turn :] for v in k.reads]
    return max((late.count(v) for v in problem.droppable), default=0)
