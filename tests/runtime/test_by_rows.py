"""Large leaves that wait in host memory are updated some rows at a time, in their place."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import jaxmem
from jaxmem.program.calling import Caller
from jaxmem.program.cut import cut
from jaxmem.runtime import guard, room, streamed
from jaxmem.runtime.parts import compile_parts
from jaxmem.targets.target import Target
from tests.streamed_steps import MIB, X, failing, fitted, kinds, same, step_of

LAYERS, WIDTH = 12, 512
OPTIMIZERS = {
    "adam": (optax.adam(1e-2, eps=1e-3), True),
    "adamw": (optax.adamw(1e-2, eps=1e-3, weight_decay=0.1), True),
    "clipped gradients": (
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-3)),
        True,
    ),
    "scheduled": (optax.adam(optax.cosine_decay_schedule(1e-2, 10), eps=1e-3), True),
    "averaged": (optax.chain(optax.adam(1e-2, eps=1e-3), optax.ema(0.9)), True),
    "lion": (optax.lion(1e-3), True),
    "momentum": (optax.sgd(1e-2, momentum=0.9), True),
    "bfloat16 moments": (optax.adam(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16), True),
    "several steps": (optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2), None),
    # The norm of a whole leaf, and iterations that go on for all of it.
    "lamb": (optax.lamb(1e-2, eps=1e-3), False),
    "clipped updates": (
        optax.chain(optax.scale_by_adam(eps=1e-3), optax.clip_by_global_norm(0.1)),
        None,
    ),
}


def net(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["kernel"] + w["bias"]), None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


def state_with(tx):
    kernel = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) * 0.05
    params = {"kernel": kernel, "bias": jnp.zeros((LAYERS, WIDTH))}
    return params, tx.init(params)


@pytest.fixture(autouse=True)
def in_small_chunks(monkeypatch):
    monkeypatch.setattr(streamed, "_BUCKET_BYTES", 2 * MIB)
    monkeypatch.setattr(room, "_WINDOW_BYTES", 8 * MIB)
    monkeypatch.setattr(streamed, "_WHOLE_BYTES", 8 * MIB)


MARKS = {"adam": [], "lamb": [], **dict.fromkeys(["averaged", "several steps"], pytest.mark.wide)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in OPTIMIZERS]
)
def test_steps_are_those_of_jit(name: str):
    tx, by_rows = OPTIMIZERS[name]
    step, state = step_of(net, tx), state_with(tx)
    run, plain = fitted(step), jax.jit(step)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert by_rows is None or bool(plan.streamed.by_rows) == by_rows
    mine, theirs = jax.tree.map(jnp.copy, state), state
    for _ in range(3):
        mine, found = run(mine, X)
        theirs, expected = plain(theirs, X)
        same(found, expected, rtol=1e-4)
    same(mine, theirs, rtol=1e-2)
    assert kinds(mine[0]) == ["device", "device"]
    assert "pinned_host" in kinds(mine[1])


def test_the_device_never_has_a_whole_leaf_and_the_plan_says_so():
    tx = optax.adam(1e-2, eps=1e-3)
    step, state = step_of(net, tx), state_with(tx)
    plan = fitted(step).plan(state, X)
    assert plan.streamed is not None
    leaf = LAYERS * WIDTH * WIDTH * 4
    assert plan.streamed.window_bytes < leaf // 2
    assert plan.streamed.fetched_bytes == plan.streamed.sent_bytes == 2 * leaf
    # Parameters and gradients, with something of moments; not the moments.
    assert 2 * leaf < plan.compiled_bytes < 3.2 * leaf
    assert "1 of them some rows at a time" in " ".join(plan.explain().sentences)
    whole = fitted(step, budget=plan.compiled_bytes).plan(state, X)
    assert whole.compiled_bytes <= plan.compiled_bytes


@pytest.mark.parametrize("name", ["adam", "momentum", "averaged"])
def test_no_leaf_is_copied_in_host_memory_and_every_copy_is_one_of_rows(name: str):
    """Read in the program for an absent GPU: offsets that go with the loop's counter."""
    tx, _ = OPTIMIZERS[name]
    state = state_with(tx)
    caller = Caller(step_of(net, tx), 0)
    program = caller.trace(caller.take((state, X), {})).program
    first = len(program.consts)
    large = [
        n
        for n, leaf in enumerate(program.arguments)
        if leaf.path.startswith("state[1]") and program.block.inputs[first + n].nbytes > MIB
    ]
    pieces = cut(program, large, 2 * MIB, 8 * MIB)
    (part,) = [part for part in pieces.parts if part.chunks]
    (compiled,) = compile_parts([part], Target("h200"))
    assert compiled.memory.host_temp_bytes == 0
    assert compiled.memory.host_argument_bytes >= len(large) * LAYERS * WIDTH * WIDTH * 4
    text = compiled.hlo_text()
    assert not re.search(r"S\(5\)\} copy\(", text)
    # Each leaf is fetched and written in the body of the loop, in the program's own copies.
    assert text.count("dynamic_slice_config") >= 2 * len(large)
    if len(large) > 1:
        at = under_way(text)
        assert len(at["dynamic-slice"]) == len(at["dynamic-update-slice"]) == len(large)
        # Nothing is fetched while nothing is written.
        for started, done in at["dynamic-slice"]:
            assert any(a < done and started < b for a, b in at["dynamic-update-slice"])


def under_way(text):
    """From where to where in the body of the loop rows are fetched and written."""
    (body,) = (
        part
        for part in text.split("\n\n")
        if "-start" in part and not part.lstrip().startswith("ENTRY")
    )
    found = {"dynamic-slice": [], "dynamic-update-slice": []}
    lines = body.splitlines()
    for n, line in enumerate(lines):
        made = re.match(r"\s*%((dynamic-(?:update-)?slice)-start\S*) = ", line)
        if made:
            done = next(k for k, other in enumerate(lines) if f"-done(%{made[1]})" in other)
            found[made[2]].append((n, done))
    return found


def test_a_jaxlib_that_gets_rows_wrong_fetches_leaves_whole(monkeypatch):
    monkeypatch.setattr(guard, "against_rows", lambda target: "jaxlib 0.0 gets them wrong")
    tx = optax.adam(1e-2, eps=1e-3)
    plan = fitted(step_of(net, tx)).plan(state_with(tx), X)
    assert plan.streamed is not None
    assert plan.streamed.by_rows == 0
    assert "fetched whole and not by rows: jaxlib 0.0 gets them wrong" in " ".join(plan.notes)


def test_numbers_among_the_results_and_one_array_in_two_places():
    def step(state, x):
        params, moments = state
        loss, grads = jax.value_and_grad(net)(params, x)
        new = jax.tree.map(lambda m, g: 0.9 * m + g, moments["a"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, new)
        return (params, {"a": new, "b": new}), (loss, 3)

    params = state_with(optax.identity())[0]
    state = (params, {name: jax.tree.map(jnp.ones_like, params) for name in "ab"})
    run = fitted(step)
    expected = jax.jit(step)(state, X)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.by_rows == 0
    found = run(jax.tree.map(jnp.copy, state), X)
    assert found[1][1] == 3
    same(found, expected, rtol=1e-4)

    def once(state, x):
        (params, moments), (loss, three) = step((state[0], {"a": state[1], "b": state[1]}), x)
        return (params, moments["a"]), (loss, three)

    state = (params, state[1]["a"])
    run = fitted(once)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.by_rows == 1
    same(run(jax.tree.map(jnp.copy, state), X), jax.jit(once)(state, X), rtol=1e-4)


@pytest.mark.parametrize("times", [1, 2])
def test_an_update_by_rows_that_does_not_start_is_run_again(monkeypatch, times):
    """At once with nothing else under way, and if it fails again, when the caller asks for it."""
    tx = optax.adam(1e-2, eps=1e-3)
    step, state = step_of(net, tx), state_with(tx)
    run = fitted(step)
    expected = run(jax.tree.map(jnp.copy, state), X)

    given = run.place(jax.tree.map(jnp.copy, state), X)[0]
    found = failing(run, (given, X), times, "the update of state", monkeypatch)
    same(found, expected, rtol=0)


def test_leaves_that_are_results_as_they_are_or_read_again_are_fetched_whole():
    """Writing over them would change what somebody else has."""

    def step(state, x):
        params, old = state
        grads = jax.grad(net)(params, x)
        new = jax.tree.map(lambda a, g: 0.9 * a + g, old, grads)
        params = jax.tree.map(lambda p, a: p - 0.1 * a, params, new)
        return (params, new), {"before": old["kernel"], "after": new["kernel"] * 2}

    state = state_with(optax.identity())[0]
    state = (state, jax.tree.map(jnp.ones_like, state))
    expected = jax.jit(step)(state, X)
    run = fitted(step, host="state[1]['kernel']")
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.by_rows == 0
    same(run(jax.tree.map(jnp.copy, state), X), expected, rtol=1e-4)


@pytest.mark.wide
def test_a_saved_plan_is_followed_by_rows(tmp_path):
    tx = optax.adam(1e-2, eps=1e-3)
    step, state = step_of(net, tx), state_with(tx)
    plan = fitted(step).plan(state, X)
    plan.save(tmp_path / "plan.json")
    again = jaxmem.Plan.load(tmp_path / "plan.json")
    assert again == plan
    run = jaxmem.fit(step, plan=again, target="h200", donate_argnums=0, progress=False)
    assert run.plan(state, X).streamed == plan.streamed
    same(run(jax.tree.map(jnp.copy, state), X), jax.jit(step)(state, X), rtol=1e-4)
