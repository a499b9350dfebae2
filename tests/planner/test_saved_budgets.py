"""Products in a row and side by side, in as many saved bytes as PyTorch's memory budget allows.

The programs and what is expected of them are those of ``MemoryBudgetTest`` in PyTorch's
``test/functorch/test_ac.py`` (``activation_memory_budget``): how many MiB are saved for the
backward pass at a budget, and how much of the products is then computed again. A product of 512
by 512 by 512 counts as 1, and its result has 1 MiB.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmem.planner.search import Search
from jaxmem.planner.solvers.milp import kept_within
from jaxmem.program.ir import Op
from tests.planner.lines import search

UNIT, MIB = 512, 2**20
LAYERS = 5
# Widths of the products side by side, and the saved MiB that can be filled exactly.
UNEVEN = {
    (11, 3, 4, 2): (18, 17, 16, 15, 14, 13, 11, 7, 6, 5),
    (3, 5, 11, 17, 14): (42, 30, 19, 8, 3),
}
# Products of B by B by O: B * O MiB saved for B * B * O of work; saved MiB, and what runs again.
PRIORITISED = {
    ((1, 4), (2, 2)): ((4, 4),),
    ((4, 4), (6, 2), (2, 6)): ((28, 24), (16, 24 + 64)),
}


def matrix(rows: int, columns: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows * UNIT, columns * UNIT), jnp.float32)


def gradients(loss: Callable[..., jax.Array], *args: Any) -> Search:
    return search(jax.value_and_grad(loss, argnums=tuple(range(len(args)))), *args)


@functools.cache
def in_a_row() -> Search:
    def loss(x, ws):
        y = jnp.cos(x)
        for w in ws:
            y = jnp.cos(y @ w)
        return y.sum()

    return gradients(loss, matrix(1, 1), [matrix(1, 1)] * LAYERS)


@functools.cache
def side_by_side(pairs: tuple[tuple[int, int], ...]) -> Search:
    def loss(xs, ws):
        return sum((jnp.cos(x @ w).sum() for x, w in zip(xs, ws, strict=True)), jnp.float32(0))

    return gradients(loss, [matrix(b, b) for b, _ in pairs], [matrix(b, o) for b, o in pairs])


@functools.cache
def uneven(widths: tuple[int, ...]) -> Search:
    def loss(x, ws):
        return sum((jnp.cos(x @ w).sum() for w in ws), jnp.float32(0))

    return gradients(loss, matrix(1, 1), [matrix(1, n) for n in widths])


def work(op: Op) -> float:
    """Of a product, in products of 512 by 512 by 512."""
    (left, _), (result,) = op.inputs, op.outputs
    (contracted, _), _ = op.eqn.params["dimension_numbers"]
    shape: Any = left.aval
    return result.aval.size * shape.shape[contracted[0]] / UNIT**3


@functools.cache
def ways(found: Search, most: int) -> list[frozenset[int]]:
    """What to keep of ``most`` MiB, ``most - 1`` and so on, so that least runs again."""
    assert found.line is not None
    kept = list(kept_within(found.line.problem, frozenset(), most))
    assert len(kept) == most + 1
    return kept


def saved(found: Search, mib: int, most: int) -> tuple[float, float]:
    """MiB kept when ``mib`` of ``most`` may be, and the work of the products that run again."""
    assert found.line is not None
    line = found.line
    keep = ways(found, most)[most - mib]
    run = line.problem.run(line.problem.keeping(keep))
    again = [line.ops[k] for k in run.again if line.ops[k].name == "dot_general"]
    return sum(line.problem.nbytes[v] for v in keep) / MIB, sum(map(work, again))


def residuals(found: Search) -> int:
    """MiB that may be kept in all."""
    assert found.line is not None
    return sum(found.line.problem.nbytes[v] for v in found.line.problem.droppable) // MIB


def least(items: Sequence[tuple[int, int]], budget: int) -> int:
    """The least work that runs again if results of at most ``budget`` MiB are saved, by trying."""
    return min(
        sum(w for (_, w), kept in zip(items, choice, strict=True) if not kept)
        for choice in itertools.product((True, False), repeat=len(items))
        if sum(m for (m, _), kept in zip(items, choice, strict=True) if kept) <= budget
    )


@pytest.mark.parametrize("budget", range(2 * LAYERS + 1))
def test_products_in_a_row(budget: int):
    """Up to half of what is kept without a budget products run again, then only cosines do."""
    found = in_a_row()
    assert residuals(found) == 2 * LAYERS
    kept, again = saved(found, budget, 2 * LAYERS)
    assert again == max(0, LAYERS - budget)
    assert kept <= budget


@pytest.mark.parametrize("widths", UNEVEN, ids=str)
def test_uneven_products_fill_what_can_be_filled(widths: tuple[int, ...]):
    found = uneven(widths)
    most = residuals(found)
    assert most == sum(widths)
    for budget in range(most + 1):
        kept, again = saved(found, budget, most)
        assert again == least([(n, n) for n in widths], budget) == most - kept
        if budget in UNEVEN[widths]:
            assert kept == budget


@pytest.mark.parametrize("pairs", PRIORITISED, ids=str)
def test_the_product_that_is_most_work_per_byte_is_saved(pairs: tuple[tuple[int, int], ...]):
    found = side_by_side(pairs)
    most = residuals(found)
    assert most == sum(b * o for b, o in pairs)
    for budget, expected in PRIORITISED[pairs]:
        _, again = saved(found, budget, most)
        assert again == expected == least([(b * o, b * b * o) for b, o in pairs], budget)


# --- the whole search, in as many temporary bytes ------------------------------------------------


def as_saved(found: Search, products: Sequence[int]) -> dict:
    """The kept set with the results of these products and nothing else."""
    (choice,) = found.choices
    made = [op for op in found.program.block.ops[: choice.turn[1]] if op.name == "dot_general"]
    return {choice.turn: frozenset(str(made[n].outputs[0].key) for n in products)}


def products_again(found: Search, solution) -> float:
    """The work of the products that run again in the written-out program."""
    ops = found.schedule(solution).ops
    return sum(work(op) for op in ops if op.recompute and op.name == "dot_general")


CASES = {
    "in a row": (in_a_row, LAYERS),
    **{f"uneven {w}": (functools.partial(uneven, w), len(w)) for w in UNEVEN},
    **{f"prioritised {p}": (functools.partial(side_by_side, p), len(p)) for p in PRIORITISED},
}


# The paper says 15 MiB where the written-out program needs 14, and what does not fit on paper is
# never written out.
@pytest.mark.parametrize("case", CASES)
def test_no_more_products_run_again_in_the_same_memory(case: str):
    make, count = CASES[case]
    found = make()
    recomputing = 0
    for size in range(count + 1):
        for products in itertools.combinations(range(count), size):
            theirs = found.evaluate(as_saved(found, products))
            ours = found.solve(theirs.temp_bytes)
            assert ours is not None
            assert ours.temp_bytes <= theirs.temp_bytes
            assert products_again(found, ours) <= products_again(found, theirs)
            recomputing += products_again(found, theirs) > 0
    assert recomputing, "what never runs a product again tests nothing"
