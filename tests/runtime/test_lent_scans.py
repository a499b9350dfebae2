"""Stacked parameters that wait in host memory are fetched row by row by loops that read them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.program.calling import Caller
from jaxmem.program.ir import in_host_memory
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.fetching import fetching_ahead
from jaxmem.runtime import guard, parts, room, streamed
from tests.scanned_nets import (
    LAYERS,
    WIDTH,
    X,
    backwards,
    checkpointed,
    inside_out,
    layer,
    params_of,
    plain,
    with_rows_of_both,
)
from tests.streamed_steps import MIB, fitted, kinds, same, step_of

LEAF = LAYERS * WIDTH * WIDTH * 4


def twice(params, x):
    """Two loops read the same arrays."""
    x, _ = jax.lax.scan(layer, x, params)
    return plain(params, x)


NETS = {
    f.__name__: f for f in (plain, backwards, checkpointed, with_rows_of_both, twice, inside_out)
}


def read_elsewhere(params, x):
    """The first layer is read by itself, too."""
    return plain(params, x) + plain(jax.tree.map(lambda a: a[:1] * 0.5, params), x)


def unrolled(params, x):
    return (jax.lax.scan(layer, x, params, unroll=2)[0] ** 2).mean()


def returned(params, x):
    return plain(params, x), params


def as_a_constant(params, x):
    """Every iteration reads all of it."""

    def inner(x, _):
        return x + x @ params["in"][0] + params["out"].sum(0)[0], None

    return (jax.lax.scan(inner, x, None, length=4)[0] ** 2).mean()


@pytest.fixture(autouse=True)
def in_small_chunks(monkeypatch):
    monkeypatch.setattr(streamed, "_BUCKET_BYTES", 2 * MIB)
    monkeypatch.setattr(room, "_WINDOW_BYTES", 8 * MIB)


def forward(net, **options):
    settings = {"target": "h200", "host": "params*", "budget": 10 * MIB, "progress": False}
    return jaxmem.fit(net, **{**settings, **options})


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "plain" else pytest.mark.wide) for name in NETS],
)
def test_a_net_reads_weights_where_they_are(name: str):
    """In a budget that is less than they are, and as if they were on the device."""
    params, net = params_of(), NETS[name]
    run = forward(net)
    plan = run.plan(params, X)
    told = plan.streamed
    assert told is not None
    assert told.ahead == 2
    assert told.fetched_bytes == 2 * LEAF * (2 if name == "twice" else 1)
    assert plan.compiled_bytes <= 10 * MIB < 2 * LEAF
    placed, _ = run.place(params, X)
    assert kinds(placed).count("pinned_host") == 2
    same(run(placed, X), jax.jit(net)(params, X))
    same(placed, params, rtol=0)
    assert "loops fetch 2 of them row by row" in " ".join(plan.explain().sentences)


ADAM = optax.adam(1e-2, eps=1e-3)
STEPS = {name: (net, ADAM) for name, net in NETS.items()}
STEPS["clipped"] = (plain, optax.chain(optax.clip_by_global_norm(0.1), ADAM))
STEPS["descent"] = (plain, optax.sgd(1e-2))
STEPS["lion"] = (plain, optax.lion(1e-3))
STEPS["decayed"] = (plain, optax.adamw(1e-2, eps=1e-3, weight_decay=0.1))


MARKS = {"plain": [], "descent": [], "twice": pytest.mark.wide, "clipped": pytest.mark.wide}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in STEPS]
)
def test_steps_are_those_of_jit(name: str):
    """Parameters, moments and all: gradients and activations are what the device has."""
    net, tx = STEPS[name]
    step, params = step_of(net, tx), params_of()
    state = (params, tx.init(params))
    run = fitted(step, host="*", budget=40 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.ahead == 2
    assert plan.streamed.by_rows == 2
    assert plan.compiled_bytes <= 40 * MIB
    mine, theirs = run.place(jax.tree.map(jnp.copy, state), X)[0], state
    where = kinds(mine)
    for _ in range(3):
        mine, found = run(mine, X)
        theirs, expected = jax.jit(step)(theirs, X)
        same(found, expected, rtol=1e-4)
        assert kinds(mine) == where
    same(mine, theirs, rtol=1e-2)


def test_what_is_written_over_was_read_before():
    """A loss of the old parameters that nothing else needs, the last thing in the step."""

    def step(params, x):
        grads = jax.grad(plain)(params, x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return new, backwards(params, x) + plain(grads, x)

    params = params_of()
    run = fitted(step, host="params*", budget=40 * MIB)
    plan = run.plan(params, X)
    assert plan.streamed is not None
    assert (plan.streamed.ahead, plan.streamed.by_rows) == (2, 2)
    same(run(jax.tree.map(jnp.copy, params), X), jax.jit(step)(params, X), rtol=1e-4)


@pytest.mark.parametrize("net", [read_elsewhere, unrolled, as_a_constant])
def test_what_is_read_in_another_way_is_fetched_whole(net):
    params = params_of()
    run = forward(net, budget=40 * MIB)
    plan = run.plan(params, X)
    assert plan.streamed is not None
    assert plan.streamed.ahead == 0
    same(run(params, X), jax.jit(net)(params, X))


def test_weights_that_are_results_too_are_handed_back():
    params, run = params_of(), forward(returned, budget=60 * MIB)
    plan = run.plan(params, X)
    assert plan.streamed is not None
    assert plan.streamed.ahead == 2
    same(run(params, X), jax.jit(returned)(params, X))


def test_loops_of_two_turns_are_left_alone():
    params = params_of(2)
    plan = forward(plain, budget=10 * MIB).plan(params, X)
    assert plan.streamed is not None
    assert plan.streamed.ahead == 0


@pytest.mark.wide
def test_weights_beside_a_scan_are_fetched_in_stages():
    """An embedding before and a head after it, which are whole."""

    def net(params, x):
        x = x @ params["before"]
        return ((jax.lax.scan(layer, x, params["layers"])[0] @ params["after"]) ** 2).mean()

    square = jax.random.normal(jax.random.key(5), (2, WIDTH, 2 * WIDTH)) * 0.05
    params = {"before": square[0].T[:WIDTH, :WIDTH], "layers": params_of(), "after": square[1]}
    step = step_of(net, ADAM)
    state = (params, ADAM.init(params))
    run = fitted(step, host="*", budget=44 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.ahead == 2
    mine, theirs = jax.tree.map(jnp.copy, state), state
    for _ in range(2):
        mine, found = run(mine, X)
        theirs, expected = jax.jit(step)(theirs, X)
        same(found, expected, rtol=1e-4)
    same(mine, theirs, rtol=1e-2)


def test_rows_are_fetched_before_an_iteration_computes(monkeypatch):
    """Read in the programs for an absent GPU: no kernel reads the host, nothing is copied there.

    Forward and backward, what an iteration computes comes between the start and the end of its
    copies.
    """
    found, real = [], parts._compiled

    def kept(part, target, options):
        compiled = real(part, target, options)
        if part.waiting:
            found.append(compiled)
        return compiled

    monkeypatch.setattr(parts, "_compiled", kept)
    params = params_of()
    fitted(step_of(plain, ADAM), host="*", budget=40 * MIB).plan((params, ADAM.init(params)), X)
    compiled = found[-1]
    assert compiled.memory.host_temp_bytes == 0
    assert compiled.memory.host_argument_bytes == 2 * LEAF
    bodies = [
        part.splitlines()
        for part in compiled.hlo_text().split("\n\n")
        if "-start" in part and not part.lstrip().startswith("ENTRY")
    ]
    assert len(bodies) == 2
    for lines in bodies:
        starts = [
            n for n, line in enumerate(lines) if re.search(r"%dynamic-slice-start\S* = ", line)
        ]
        ends = [n for n, line in enumerate(lines) if re.search(r"%dynamic-slice-done\S* = ", line)]
        products = [
            n for n, line in enumerate(lines) if re.search(r"%\S*(gemm|dot|cublas)\S* = ", line)
        ]
        assert len(starts) == len(ends) == 2
        assert max(starts) < min(products)
        assert sum(n < min(ends) for n in products) >= 1


def test_loops_that_fetch_are_no_command_buffers(monkeypatch):
    """In those copies wait for kernels, which is seen on a GPU only."""
    asked, real = [], parts.compile_for

    def kept(target, *args, **options):
        asked.append(options["options"])
        return real(target, *args, **options)

    monkeypatch.setattr(parts, "compile_for", kept)
    forward(plain).plan(params_of(), X)
    assert [dict(options) for options in asked] == [{"xla_gpu_enable_command_buffer": ""}]


def test_a_jaxlib_that_gets_rows_wrong_fetches_arrays_whole(monkeypatch):
    monkeypatch.setattr(guard, "against_rows", lambda target: "jaxlib 0.0 gets them wrong")
    params = params_of()
    plan = forward(plain, budget=40 * MIB).plan(params, X)
    assert plan.streamed is not None
    assert plan.streamed.ahead == 0
    assert "fetched whole: jaxlib 0.0 gets them wrong" in " ".join(plan.notes)


@pytest.mark.wide
def test_a_saved_plan_is_followed(tmp_path):
    step, params = step_of(plain, ADAM), params_of()
    state = (params, ADAM.init(params))
    plan = fitted(step, host="*", budget=40 * MIB).plan(state, X)
    plan.save(tmp_path / "plan.json")
    again = jaxmem.Plan.load(tmp_path / "plan.json")
    run = jaxmem.fit(step, plan=again, target="h200", donate_argnums=0, progress=False)
    assert run.plan(state, X).streamed == plan.streamed
    same(run(jax.tree.map(jnp.copy, state), X), jax.jit(step)(state, X), rtol=1e-4)


@pytest.mark.parametrize("length", [3, 4, 7])
@pytest.mark.parametrize("reverse", [False, True])
def test_loops_give_what_scans_give(length: int, reverse: bool):
    """Bit for bit, whatever is stacked and handed on, in any dtype."""

    def body(carry, given):
        total, count = carry
        row, flag = given
        total = total * 0.9 + jnp.where(flag, row.astype(jnp.float32), 1.0).sum(0)
        return (total, count + 1), {"row": row * 2, "total": total.astype(jnp.bfloat16)}

    rows = jnp.arange(length * 12, dtype=jnp.int32).reshape(length, 3, 4)
    flags = jnp.arange(length) % 2 == 0

    def run(rows, flags):
        return jax.lax.scan(body, (jnp.zeros(4), 0), (rows, flags), reverse=reverse)

    caller = Caller(run, ())
    block = caller.trace(caller.take((rows, flags), {})).program.block
    changed, ahead = fetching_ahead(block, block.inputs[:1])
    assert ahead == {block.inputs[0]}
    on_host = jax.device_put(rows, in_host_memory(None))
    found = jax.jit(as_function(changed))(on_host, flags)
    for a, b in zip(found, jax.tree.leaves(jax.jit(run)(rows, flags)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
