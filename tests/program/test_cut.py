"""A step that is cut computes what it does whole, and hands over no more than it must."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.errors import CutError
from jaxmem.program import primitives, waiting
from jaxmem.program.calling import Caller
from jaxmem.program.cut import cut
from jaxmem.program.ir import Value
from jaxmem.rewrite.emit import as_function
from tests.streamed_steps import LAYERS, OPTIMIZERS, SPREAD, WIDTH, X, state_with, step_with

MIB = 2**20


def traced(step, *args, donate=0):
    caller = Caller(step, donate)
    call = caller.take(args, {})
    return caller.trace(call).program, call


def moments(program, least=MIB):
    """The leaves of the optimizer's state that are large enough."""
    first = len(program.consts)
    return [
        n
        for n, leaf in enumerate(program.arguments)
        if leaf.path.startswith("state[1]") and program.block.inputs[first + n].nbytes >= least
    ]


def run(pieces, call):
    """All parts of a step, one after the other, as they would run."""
    program = pieces.program
    env = dict(zip(program.block.inputs, [*program.consts, *call.leaves], strict=True))
    first = pieces.first.block
    outputs = jax.jit(as_function(first))(*[env[v] for v in first.inputs])
    env.update((v, o) for v, o in zip(first.outputs, outputs, strict=True) if isinstance(v, Value))
    for part in pieces.parts:
        assert not part.stage
        outputs = jax.jit(as_function(part.block))(*[env[v] for v in part.reads])
        env.update(zip(part.names, outputs, strict=True))
    return [env[v] if isinstance(v, Value) else v.val for v in program.block.outputs]


def numbers(tree):
    leaves = jax.tree.leaves(tree)
    keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    pairs = zip(leaves, keys, strict=True)
    return [np.asarray(jax.random.key_data(a) if key else a, np.float64) for a, key in pairs]


@pytest.mark.parametrize("name", SPREAD)
def test_the_parts_compute_what_the_step_does(name: str):
    tx = OPTIMIZERS[name]
    step, state = step_with(tx, norm=True), state_with(tx)
    program, call = traced(step, state, X)
    pieces = cut(program, moments(program), bucket_bytes=0)
    expected, found = numbers(jax.jit(step)(state, X)), numbers(run(pieces, call))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_leaf_is_fetched_and_sent_as_often_as_its_norms_ask(name: str):
    program, _ = traced(step_with(OPTIMIZERS[name]), state_with(OPTIMIZERS[name]), X)
    leaves = moments(program)
    pieces = cut(program, leaves)
    fetches = {v: 0 for n, v in enumerate(program.block.inputs) if n in pieces.hosting.inputs}
    for part in pieces.parts:
        for leaf in part.fetched:
            fetches[leaf] += 1
    most = {"clipped updates": 2, "clipped twice": 3}.get(name, 1)
    assert max(fetches.values()) == most
    sent = [v for part in pieces.parts for v in part.sent]
    assert len(sent) == len(set(sent)) == len(leaves)


def test_what_updates_share_is_only_the_gradient():
    """Squares, float32 copies and decayed weights are made again where they are read."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))

    def step(state, x):
        params, moments, count = state
        grads = jax.grad(net16)(params, x)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, moments = tx.update(grads, moments, jax.tree.map(jnp.float32, params))
        wide = optax.apply_updates(jax.tree.map(jnp.float32, params), updates)
        return (jax.tree.map(jnp.bfloat16, wide), moments, count + 1)

    def net16(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return (x.astype(jnp.float32) ** 2).mean()

    params = {f"w{n}": jnp.ones((WIDTH, WIDTH), jnp.bfloat16) for n in range(3)}
    state = (params, tx.init(jax.tree.map(jnp.float32, params)), jnp.int32(0))
    program, _ = traced(step, state, X.astype(jnp.bfloat16))
    pieces = cut(program, moments(program))
    large = [
        v
        for part in pieces.parts
        for v in part.reads
        if v not in part.fetched and v.nbytes >= MIB // 2
    ]
    params = [v for v in large if v in program.block.inputs]
    handed = [v for v in large if v not in program.block.inputs]
    assert len(params) == len(handed) == 3
    assert {v.aval.dtype for v in handed} == {jnp.dtype("bfloat16")}


def test_small_leaves_are_updated_together():
    tx = OPTIMIZERS["adam"]
    program, _ = traced(step_with(tx), state_with(tx), X)
    leaves = moments(program)
    assert len(cut(program, leaves).parts) == LAYERS
    assert len(cut(program, leaves, bucket_bytes=4 * MIB).parts) == 2
    assert len(cut(program, leaves, bucket_bytes=100 * MIB).parts) == 1


def test_a_metric_of_all_updates_costs_no_second_fetch():
    tx = OPTIMIZERS["adam"]
    program, _ = traced(step_with(tx, norm=True), state_with(tx), X)
    pieces = cut(program, moments(program))
    assert pieces.fetched_bytes == pieces.sent_bytes == 2 * LAYERS * MIB


def test_a_state_that_is_looked_at_as_one_is_fetched_as_one():
    """``lax.cond`` around the whole update: what it takes is needed at once."""
    tx = OPTIMIZERS["only if finite"]
    program, _ = traced(step_with(tx), state_with(tx), X)
    assert [len(part.fetched) for part in cut(program, moments(program)).parts] == [2 * LAYERS]


def test_donated_buffers_are_given_away_once_and_after_their_last_reader():
    for tx in OPTIMIZERS.values():
        program, _ = traced(step_with(tx, norm=True), state_with(tx), X)
        pieces = cut(program, moments(program))
        given = [v for part in pieces.parts for v in (part.reads[n] for n in part.over)]
        once = [v for v in given if v not in {f for p in pieces.parts for f in p.fetched}]
        assert len(once) == len(set(once))
        for n, part in enumerate(pieces.parts):
            later = {v for other in pieces.parts[n + 1 :] for v in other.reads}
            gone = {part.reads[k] for k in part.over if part.reads[k] not in part.fetched}
            assert not gone & later
            assert set(part.donated) <= set(part.over)
        first = pieces.first
        donated = {first.block.inputs[n] for n in first.donated}
        assert not donated & {v for part in pieces.parts for v in part.reads}


def test_results_take_the_place_of_the_argument_of_their_name():
    """Arguments of one shape in another order than the results."""

    def step(state, x):
        update = jax.tree.map(lambda m: 0.9 * m + x.sum(), state["moments"])
        return {"a": state["w"] - update, "moments": update, "w": state["w"] + x.sum()}, x

    big = jnp.zeros((WIDTH, WIDTH))
    program, _ = traced(step, {"moments": big, "w": big + 1, "a": big}, X)
    named = {program.results[n].path: p for n, p in program.places.items()}
    paths = [leaf.path for leaf in program.arguments]
    assert {path: paths[p] for path, p in named.items()} == {
        "[0]['a']": "state['a']",
        "[0]['moments']": "state['moments']",
        "[0]['w']": "state['w']",
    }


def test_a_leaf_that_is_donated_and_does_not_come_back_cannot_wait():
    def step(state, x):
        return {"m": state["m"].sum()}, x

    state = {"m": jnp.zeros((WIDTH, WIDTH))}
    with pytest.raises(CutError, match=r"state\['m'\].* no result of that shape"):
        cut(traced(step, state, X)[0], [0])
    # Not donated it is only read.
    assert len(cut(traced(step, state, X, donate=())[0], [0]).parts) == 1


def test_a_leaf_whose_successor_takes_no_place_cannot_wait():
    def step(state, x):
        return {"m": state["m"] + x.sum()}, x

    program, _ = traced(step, {"m": jnp.zeros((WIDTH, WIDTH))}, X, donate=())
    with pytest.raises(CutError, match=r"state\['m'\].*: it is not donated, so no result"):
        cut(program, [0])


def test_an_effect_in_an_update_cannot_be_cut():
    def step(state, x):
        m = 0.9 * state["m"] + x.sum()
        jax.debug.print("{}", m.sum())
        return {"m": m}

    program, _ = traced(step, {"m": jnp.zeros((WIDTH, WIDTH))}, X)
    with pytest.raises(CutError, match=r"state\['m'\].*debug_"):
        cut(program, [0])


def test_effects_before_updates_stay_in_the_first_part():
    said = []

    def step(state, x):
        jax.debug.callback(lambda v: said.append(float(v)), x.sum())
        return {"m": 0.9 * state["m"] + x.sum()}

    program, call = traced(step, {"m": jnp.zeros((WIDTH, WIDTH))}, X)
    run(cut(program, [0]), call)
    jax.effects_barrier()
    assert len(said) == 1


def test_each_operation_is_looked_at_as_often_whatever_the_number_of_leaves(monkeypatch):
    looked: list[int] = []

    def may_repeat(op):
        looked[-1] += 1
        return primitives.may_repeat(op)

    monkeypatch.setattr(waiting, "may_repeat", may_repeat)
    tx = OPTIMIZERS["adam"]
    for layers in (2, 4):
        program, _ = traced(step_with(tx), state_with(tx, layers=layers), X)
        inputs = program.block.inputs[len(program.consts) :]
        hosted = {v: a.path for v, a in zip(inputs, program.arguments, strict=True)}
        looked.append(0)
        found = waiting.Waiting(program, hosted)
        assert len({found[v].leaf for v in hosted}) < len(hosted)  # Some are updated together.
    assert looked[1] <= 2.5 * looked[0]
