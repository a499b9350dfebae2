"""Programs for absent GPUs: no callback is left, and nothing else has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxmem.program.ir import Block
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.standin import has_callbacks, without_callbacks
from jaxmem.targets import compile_for
from tests.planner.lines import program
from tests.problems import PROBLEMS

X = jnp.linspace(0, 1, 8)


def shout(x):
    jax.debug.callback(lambda value: None, x)
    return x * 2


def asks(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return io_callback(np.asarray, shape, x, ordered=True) + x


def pure_asks(x):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * x


FORMS = {
    "plain": shout,
    "printed": lambda x: (jax.debug.print("{}", x), x * 2)[1],
    "ordered with results": asks,
    "pure with results": pure_asks,
    "in a loop": lambda x: lax.scan(lambda c, y: (shout(c), asks(y)), x[0], x),
    "in a loop in a loop": lambda x: lax.fori_loop(
        0, 3, lambda _, c: lax.scan(lambda d, _: (shout(d), None), c, None, length=2)[0], x
    ),
    "in a while loop": lambda x: lax.while_loop(lambda c: c.sum() < 9, shout, x + 1),
    "in a branch": lambda x: lax.cond(x[0] > 0, shout, asks, x),
    "in a checkpoint": jax.grad(lambda x: jax.checkpoint(shout)(x).sum()),
}


def primitives(jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for param in eqn.params.values():
            for item in param if isinstance(param, tuple | list) else (param,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


def emitted(block: Block):
    return jax.make_jaxpr(as_function(block))(*[v.aval for v in block.inputs])


@pytest.mark.parametrize("form", FORMS)
def test_no_callback_is_left_and_all_else_stays(form: str):
    block = program(FORMS[form], X).block
    mute = without_callbacks(block)
    before, after = (Counter(primitives(emitted(b).jaxpr)) for b in (block, mute))
    callbacks = {name for name in before if "callback" in name or name == "debug_print"}
    assert has_callbacks(block)
    assert callbacks
    assert not has_callbacks(mute)
    assert not callbacks & set(after)
    # What a callback returned is zeros now; nothing else came or went.
    changed = {n for n in before | after if before[n] != after[n]} - callbacks
    assert changed <= {"broadcast_in_dim", "full", "optimization_barrier"}
    assert not emitted(mute).effects
    assert [v.aval for v in mute.outputs] == [v.aval for v in block.outputs]


@pytest.mark.parametrize("form", ["ordered with results", "in a loop", "in a branch"])
def test_it_compiles_for_an_absent_gpu(form: str):
    block = program(FORMS[form], X).block
    mute = without_callbacks(block)
    assert compile_for("h200", as_function(mute), [X]).memory.argument_bytes == X.nbytes


def test_results_of_callbacks_are_zeros_of_their_shape():
    block = without_callbacks(program(asks, X).block)
    assert np.array_equal(as_function(block)(X)[0], X)


def test_a_program_without_callbacks_is_left_alone():
    step, args = PROBLEMS["lstm"].make()
    block = program(step, *args).block
    assert not has_callbacks(block)
    assert without_callbacks(block).ops == block.ops
