"""Turns inside a backward pass: every checkpointing schedule of an unrolled chain.

A turn before the backward part of each layer, with the layers' inputs that are kept across it,
says which of them are held while that layer goes back (Griewank & Walther 2000).
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.planner.schedule import Keep, StillKept
from jaxmem.planner.search import Search
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime import verify
from jaxmem.targets import Target, compile_for
from jaxmem.targets.options import memory_schedules
from tests.planner.lines import search
from tests.problems import assert_same

LAYERS = 16
SIZES = {"cpu": (64, 1024), "h200": (1024, 65536)}

Held = dict[int, frozenset[int]]
"""For each layer the layers whose inputs are held when it goes back."""


def step(ws, x):
    def loss(ws):
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return (y**2).sum()

    return jax.value_and_grad(loss)(ws)


@functools.cache
def chain(target: str) -> tuple[Search, int]:
    """The search over the chain, and bytes of one activation."""
    width, rows = SIZES[target]
    w = jax.ShapeDtypeStruct((width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return search(step, [w] * LAYERS, x, host=target == "cpu"), 4 * width * rows


@functools.cache
def least(length: int, slots: int) -> int:
    """Layers run forward to go back through ``length`` of them with ``slots`` to keep inputs in."""
    if length == 1:
        return 1
    if slots == 0:
        return length * (length + 1) // 2
    return min(split_cost(length, slots, k) for k in range(1, length))


def split_cost(length: int, slots: int, at: int) -> int:
    return at + least(length - at, slots - 1) + least(at, slots)


def revolve(first: int, last: int, slots: int) -> Held:
    """What is held at each layer of the schedule that runs the fewest layers forward."""
    length = last - first
    if length == 1 or slots == 0:
        return {layer: frozenset([first]) for layer in range(first, last)}
    at = min(range(1, length), key=lambda k: split_cost(length, slots, k))
    late = {i: held | {first} for i, held in revolve(first + at, last, slots - 1).items()}
    return late | revolve(first, first + at, slots)


def square_root(layers: int, size: int) -> Held:
    """Every ``size``-th input until all layers after it went back."""
    return {i: frozenset(range(0, i + 1, size)) for i in range(layers)}


def keep_of(found: Search, held: Held) -> Keep:
    """The turns of a schedule: one before each layer's backward part, of two products."""
    ((_, turn),) = [c.turn for c in found.choices]
    ops = found.program.block.ops
    outputs = [op.outputs[0] for op in ops[:turn] if op.name == "tanh"]
    products = [index for index, op in enumerate(ops) if op.name == "dot_general"][LAYERS:]
    keep = {}
    for layer, inputs in held.items():
        passed = products[: 2 * (LAYERS - 1 - layer)]
        at = max(turn, passed[-1] + 1) if passed else turn
        names = {str(outputs[i - 1].key) for i in inputs if i}
        keep["", at] = StillKept(names) if at > turn else frozenset(names)
    return keep


def again(held: Held) -> int:
    """Layers that run again: from the last input that is there up to the layer that goes back."""
    total, there = 0, held[LAYERS - 1]
    for layer in reversed(range(LAYERS)):
        nearest = max(i for i in there if i <= layer)
        total += layer - nearest + 1
        made = there | set(range(nearest, layer + 1))
        there = made & held.get(layer - 1, frozenset())
    return total


SCHEDULES = {
    "square root": square_root(LAYERS, 4),
    "revolve 5": revolve(0, LAYERS, 5),
    "revolve 2": revolve(0, LAYERS, 2),
    "revolve 1": revolve(0, LAYERS, 1),
}


def test_revolve_is_the_optimum_of_the_paper():
    """Proposition 1: r l - C(s + r, r - 1) runs beside those that go back, for l = C(s + r, s)."""
    for s, r in ((1, 4), (2, 2), (2, 3), (3, 2)):
        length = math.comb(s + r, s)
        assert least(length, s - 1) - length == r * length - math.comb(s + r, r - 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_many_layers_run_again_as_the_schedule_says(name: str):
    found, _ = chain("cpu")
    written = found.scheduler.schedule(keep_of(found, SCHEDULES[name]))
    runs = Counter(bool(op.recompute) for op in written.ops if op.name == "dot_general")
    assert runs == {False: 3 * LAYERS - 1, True: again(SCHEDULES[name])}


@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_compiled_program_holds_what_the_schedule_holds(name: str, target: str):
    """What is held, and two of this layer, its cotangent and what is made of that."""
    found, nbytes = chain(target)
    held = SCHEDULES[name]
    written = found.scheduler.schedule(keep_of(found, held))
    most = max(len(h - {0}) for h in held.values())
    simulated = found.simulator.step(written).temp_bytes / nbytes
    assert most < simulated <= most + 4.1
    options = memory_schedules(Target(target))[0]
    made = compile_for(target, as_function(written), found.program.avals(), options=options)
    assert verify.undone(written, made.hlo_text()) == ()
    assert simulated - 0.1 <= made.memory.temp_bytes / nbytes <= simulated + 1.1


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_results_are_the_same(name: str):
    found, _ = chain("cpu")
    written = found.scheduler.schedule(keep_of(found, SCHEDULES[name]))
    rng = np.random.default_rng(0)
    width, rows = SIZES["cpu"]
    arrays = [jnp.asarray(rng.standard_normal((width, width)) / 8, jnp.float32)] * LAYERS
    arrays.append(jnp.asarray(rng.standard_normal((rows, width)), jnp.float32))
    plain, other = (jax.jit(as_function(b)) for b in (found.program.block, written))
    assert_same(plain(*arrays), other(*arrays))
