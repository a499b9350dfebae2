"""Updates of what is in host memory run as soon as they can, or last; the same is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planner.schedule import Scheduler, StillKept
from jaxmem.planner.search import Search
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.updates import by_result, when_ready
from jaxmem.program.ir import Block, Hosting, Op, Program, Value
from jaxmem.program.primitives import Kind, kind_of
from tests.planner.lines import ELEMENTWISE, OPAQUE, RATES, Line, lines, program
from tests.planner.test_schedule import expressions
from tests.planner.test_transfers import check_landings, check_memories

LINKED = dataclasses.replace(RATES, d2h_bytes_per_second=1e9, h2d_bytes_per_second=1e9)
LAYERS, WIDTH = 4, 64


def is_ordered(block: Block, ops: list[Op]) -> bool:
    """Whether everything is read after it is made."""
    check_memories(dataclasses.replace(block, ops=tuple(ops)))
    return True


@given(lines(mixed=True), st.data())
@settings(max_examples=300)
def test_only_updates_of_what_is_hosted_move_and_not_before_what_they_need(line: Line, data):
    ops, outputs = line.block.ops, line.block.outputs
    hosted = data.draw(st.lists(st.sampled_from(line.block.inputs), unique=True))
    until = data.draw(st.integers(0, len(ops)))
    since = data.draw(st.integers(0, until))
    ordered, updates = when_ready(ops, outputs, hosted, since, until)
    moved = [n for n, made in updates for _ in made]
    assert sorted(map(id, ordered)) == sorted(map(id, ops)) and is_ordered(line.block, ordered)
    kernels = [n for n, op in enumerate(ops) if kind_of(op) is Kind.OPAQUE]
    start = max([until, *(n + 1 for n in kernels)])
    stay = [op for op in ordered if op in ops[:start]]
    assert stay == list(ops[:start]), "what is before the last kernel and turn stays in order"
    assert moved == sorted(moved) and all(since < n <= start or n == start for n in moved)
    place = {op: n for n, op in enumerate(ordered)}
    for op in ops[start:]:
        for value in op.values:
            if value in line.block.inputs and place[op] < place[ops[start - 1]]:
                readers = [other for other in ops[:start] if value in other.values]
                assert all(place[other] < place[op] for other in readers)
    # A turn has before it what it had, and what moved there.
    for turn in range(since, until + 1):
        now = turn + sum(n < turn for n in moved)
        before = [op for op in ordered[:now] if op in ops[:start]]
        assert before == list(ops[:turn])
    if not hosted:
        assert ordered == by_result(ops, outputs, until)


@given(lines(mixed=True), st.data(), st.sampled_from((None, LINKED)), st.booleans())
@settings(max_examples=300)
def test_either_order_computes_what_the_line_computes(line: Line, data, rates, last: bool):
    first = line.turn
    nested = data.draw(st.lists(st.integers(first + 1, len(line.block.ops)), max_size=2))
    made = [str(v.key) for op in line.block.ops[:first] for v in op.outputs]
    kept = st.lists(st.sampled_from(made), unique=True)
    keep = {("", turn): StillKept(data.draw(kept)) for turn in nested}
    keep["", first] = frozenset(data.draw(kept))
    hosting = Hosting(
        frozenset(data.draw(st.lists(st.integers(0, len(line.block.inputs) - 1)))),
        frozenset(data.draw(st.lists(st.integers(0, len(line.block.outputs) - 1)))),
    )
    written = Scheduler(line.nest, simulator=rates and Simulator(rates)).schedule(
        keep, hosting=hosting, updates_last=last
    )
    numbers: dict[tuple, int] = {}
    assert expressions(written, numbers)[0] == expressions(line.block, numbers)[0]
    check_memories(written)
    check_landings(written)
    assert [n for n, v in enumerate(written.outputs) if v.host] == sorted(hosting.results)


# --- train steps ---------------------------------------------------------------------------------


def trained(tx: Any) -> Program:
    """A train step of a small MLP whose state is donated."""

    def step(params, opt, x):
        def loss(params):
            y = x
            for name in sorted(params):
                y = jnp.tanh(y @ params[name])
            return (y**2).mean()

        updates, opt = tx.update(jax.grad(loss)(params), opt, params)
        return optax.apply_updates(params, updates), opt

    params = {f"w{n}": jnp.ones((WIDTH, WIDTH)) for n in range(LAYERS)}
    return program(step, params, tx.init(params), jnp.ones((256, WIDTH)), donate=(0, 1))


def moments_of(step: Program) -> list[int]:
    """The numbers of the leaves that only updates read."""
    return [n for n, leaf in enumerate(step.arguments) if "mu" in leaf.path or "trace" in leaf.path]


def products_after(ops: list[Op], update: Callable[[Op], bool]) -> list[int]:
    """For each update how many products come after it."""
    found = [n for n, op in enumerate(ops) if update(op)]
    return [sum(kind_of(op) is Kind.OPAQUE for op in ops[n:]) for n in found]


def test_a_moment_is_updated_behind_the_product_after_its_gradient():
    """Of each layer but the first its weight is read once more, for the gradient of its input."""
    step = trained(optax.sgd(0.1, momentum=0.9))
    moments = {step.block.inputs[n + len(step.consts)] for n in moments_of(step)}
    assert len(moments) == LAYERS

    def reads(op: Op) -> bool:
        return not moments.isdisjoint(op.values)

    assert products_after(list(step.block.ops), reads) == [0] * LAYERS
    early, updates = when_ready(step.block.ops, step.block.outputs, moments)
    assert is_ordered(step.block, early)
    after = products_after(early, reads)
    # Two products a layer, and one in the first.
    assert after == [5, 3, 1, 0]
    assert len(updates) >= LAYERS
    nothing, unmoved = when_ready(step.block.ops, step.block.outputs, ())
    assert nothing == by_result(step.block.ops, step.block.outputs) and not unmoved


def test_where_all_gradients_decide_about_each_update_none_is_early():
    step = trained(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)))
    moments = {step.block.inputs[n + len(step.consts)] for n in moments_of(step)}
    early, updates = when_ready(step.block.ops, step.block.outputs, moments)
    kernels = [n for n, op in enumerate(step.block.ops) if kind_of(op) is Kind.OPAQUE]
    assert not updates and early == by_result(step.block.ops, step.block.outputs)
    assert early[: kernels[-1] + 1] == list(step.block.ops[: kernels[-1] + 1])
    search = Search(step, LINKED)
    with search.hosting(frozenset(moments_of(step)), updates_last=True):
        assert not search.evaluate({}).updates_last, "there is one order, and no other to compile"


@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.adamw(1e-3)])
def test_copies_hide_beside_the_backward_pass(tx):
    """Less is waited for than where all of them run at the end; each moment is copied once."""
    step = trained(tx)
    search = Search(step, LINKED)
    moments = frozenset(moments_of(step))
    keep = {choice.turn: frozenset(c.name for c in choice.candidates) for choice in search.choices}
    seconds = {}
    for last in (False, True):
        with search.hosting(moments, updates_last=last):
            found = search.evaluate(keep)
        seconds[last] = found.seconds
        copies = [op.transfer for op in search.schedule(found).ops if op.transfer]
        assert copies.count("fetch") == copies.count("send") == len(moments)
    assert seconds[False] < 0.95 * seconds[True]


def test_a_fetch_passes_a_turn_inside_the_late_part():
    """A moment that nothing read since the turn before is not put back and fetched again."""
    x, m, a, b, g, h, z, n = (
        Value(jax.ShapeDtypeStruct((64,), jnp.float32), key) for key in "xmabghzn"
    )
    reads = [((x,), a), ((a,), b), ((b, a), g), ((g, a), h), ((h,), z)]
    kernels = [Op(OPAQUE, operands, (result,)) for operands, result in reads]
    ops = (*kernels, Op(ELEMENTWISE, (h, m), (n,)))
    line = Line(Block("", (x, m), ops, (n, z)), 2, ("a", "b"))
    keep = {("", 2): frozenset(("a", "b")), ("", 4): StillKept(("a", "b"))}
    written = Scheduler(line.nest, simulator=Simulator(LINKED)).schedule(
        keep, hosting=Hosting(frozenset([1]), frozenset([0]))
    )
    places = [n for n, op in enumerate(written.ops) if op.transfer == "fetch"]
    made = {op.outputs[0]: n for n, op in enumerate(written.ops) if not op.barrier}
    assert len(places) == 1 and places[0] < made[h], "it starts before the turn at h"


def test_each_update_waits_with_what_the_one_before_it_waited_with():
    """Where two updates read a weight the second reads it behind its own barrier."""
    x, p, m, n, g, z, r, s = (
        Value(jax.ShapeDtypeStruct((2**16,), jnp.float32), key) for key in "xpmngzrs"
    )
    updates = [Op(ELEMENTWISE, (g, m, p), (r,)), Op(ELEMENTWISE, (g, n, p), (s,))]
    kernels = [Op(OPAQUE, (x, p), (g,)), Op(OPAQUE, (x, x), (z,))]
    block = Block("", (x, p, m, n), (*kernels, *updates), (r, s, z))
    written = Scheduler(Line(block, 1, ()).nest, simulator=Simulator(LINKED)).schedule(
        {}, hosting=Hosting(frozenset([2, 3]), frozenset([0, 1]))
    )
    behind = [p]
    for op in written.ops:
        if op.barrier and behind[-1] in op.inputs:
            behind.append(op.outputs[op.inputs.index(behind[-1])])
    assert len(behind) == 3, "each of the two waits"
    assert {v for op in written.ops for v in op.values}.issuperset(behind)


def test_what_is_before_a_turn_stays_there_in_either_order():
    x, m, a, b, n = (Value(jax.ShapeDtypeStruct((64,), jnp.float32), k) for k in "xmabn")
    ops = (Op(OPAQUE, (x,), (a,)), Op(ELEMENTWISE, (a, a), (b,)), Op(ELEMENTWISE, (a, m), (n,)))
    assert by_result(ops, (n, b)) == [ops[0], ops[2], ops[1]]
    assert by_result(ops, (n, b), 2) == list(ops)
    assert when_ready(ops, (n, b), [m], 2, 2)[0] == list(ops)
    for last in (False, True):
        line = Line(Block("", (x, m), ops, (n, b)), 2, ("a", "b"))
        written = Scheduler(line.nest).schedule(
            {("", 2): frozenset("ab")},
            {("", 2): frozenset("a")},
            Hosting(frozenset([1])),
            updates_last=last,
        )
        numbers: dict[tuple, int] = {}
        assert expressions(written, numbers)[0] == expressions(line.block, numbers)[0]


def test_the_order_is_a_part_of_what_is_decided():
    step = trained(optax.sgd(0.1, momentum=0.9))
    search = Search(step, LINKED)
    keys = set()
    for last in (False, True):
        for hosted in (frozenset[int](), frozenset(moments_of(step))):
            with search.hosting(hosted, updates_last=last):
                keys.add(search.evaluate({}).key)
        assert search.hosted == frozenset() and not search.updates_last
    assert len(keys) == 3, "without anything in host memory there is one order"
