"""Chains: the optimum of Revolve, and of an exhaustive search where stages differ."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from jaxmem.planner.problem import Kernel, Problem
from jaxmem.planner.solvers import blocks
from jaxmem.planner.solvers.answer import Limits
from jaxmem.planner.solvers.chain import ChainTable, Option, Stage
from jaxmem.planner.stages import Stages

pytestmark = pytest.mark.wide  # Arithmetic of ours: no version of JAX changes it.

LENGTH, SLOTS = 250, 25


def revolve(length: int, slots: int) -> int:
    """Steps forward to go back through ``length``, with ``slots`` snapshots, the start one of them.

    Griewank and Walther 2000, proposition 1: r l - C(s + r, r - 1) for the smallest r for which
    C(s + r, s) is not less than l.
    """
    r = next(r for r in range(length + 1) if math.comb(slots + r, slots) >= length)
    return r * length - (math.comb(slots + r, r - 1) if r else 0)


def test_every_homogeneous_chain_is_revolves_optimum():
    table = ChainTable([Stage(1.0, 1, 1, (Option(0, 0.0, 0),))] * LENGTH, 1, SLOTS + 1)
    assert table.complete
    for slots in range(1, SLOTS + 1):
        expected = [revolve(length, slots) for length in range(1, LENGTH + 1)]
        # One slot more than snapshots beyond the start: a step forward writes somewhere.
        np.testing.assert_array_equal(table.again[0, :, slots], expected, err_msg=f"{slots} slots")


def homogeneous(length: int) -> Problem:
    """``length`` steps forward that each read what the one before made, a loss, as many back.

    The loss is the last step of Revolve, which goes forward and back at once.
    """
    forward = [Kernel(1.0, (n,), (n + 1,), in_place=True) for n in range(length)]
    loss = Kernel(0.0, (length,), (length + 1,))
    back = [Kernel(0.0, (n, length + 1), ()) for n in range(length - 1, -1, -1)]
    return Problem((*forward, loss, *back), (*[1] * (length + 1), 0), length)


@pytest.mark.parametrize("slots", (2, 3, 4, 6))
@pytest.mark.parametrize("length", (5, 12, 30))
def test_a_homogeneous_line_is_solved_as_revolve_does(length: int, slots: int):
    answer = blocks.solve(homogeneous(length - 1), Limits(slots))
    assert answer is not None
    assert answer.run.peak_bytes <= slots
    assert answer.run.recompute_seconds == revolve(length, slots) - (length - 1)


def test_a_table_without_time_knows_nothing():
    stages = [Stage(1.0, 1, 1, (Option(0, 0.0, 0),))] * 5
    assert not ChainTable(stages, 1, 3, lambda: True).complete


# --- stages that differ --------------------------------------------------------------------------


def heterogeneous(rng: random.Random, length: int) -> Problem:
    """Steps forward and back of different sizes and times; only the residuals are read late."""
    forward = [Kernel(float(rng.randint(1, 9)), (n,), (n + 1,)) for n in range(length)]
    sizes = [1, *(rng.randint(1, 6) for _ in range(length)), 0]
    loss = Kernel(0.0, (length,), (length + 1,))
    back = [Kernel(0.0, (n, length + 1), ()) for n in range(length - 1, 0, -1)]
    return Problem((*forward, loss, *back), tuple(sizes), length)


def least_again(problem: Problem, limit: int) -> float | None:
    """Seconds of steps forward beyond the first way, by Dijkstra over what is in memory.

    A state is which step goes back next and what is in memory; the input of the line always is.
    """
    start = (problem.turn, frozenset[int]())
    best = {start: 0.0}
    queue: list[tuple[float, int, tuple[int, ...]]] = [(0.0, problem.turn, ())]
    while queue:
        cost, back, listed = heapq.heappop(queue)
        held = frozenset(listed)
        if cost > best[back, held]:
            continue
        if back == 0:
            return cost - sum(k.seconds for k in problem.kernels[: problem.turn])
        for more, place, values in moves(problem, limit, back, held):
            if cost + more < best.get((place, values), math.inf):
                best[place, values] = cost + more
                heapq.heappush(queue, (cost + more, place, tuple(sorted(values))))
    return None


def moves(
    problem: Problem, limit: int, back: int, held: frozenset[int]
) -> Iterator[tuple[float, int, frozenset[int]]]:
    """Go back, drop a value, or make one next to one that is there."""
    if back in held:
        yield 0.0, back - 1, held - {back}
    for value in held:
        yield 0.0, back, held - {value}
    for step in range(back):
        more = held | {step + 1}
        there = step == 0 or step in held
        if there and more != held and sum(problem.nbytes[v] for v in more) <= limit:
            yield problem.kernels[step].seconds, back, more


def ratios() -> tuple[list[float], int]:
    """Seconds over the least there are, for every chain and limit, and how many it left open."""
    rng = random.Random(0)
    found, nothing = [], 0
    for length in (3, 3, 4, 4, 4, 5, 5, 5, 5, 6):
        problem = heterogeneous(rng, length)
        for limit in range(2, sum(problem.nbytes[1:]) + 1, length - 2):
            least = least_again(problem, limit)
            if least is None:
                assert blocks.solve(problem, Limits(limit)) is None
                continue
            answer = blocks.solve(problem, Limits(limit))
            if answer is None:
                nothing += 1
                continue
            forward = sum(k.seconds for k in problem.kernels)
            found.append(answer.run.seconds / (forward + least))
    return found, nothing


def test_the_exhaustive_search_by_hand():
    """Of x1, x2, x3 two fit, and x3 is needed first: x1 or x2 runs again, the cheaper way."""
    forward = [Kernel(s, (n,), (n + 1,)) for n, s in enumerate((1.0, 4.0, 2.0))]
    late = [Kernel(0.0, (3,), (4,)), *(Kernel(0.0, (n, 4), ()) for n in (2, 1))]
    problem = Problem((*forward, *late), (0, 1, 1, 1, 0), 3)
    assert least_again(problem, 3) == 0.0
    assert least_again(problem, 2) == 1.0
    assert least_again(problem, 1) is None


def test_chains_of_different_stages_are_within_one_percent_of_the_optimum():
    found, nothing = ratios()
    assert len(found) > 30
    assert nothing == 0
    assert min(found) >= 1 - 1e-9
    assert math.exp(sum(map(math.log, found)) / len(found)) <= 1.01


def with_gradients(length: int, nbytes: int) -> Problem:
    """A homogeneous line whose layers leave a gradient of that size, all read at the very end."""
    kernels = [Kernel(1.0, (n,), (n + 1,)) for n in range(length)]
    back, last = length + 1, length
    gradients = []
    for n in reversed(range(length)):
        gradients.append(back + 1)
        kernels.append(Kernel(1.0, (last, n), (back, back + 1)))
        last, back = back, back + 2
    kernels += [Kernel(0.1, (last, g), (back + n,)) for n, g in enumerate(gradients)]
    results = frozenset(range(back, back + length))
    sizes = [nbytes if v in gradients else 10 for v in range(back + length)]
    return Problem(tuple(kernels), tuple(sizes), length, results)


@pytest.mark.parametrize("nbytes", [0, 3, 8])
@pytest.mark.parametrize("length", [8, 16, 30])
def test_what_fits_the_table_fits_the_line(length: int, nbytes: int):
    """Gradients come one after the other and stay; the table has to know how many are there.

    What is handed on belongs to two stages, and the first gradient is there with the second.
    """
    line = with_gradients(length, nbytes)
    stages = Stages(line)
    table = ChainTable(stages.chain, 1, 2 * line.run(line.keep_all).peak_bytes)
    fitting = 0
    for slots in range(table.slots + 1):
        solution = table.solution(slots)
        if solution is not None:
            fitting += 1
            peak_bytes = line.run(stages.choice(solution)).peak_bytes
            assert peak_bytes <= slots + 10 + nbytes
    assert fitting
