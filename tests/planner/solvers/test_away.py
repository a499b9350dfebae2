"""Chains of which some values wait in host memory."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from jaxmem.planner.problem import Kernel, Problem
from jaxmem.planner.solvers import blocks, local
from jaxmem.planner.solvers.answer import Answer, Limits
from jaxmem.planner.solvers.away import AwayTable, Host
from jaxmem.planner.solvers.chain import ChainTable
from jaxmem.planner.stages import Stages

pytestmark = pytest.mark.wide  # Arithmetic of ours: no version of JAX changes it.

PLENTY = 10**9
RATES = (0.3, 1.0, 4.0)


def layers(rng: random.Random, count: int, rate: float) -> Problem:
    """``count`` layers of two kernels and their backward passes; copies of ``rate`` bytes/s."""
    sizes, kernels, early = [rng.randint(1, 6)], [], []
    last = 0
    for _ in range(2 * count):
        sizes.append(rng.randint(1, 9))
        kernels.append(Kernel(float(rng.randint(1, 9)), (last,), (len(sizes) - 1,)))
        early.append((last, len(sizes) - 1))
        last = len(sizes) - 1
    sizes.append(1)
    kernels.append(Kernel(1.0, (last,), (len(sizes) - 1,)))
    for given, made in reversed(early):
        gradient = len(sizes) - 1
        sizes.append(rng.randint(1, 6))
        kernels.append(
            Kernel(float(rng.randint(2, 18)), (gradient, given, made), (len(sizes) - 1,))
        )
    results = frozenset([len(sizes) - 1])
    return Problem(tuple(kernels), tuple(sizes), 2 * count, results, rate, rate)


def share(problem: Problem, part: float, host_bytes: int) -> Limits:
    return Limits(int(part * problem.run(problem.keep_all).peak_bytes), host_bytes)


def solved(problem: Problem, limits: Limits) -> Answer:
    answer = blocks.solve(problem, limits)
    assert answer is not None
    assert answer.run == problem.run(answer.choice)
    assert limits.allow(answer.run)
    return answer


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(4))
def test_a_host_never_makes_it_slower_and_nearly_always_faster_than_single_changes(seed: int):
    rng = random.Random(seed)
    problem = layers(rng, 12, RATES[seed % 3])
    ratios = []
    for part in (0.5, 0.7, 0.85):
        limits = share(problem, part, PLENTY)
        answer = solved(problem, limits)
        without = solved(problem, Limits(limits.device_bytes))
        assert answer.run.seconds <= without.run.seconds
        other = local.solve(problem, limits)
        assert other is not None
        ratios.append(answer.run.seconds / other.run.seconds)
    assert math.prod(ratios) ** (1 / len(ratios)) <= 1.02
    assert max(ratios) <= 1.06


@pytest.mark.parametrize("host_bytes", (0, 5, 20, 60))
def test_no_more_than_the_host_has(host_bytes: int):
    problem = layers(random.Random(1), 10, 4.0)
    answer = solved(problem, share(problem, 0.6, host_bytes))
    assert answer.run.host_bytes <= host_bytes


def test_links_that_take_no_time_leave_nothing_to_recompute():
    problem = layers(random.Random(2), 10, 1e9)
    answer = solved(problem, share(problem, 0.45, PLENTY))
    assert answer.run.recompute_seconds == 0.0
    assert answer.run.exposed_seconds == pytest.approx(0.0, abs=1e-6)
    assert solved(problem, share(problem, 0.45, 0)).run.recompute_seconds > 0


def test_links_that_hardly_move_anything_change_nothing():
    problem = layers(random.Random(2), 10, 1e-6)
    assert solved(problem, share(problem, 0.6, PLENTY)) == solved(problem, share(problem, 0.6, 0))


@pytest.mark.parametrize("seed", range(4))
def test_without_a_host_it_is_the_table_of_the_chain(seed: int):
    chain = Stages(layers(random.Random(seed), 8, 1.0)).chain
    table = ChainTable(chain, 1, 60)
    alone = AwayTable(table, Host(0, 1e9, 1e9)).first[:, :, 0]
    np.testing.assert_allclose(alone, table.first)


@pytest.mark.parametrize("seed", range(4))
def test_more_memory_of_either_kind_never_costs_time(seed: int):
    chain = Stages(layers(random.Random(seed), 8, 1.0)).chain
    first = AwayTable(ChainTable(chain, 1, 60), Host(200, 1.0, 1.0, 3.0)).first[0]
    finite = np.where(np.isfinite(first), first, 1e9)
    assert (np.diff(finite, axis=0) <= 1e-9).all()
    assert (np.diff(finite, axis=1) <= 1e-9).all()
    assert finite.min() < 1e9
