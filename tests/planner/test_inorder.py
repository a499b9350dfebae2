"""Backward iterations make what they only hand out before they need the most bytes."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem.planner.inorder
import jaxmem.planner.schedule
from jaxmem.planner.inorder import TAG
from jaxmem.planner.schedule import Scheduler
from jaxmem.planner.search import Search
from jaxmem.planner.simulate import Simulator
from jaxmem.program.ir import Block, Hosting, Loop, Op
from jaxmem.program.primitives import Kind, kind_of
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from tests.planner.lines import program
from tests.problems.transformers import Form, Shape, make
from tests.rewrite.test_transfers import compiled

H200 = Target("h200")


def wide_last(weights, x):
    """Layers whose first half needs more, on the way back, than gradients of the second half do."""

    def layer(y, ws):
        up, down, wide = ws
        y = y + jnp.tanh(jnp.tanh(jnp.tanh(y @ wide) * 2) @ wide.T)
        return y + jax.nn.gelu(y @ up) @ down, None

    def loss(weights):
        return jnp.square(jax.lax.scan(layer, x, weights)[0]).mean()

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


def two_halves(weights, x):
    """Layers of two alike halves, of two products each."""

    def layer(y, ws):
        for w in ws:
            y = y + jnp.tanh(jnp.tanh(y @ w) @ w.T)
        return y, None

    def loss(weights):
        return jnp.square(jax.lax.scan(layer, x, weights)[0]).mean()

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


def halves(width: int):
    weights = [jax.ShapeDtypeStruct((4, 256, size), jnp.float32) for size in (width, 1024)]
    return weights, jax.ShapeDtypeStruct((4096, 256), jnp.float32)


def narrow(weights, x):
    """Layers with one product: nothing comes after its gradient that needs more."""

    def loss(weights):
        return jnp.square(jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]).mean()

    return weights - jax.grad(loss)(weights)


def arguments(width: int, rows: int, layers: int = 4):
    shapes = [(width, 4 * width), (4 * width, width), (width, 16 * width)]
    weights = [jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for shape in shapes]
    return weights, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def transformer_step():
    """A step and shapes of what it takes: arrays would be held where a test module keeps them."""
    shape = Shape(6, d_model=1024, heads=8, vocab=256, batch=32, sequence=512)
    step, args = make(Form(scan=True), shape, jnp.bfloat16)
    return step, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


def transformer():
    step, args = transformer_step()
    return Search(program(step, *args, donate=(0, 1)), rates_of(H200))


def backward_of(written: Block) -> Loop:
    return [op.loop for op in written.ops if op.loop is not None][-1]


def barriers(loop: Loop) -> list[Op]:
    return [op for op in loop.body.ops if op.recompute == TAG]


def handed_out(body: Block) -> set[Op]:
    """By definition: kernels from which no way leads to another, and what is computed of them."""

    def leads_to(op: Op) -> set[Op]:
        found: set[Op] = set()
        for one in body.ops:
            if not set(op.outputs).isdisjoint(one.values) and one.recompute != TAG:
                found |= {one} | (leads_to(one) if kind_of(one) is not Kind.OPAQUE else set())
        return found

    kernels = [op for op in body.ops if kind_of(op) is Kind.OPAQUE]
    off = [op for op in kernels if all(kind_of(one) is not Kind.OPAQUE for one in leads_to(op))]
    return {*off, *(one for op in off for one in leads_to(op))}


def as_late_as_allowed(loop: Loop) -> Block:
    """The body with all that is handed out just before what waits for it, or at the end.

    A barrier waits for those of its operands of which somebody reads the result.
    """
    body = loop.body
    off = handed_out(body)
    read = {v for op in body.ops for v in op.values} | set(body.outputs)
    ops: list[Op] = []
    waiting: list[Op] = []

    def flush(wanted: set) -> None:
        chosen: list[Op] = []
        for one in reversed(waiting):
            if not wanted.isdisjoint(one.outputs):
                chosen.insert(0, one)
                wanted |= set(one.values)
        ops.extend(chosen)
        waiting[:] = [one for one in waiting if one not in chosen]

    for op in body.ops:
        if op in off and op.recompute != TAG:
            waiting.append(op)
            continue
        pairs = zip(op.inputs, op.outputs, strict=True) if op.barrier else ()
        flush({v for v, result in pairs if result in read} or set(op.values))
        ops.append(op)
    return Block(body.path, body.inputs, (*ops, *waiting), body.outputs)


def untied(monkeypatch) -> None:
    monkeypatch.setattr(jaxmem.planner.inorder, "in_order", lambda scan, _: scan)
    monkeypatch.setattr(jaxmem.planner.schedule, "in_order", lambda scan, _: scan)


@pytest.mark.parametrize("problem", ["transformer", "wide_last", 768, 1024, 1280, 1536, 2048])
def test_however_late_gradients_are_made_they_take_no_more(problem, monkeypatch):
    def loop_of() -> tuple[Loop, Simulator]:
        if problem == "transformer":
            search = transformer()
        elif problem == "wide_last":
            search = Search(program(wide_last, *arguments(256, 4096)), rates_of(H200))
        else:
            search = Search(program(two_halves, *halves(problem)), rates_of(H200))
        loop = backward_of(search.schedule(search.smallest()))
        return loop, Simulator(search.simulator.rates)

    loop, simulator = loop_of()
    assert barriers(loop)
    read = {v for op in loop.body.ops for v in op.values} | set(loop.body.outputs)
    assert all(v in read for op in barriers(loop) for v in op.outputs), "or XLA drops the order"
    late = simulator.iteration(replace(loop, body=as_late_as_allowed(loop))).temp_bytes
    untied(monkeypatch)
    plain, simulator = loop_of()
    most = simulator.iteration(plain).temp_bytes
    assert late <= most
    late = replace(plain, body=as_late_as_allowed(plain))
    assert simulator.iteration(late).temp_bytes > most


def test_where_there_is_room_nothing_is_tied():
    weights = jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)
    search = Search(
        program(narrow, weights, jax.ShapeDtypeStruct((4096, 256), jnp.float32)), rates_of(H200)
    )
    assert barriers(backward_of(search.schedule(search.smallest()))) == []


@pytest.mark.parametrize("where", [{"host": True}, {"alone": False}])
def test_on_a_cpu_and_over_several_devices_nothing_is_tied(where):
    """One orders by itself, and what gradients exchange over the others would be waited for."""
    search = Search(program(wide_last, *arguments(256, 4096)), rates_of(H200))
    smallest = search.smallest()
    scheduler = Scheduler(search.nest, simulator=search.simulator)
    assert barriers(backward_of(scheduler.schedule(smallest.keep)))
    scheduler = Scheduler(search.nest, simulator=search.simulator, **where)
    assert barriers(backward_of(scheduler.schedule(smallest.keep))) == []


def test_results_are_the_same():
    shapes = arguments(8, 64)
    search = Search(program(wide_last, *shapes), rates_of(H200))
    written = search.schedule(search.smallest())
    assert barriers(backward_of(written))
    rng = np.random.default_rng(0)
    args = [jnp.asarray(0.1 * rng.normal(size=s.shape), s.dtype) for s in jax.tree.leaves(shapes)]
    expected = jax.jit(wide_last)(args[:3], args[3])
    found = jax.jit(as_function(written))(*args)
    for one, other in zip(jax.tree.leaves(expected), found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [0.25, 0.4])
def test_a_scan_compiles_to_what_is_simulated_with_hardly_a_kernel_more(share, monkeypatch):
    """A gradient that is tied may be written before it is stacked: a kernel more for each."""
    taken, kernels, gradients = [], [], []
    for tied in (True, False):
        if not tied:
            untied(monkeypatch)
        search = transformer()
        solution = search.solve(int(share * search.keep_all.temp_bytes))
        assert solution is not None
        written = search.schedule(solution)
        gradients.append(sum(len(op.outputs) - 1 for op in barriers(backward_of(written))))
        assert bool(gradients[-1]) == tied
        done = compiled(H200, search.program, written, Hosting())
        taken.append(done.memory.temp_bytes / solution.temp_bytes)
        kernels.append(done.hlo_text().count(" fusion("))
    assert 0.98 <= taken[0] <= 1.02
    assert taken[1] > taken[0] + 0.03
    assert kernels[0] <= kernels[1] + gradients[0]


def test_a_scan_in_segments_is_in_order_too(monkeypatch):
    """XLA would put off the gradients of wide weights in each of its segments."""
    taken = []
    for tied in (True, False):
        if not tied:
            untied(monkeypatch)
        search = transformer()
        found = sorted(search.bodies.in_segments(), key=lambda s: s.temp_bytes)
        middle = found[len(found) // 2]
        written = search.schedule(middle)
        inner = [op.loop for op in backward_of(written).body.ops if op.loop is not None]
        assert [bool(barriers(loop)) for loop in inner] == [False, tied]
        taken.append(compiled(H200, search.program, written, Hosting()).memory.temp_bytes)
        if tied:
            assert 0.98 <= taken[0] / middle.temp_bytes <= 1.02
    assert taken[1] > 1.03 * taken[0], "3.5% with jax 0.12, 11% with 0.10"
