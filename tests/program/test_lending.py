"""Parameters in host memory: what reads them is told apart from what updates them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.program.calling import Caller
from jaxmem.program.cut import cut
from jaxmem.program.ir import Value
from jaxmem.program.lending import lend
from jaxmem.rewrite.emit import as_function
from tests.streamed_steps import LAYERS, MIB, OPTIMIZERS, X, net, state_with, step_with

# In the two that are left out all moments sit in one branch.
MORE = [
    pytest.param(name, marks=pytest.mark.wide)
    for name in sorted(
        set(OPTIMIZERS) - {"adam", "clipped twice", "only if finite", "several steps"}
    )
]


def traced(step, *args, donate=0):
    caller = Caller(step, donate)
    call = caller.take(args, {})
    return caller.trace(call).program, call


def large(program):
    first = len(program.consts)
    values = program.block.inputs[first:]
    return [n for n, v in enumerate(values) if v.nbytes >= MIB]


def paths(program, values):
    first = len(program.consts)
    return [program.arguments[program.block.inputs.index(v) - first].path for v in values]


@pytest.mark.parametrize("norm", [False, True], ids=["loss", "and norm of updates"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_lent_and_moments_are_not(name: str, norm: bool):
    tx = OPTIMIZERS[name]
    program, _ = traced(step_with(tx, norm=norm), state_with(tx), X)
    lent = lend(program, large(program))
    assert paths(program, lent.leaves.values()) == [f"state[0]['w{n}']" for n in range(LAYERS)]


def test_a_step_that_tells_nothing_but_its_state_lends_its_parameters():
    tx = OPTIMIZERS["adam"]
    program, _ = traced(lambda state, x: step_with(tx)(state, x)[0], state_with(tx), X)
    assert len(lend(program, large(program)).leaves) == LAYERS


def test_nothing_is_lent_where_nothing_is_read_but_by_updates():
    program, _ = traced(
        lambda state: jax.tree.map(lambda a: a * 0.9, state), state_with(OPTIMIZERS["adam"])
    )
    lent = lend(program, large(program))
    assert not lent.leaves and lent.program is program


def together(pieces, call):
    """A cut step run piece by piece, lent leaves given to its first part as they are."""
    program = pieces.program
    given = program.block.inputs[: len(program.block.inputs) - len(pieces.lent)]
    env = dict(zip(given, [*program.consts, *call.leaves], strict=True))
    env.update((v, env[leaf]) for v, leaf in pieces.lent.items())
    first = pieces.first.block
    outputs = jax.jit(as_function(first))(*[env[v] for v in first.inputs])
    env.update((v, o) for v, o in zip(first.outputs, outputs, strict=True) if isinstance(v, Value))
    for part in pieces.parts:
        outputs = jax.jit(as_function(part.block))(*[env[v] for v in part.reads])
        env.update(zip(part.names, outputs, strict=True))
    return [env[v] if isinstance(v, Value) else v.val for v in program.block.outputs]


@pytest.mark.wide
@pytest.mark.parametrize("name", ["adam", "clipped twice", *MORE])
def test_the_parts_compute_what_the_step_does(name: str):
    tx = OPTIMIZERS[name]
    step, state = step_with(tx, norm=True), state_with(tx)
    program, call = traced(step, state, X)
    pieces = cut(program, large(program), bucket_bytes=0)
    assert pieces.lent_bytes == LAYERS * MIB and not pieces.sent
    # Each update fetches its parameter as it fetches its moments.
    updates = [part for part in pieces.parts if part.sent]
    assert 1 < len(updates) <= LAYERS
    assert sum(len(part.sent) for part in updates) == len(pieces.hosting.results)
    assert not any(set(part.fetched) & set(pieces.lent) for part in updates)
    for a, b in zip(jax.tree.leaves(jax.jit(step)(state, X)), together(pieces, call), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(b, a, rtol=3e-5, atol=3e-7)


def test_what_is_only_read_need_not_be_donated():
    params = state_with(optax.sgd(0.1))[0]
    program, _ = traced(net, params, X, donate=())
    pieces = cut(program, large(program))
    assert pieces.lent_bytes == LAYERS * MIB
    assert not pieces.parts and not pieces.hosting.results
    assert len(pieces.hosting.inputs) == LAYERS


def test_shared_work_of_both_uses_is_done_by_what_computes_gradients():
    def step(params, x):
        rounded = [w.astype(jnp.bfloat16) for w in params]  # read by products and by the decay

        def loss(rounded):
            y = x
            for r in rounded:
                y = jnp.tanh(y @ r)
            return (y**2).mean()

        value, grads = jax.value_and_grad(loss)(rounded)
        decayed = [w - 0.01 * r.astype(w.dtype) for w, r in zip(params, rounded, strict=True)]
        return [w - 0.1 * g.astype(w.dtype) for w, g in zip(decayed, grads, strict=True)], value

    params = [jnp.eye(512) * n for n in range(1, 6)]
    x = jnp.ones((8, 512), jnp.bfloat16)
    program, call = traced(step, params, x)
    pieces = cut(program, range(5))
    assert pieces.lent_bytes == 5 * MIB
    found = together(pieces, call)
    for a, b in zip(jax.tree.leaves(jax.jit(step)(params, x)), found, strict=True):
        np.testing.assert_allclose(np.float64(b), np.float64(a), rtol=1e-2, atol=1e-5)


def test_what_is_lent_is_read_on_the_device_wherever_it_was_given():
    state = state_with(OPTIMIZERS["adam"])
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    program, _ = traced(step_with(OPTIMIZERS["adam"]), jax.device_put(state, there), X)
    lent = lend(program, large(program))
    layouts = dict(zip(lent.program.block.inputs, lent.program.layouts(), strict=True))
    assert {layouts[leaf].memory_kind for leaf in lent.leaves.values()} == {"pinned_host"}
    assert {layouts[new].memory_kind for new in lent.leaves} == {"device"}
