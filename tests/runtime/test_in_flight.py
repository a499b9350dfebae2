"""How many copies are on the way: few where room is short, more as far as they fit."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.planner.decisions import AT_ONCE, IN_FLIGHT
from jaxmem.planner.plan import Plan
from jaxmem.planner.retimed import retimed
from jaxmem.program.ir import Block, Value
from jaxmem.runtime import sooner, tries
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.exposed import Exposed
from jaxmem.runtime.following import decisions_of
from jaxmem.runtime.order import order_of
from jaxmem.runtime.sooner import Sooner
from jaxmem.targets import Target
from jaxmem.units import MIB
from tests.planner.lines import program
from tests.runtime.test_hosting import arguments, followed, loss, planned, step

__all__ = ["planned"]

MOSTS = (AT_ONCE, (0, 4), (1, 1), (2, 1), (4, 0), IN_FLIGHT)


def adam(state, x):
    """Adam on a chain of products."""
    params, means, squares = state
    value, grads = jax.value_and_grad(loss)(params, x)
    means = [0.9 * m + 0.1 * g for m, g in zip(means, grads, strict=True)]
    squares = [0.99 * s + 0.01 * g * g for s, g in zip(squares, grads, strict=True)]
    moved = zip(params, means, squares, strict=True)
    return ([p - 1e-3 * m / (jnp.sqrt(s) + 1e-8) for p, m, s in moved], means, squares), value


def shapes(kinds: int, layers: int, width: int, rows: int):
    leaf = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return ([leaf] * layers,) * kinds, jax.ShapeDtypeStruct((rows, width), jnp.float32)


@pytest.mark.parametrize(
    ("fun", "kinds", "layers", "width", "rows"),
    [(adam, 3, 4, 1024, 128), pytest.param(step, 2, 6, 2048, 1024, marks=pytest.mark.wide)],
)
def test_the_smallest_is_what_it_is_predicted_to_be(fun, kinds, layers, width, rows):
    """To one activation; and clearly smaller than with copies early enough to hide."""
    args = shapes(kinds, layers, width, rows)
    options = {"target": "h200", "donate_argnums": 0, "progress": False}
    with pytest.raises(jaxmem.BudgetInfeasibleError) as told:
        jaxmem.plan(fun, *args, budget="1MiB", **options)
    smallest = told.value.smallest_bytes
    plan = jaxmem.plan(fun, *args, budget=smallest, **options)
    assert plan.compiled_bytes <= smallest
    activation = 4 * rows * width
    assert abs(plan.predicted_bytes - plan.compiled_bytes) <= activation + 2**16
    assert plan.in_flight == AT_ONCE
    # The same decisions, with more on the way.
    freely = dataclasses.replace(plan, in_flight=IN_FLIGHT, slack_seconds=0.0)
    more = jaxmem.fit(fun, plan=freely, budget="1GiB", **options).plan(*args)
    assert more.compiled_bytes > 1.1 * plan.compiled_bytes
    # What room there is goes to copies, or to more than that.
    budget = int(1.25 * smallest)
    roomy = jaxmem.plan(fun, *args, budget=budget, **options)
    assert roomy.compiled_bytes <= budget
    assert roomy.predicted_seconds < plan.predicted_seconds


def on_the_way(block: Block) -> tuple[int, int]:
    """The most copies to the host that nothing waited for, and the most back before their use."""
    sent: set[Value] = set()
    back: set[Value] = set()
    most = [0, 0]
    for op in block.ops:
        if op.transfer == "send":
            sent.update(op.outputs)
        elif op.transfer == "fetch":
            back.update(op.outputs)
        elif op.barrier:
            sent.difference_update(op.values)
        else:
            most = [max(most[0], len(sent)), max(most[1], len(back.difference(op.values)))]
            back.difference_update(op.values)
    return most[0], most[1]


def test_no_more_are_on_the_way_than_a_plan_says(planned):
    """All leaves of this step are as large as each other; an update reads two of them."""
    seen = {}
    for most in MOSTS:
        solution = dataclasses.replace(decided(planned), in_flight=most)
        compiler = Compiler(program(step, *arguments(), donate=(0,)), Target("h200"))
        seen[most] = on_the_way(compiler.search.schedule(solution))
    assert seen[AT_ONCE][0] == 0 and seen[AT_ONCE][1] <= 2
    for (most, found), (other, others) in itertools.permutations(seen.items(), 2):
        if most[0] <= other[0]:
            assert found[0] <= others[0]
        if most[1] <= other[1]:
            assert found[1] <= others[1]
    assert seen[IN_FLIGHT] > seen[1, 1] or seen[IN_FLIGHT][1] > seen[1, 1][1]


def decided(plan: Plan):
    compiler = Compiler(program(step, *arguments(), donate=(0,)), Target("h200"))
    solution = decisions_of(compiler, plan)
    assert solution is not None
    return solution


def test_each_number_is_followed_and_said(planned):
    texts = {}
    for most in MOSTS:
        given = dataclasses.replace(planned, in_flight=most)
        fitted = followed(given)
        plan = fitted.plan(*arguments())
        assert plan.in_flight == most and Plan.from_json(plan.to_json()) == plan
        said = f"outside loops at most {most[0]} of the largest copies are on their way"
        assert (said in str(plan.explain())) == (most != IN_FLIGHT)
        changed = "largest copies on their way" in str(planned.diff(given))
        assert changed == (most != IN_FLIGHT)
        texts[most] = fitted.lower(*arguments()).as_text()
    assert len({texts[AT_ONCE], texts[0, 4], texts[4, 0], texts[IN_FLIGHT]}) == 4


@pytest.mark.parametrize("most", [[5, 0], [0, -1], [1], [1, 1, 1], 2, "1", [True, 1], [1.5, 1]])
def test_what_cannot_be_on_the_way_is_refused(planned, most):
    said = json.dumps({**json.loads(planned.to_json()), "in_flight": most})
    with pytest.raises(jaxmem.PlanMismatchError, match="in_flight"):
        Plan.from_json(said)


@pytest.mark.parametrize(
    ("field", "given", "wanted"),
    [("in_flight", [0, 0], r"\[4, 4\] where"), ("slack_seconds", 1e-3, "0 where")],
)
def test_nothing_is_said_of_copies_where_nothing_is_moved(field, given, wanted):
    plan = jaxmem.plan(
        step, *jax.eval_shape(arguments), budget="8MiB", target="h200", progress=False
    )
    assert not plan.hosted and (plan.in_flight, plan.slack_seconds) == (IN_FLIGHT, 0.0)
    said = json.dumps({**json.loads(plan.to_json()), field: given})
    with pytest.raises(jaxmem.PlanMismatchError, match=f"{wanted} no program moves anything"):
        Plan.from_json(said)


# --- more of them, as far as that fits -----------------------------------------------------------


def run(planned: Plan, monkeypatch: pytest.MonkeyPatch, budget: int) -> Sooner:
    """The decisions of a plan with nothing on the way, compiled."""
    compiler = Compiler(program(step, *arguments(), donate=(0,)), Target("h200"))
    started = Sooner(compiler, budget, lambda said: None)
    solution = decisions_of(compiler, dataclasses.replace(planned, in_flight=AT_ONCE))
    assert solution is not None
    monkeypatch.setattr(tries, "exposed", lambda *_: Exposed(0.0, 0.0))
    started.compile("search", solution.temp_bytes, solution)
    return started


def test_more_are_on_the_way_where_that_fits(planned, monkeypatch):
    started = run(planned, monkeypatch, 64 * MIB)
    started.sooner()
    assert len(started.rounds) == 1 + sooner._MOST
    first = started.fitting[0]
    assert all(c.cost < first.cost for c in started.fitting[1:]), "the quicker ones"
    assert started.best().solution.in_flight != AT_ONCE
    orders = [order_of(started.compiler.block(c.solution)) for c in started.fitting]
    assert len(orders) == len({*orders}), "each is another program"


def test_what_is_predicted_to_be_over_is_not_compiled(planned, monkeypatch):
    started = run(planned, monkeypatch, 64 * MIB)
    chosen = started.best().solution
    least = min(
        started.predicted(retimed(started.compiler.search, chosen, in_flight=most))
        for most in sooner._TRIED
    )
    started.budget = least - 1
    started.sooner()
    assert len(started.rounds) == 1


def test_no_more_is_compiled_than_is_left(planned, monkeypatch):
    started = run(planned, monkeypatch, 64 * MIB)
    started.spent = started.left() - 1
    started.sooner()
    assert len(started.rounds) == 2 and started.left() == 0


def test_where_all_may_be_on_the_way_nothing_is_tried(planned, monkeypatch):
    compiler = Compiler(program(step, *arguments(), donate=(0,)), Target("h200"))
    started = Sooner(compiler, 64 * MIB, lambda said: None)
    solution = decisions_of(compiler, planned)
    monkeypatch.setattr(tries, "exposed", lambda *_: Exposed(0.0, 0.0))
    started.compile("search", solution.temp_bytes, solution)
    started.sooner()
    assert len(started.rounds) == 1
