"""Backward iterations make what they only hand out before they need the most bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem.planner.schedule
from jaxmem.planner.inorder import _put_off, in_order
from jaxmem.planner.search import Search
from jaxmem.planner.simulate import Simulator
from jaxmem.program.ir import Block, Hosting, Loop, Op
from jaxmem.program.layout import Layout
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.compiler import rates_of
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


def narrow(weights, x):
    """Layers with one product: nothing comes after its gradient that needs more."""

    def loss(weights):
        return jnp.square(jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]).mean()

    return weights - jax.grad(loss)(weights)


def arguments(width: int, rows: int, layers: int = 4):
    shapes = [(width, 4 * width), (4 * width, width), (width, 16 * width)]
    weights = [jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for shape in shapes]
    return weights, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def transformer():
    shape = Shape(6, d_model=1024, heads=8, vocab=256, batch=32, sequence=512)
    step, args = make(Form(scan=True), shape, jnp.bfloat16)
    return Search(program(step, *args, donate=(0, 1)), rates_of(H200))


def backward_of(written: Block) -> Loop:
    return [op.loop for op in written.ops if op.loop is not None][-1]


def barriers(loop: Loop) -> list[Op]:
    return [op for op in loop.body.ops if op.recompute == "jaxmem.inorder"]


def as_late_as_allowed(loop: Loop, simulator: Simulator) -> Block:
    """The body with every kernel that no other needs just before its barrier, or at the end."""
    body = loop.body
    off = {body.ops[n] for n in _put_off(body, simulator.fused(body))}
    ops: list[Op] = []
    waiting: list[Op] = []
    for op in body.ops:
        if op in off:
            waiting.append(op)
            continue
        now = [one for one in waiting if not set(one.outputs).isdisjoint(op.values)]
        ops += [*now, op]
        waiting = [one for one in waiting if one not in now]
    return Block(body.path, body.inputs, (*ops, *waiting), body.outputs)


@pytest.mark.parametrize("problem", ["transformer", "wide_last"])
def test_however_late_gradients_are_made_they_take_no_more(problem: str):
    if problem == "transformer":
        search = transformer()
    else:
        search = Search(program(wide_last, *arguments(256, 4096)), rates_of(H200))
    loop = backward_of(search.schedule(search.smallest()))
    simulator = Simulator(search.simulator.rates)
    assert barriers(loop)
    most = simulator.iteration(loop).temp_bytes
    late = as_late_as_allowed(loop, simulator)
    assert simulator.body(late, loop.num_carry).temp_bytes <= most


def test_where_there_is_room_nothing_is_tied():
    weights = jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)
    search = Search(
        program(narrow, weights, jax.ShapeDtypeStruct((4096, 256), jnp.float32)), rates_of(H200)
    )
    assert barriers(backward_of(search.schedule(search.smallest()))) == []


def test_over_several_devices_nothing_is_tied(monkeypatch):
    """What gradients exchange there would be waited for."""
    plain: list[Op] = []
    search = Search(program(wide_last, *arguments(256, 4096)), rates_of(H200))
    monkeypatch.setattr(
        jaxmem.planner.schedule, "in_order", lambda scan, _: plain.append(scan) or scan
    )
    search.schedule(search.smallest())
    scan = next(one for one in plain if in_order(one, search.simulator) is not one)
    assert scan.loop is not None
    made = next(v for op in scan.loop.body.ops for v in op.outputs if v.aval.ndim == 2)
    made.layout = Layout(((("data", 2),), ()))
    assert in_order(scan, search.simulator) is scan


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
def test_a_scan_compiles_to_what_is_simulated_with_the_same_kernels(share: float, monkeypatch):
    taken, kernels = [], []
    for tied in (True, False):
        if not tied:
            monkeypatch.setattr(jaxmem.planner.schedule, "in_order", lambda scan, _: scan)
        search = transformer()
        solution = search.solve(int(share * search.keep_all.temp_bytes))
        assert solution is not None
        written = search.schedule(solution)
        assert bool(barriers(backward_of(written))) == tied
        done = compiled(H200, search.program, written, Hosting())
        taken.append(done.memory.temp_bytes / solution.temp_bytes)
        kernels.append(done.hlo_text().count(" fusion("))
    assert 0.95 <= taken[0] <= 1.02
    assert taken[1] > taken[0] + 0.03
    assert kernels[0] == kernels[1]
