"""Traced programs: the same operations as JAX's own jaxpr, every call opened, nothing lost."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem.program.ir import Block, Program, Value, aval_bytes
from jaxmem.program.sinking import repeated_numbers
from jaxmem.program.trace import _fingerprint
from tests.planner.lines import program
from tests.problems import PROBLEMS, pure

NAMES = ("mlp", "lstm_nested", "custom_vjp", "custom_jvp", "branches", "jitted", "mixed_leaves")
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
X = jnp.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(scope="module", params=NAMES)
def traced(request) -> tuple[Program, tuple, object]:
    step = pure(PROBLEMS[request.param])
    return program(step.function, *step.args), step.args, step.function


def blocks(block: Block) -> Iterator[Block]:
    yield block
    for op in block.ops:
        if op.loop is not None:
            yield from blocks(op.loop.body)


def opened(jaxpr) -> Iterator[str]:
    """Primitives of a jaxpr with its calls opened and its scans counted with their bodies."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name not in CALLS:
            yield name
        if name in CALLS or name == "scan":
            yield from opened(inner.jaxpr)


def test_every_operation_is_there_once(traced):
    step, args, function = traced
    ops = [op for block in blocks(step.block) for op in block.ops]
    found = Counter(op.name for op in ops if op.origin is op)
    assert found == Counter(opened(jax.make_jaxpr(function)(*args).jaxpr))
    assert step.equations == found.total()
    assert not CALLS & set(found)


def test_only_numbers_that_repeat_are_there_more_than_once(traced):
    step, _, _ = traced
    again = [op for block in blocks(step.block) for op in block.ops if op.origin is not op]
    numbers = {v for block in blocks(step.block) for v in repeated_numbers(block.ops)}
    assert all(v in numbers for op in again for v in op.outputs)


def test_values_are_made_before_they_are_read(traced):
    step, _, _ = traced
    for block in blocks(step.block):
        known = set(block.inputs)
        for op in block.ops:
            assert set(op.values) <= known
            assert not known & set(op.outputs), "made once"
            known.update(op.outputs)
        assert {v for v in block.outputs if isinstance(v, Value)} <= known


def test_keys_are_unique_and_the_same_every_time(traced):
    step, args, function = traced
    keys = [
        [v.key for b in blocks(s.block) for op in b.ops for v in op.outputs]
        for s in (step, program(function, *args))
    ]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == len(keys[0])


def test_loops_have_the_arity_of_their_operands(traced):
    step, _, _ = traced
    for block in blocks(step.block):
        for op in block.ops:
            if op.loop is None:
                continue
            loop = op.loop
            assert len(loop.body.inputs) == len(op.inputs)
            assert len(loop.body.outputs) == len(op.outputs)
            fixed = loop.num_consts + loop.num_carry
            for inner, outer in zip(loop.body.inputs, op.inputs, strict=True):
                sliced = list(loop.body.inputs).index(inner) >= fixed
                assert outer.aval.shape == (
                    (loop.length, *inner.aval.shape) if sliced else inner.aval.shape
                )


def test_bytes_are_those_of_the_arrays(traced):
    step, args, _ = traced
    given = jax.tree.leaves(args)
    assert [v.nbytes for v in step.block.inputs[len(step.consts) :]] == [x.nbytes for x in given]
    assert step.argument_bytes >= sum(x.nbytes for x in given)


@pytest.mark.parametrize(
    "change",
    [
        lambda w, x: jnp.sin(x @ w),
        lambda w, x: (x @ w) * 2.0,
        lambda w, x: jnp.tanh(x @ w).astype(jnp.bfloat16),
        lambda w, x: (jnp.tanh(x @ w), x),
    ],
    ids=["operation", "constant", "dtype", "results"],
)
def test_another_program_has_another_fingerprint(change):
    def step(w, x):
        return jnp.tanh(x @ w)

    args = jnp.ones((4, 4)), X
    same = program(step, *args).fingerprint
    assert program(step, *args).fingerprint == same
    assert program(lambda w, x: jnp.tanh(x @ w), *args).fingerprint == same, "names do not count"
    assert program(change, *args).fingerprint != same
    assert program(step, jnp.ones((4, 5)), X).fingerprint != same


def test_operands_that_change_places_are_another_program():
    """Whatever names JAX gives them: one letter up to 26 values, and then two."""

    def minus(first, second):
        def step(x):
            values = [x + n for n in range(40)]
            return values[first] - values[second]

        return step

    pairs = list(itertools.permutations((0, 1, 2, 25, 26, 27, 28, 39), 2))
    found = {program(minus(*pair), X).fingerprint for pair in pairs}
    assert len(found) == len(pairs)


@pytest.mark.parametrize("mapped", [False, True])
def test_the_devices_of_a_mesh_are_not_of_the_program(mapped):
    """JAX prints them with it, and an absent cluster has none."""
    auto = {"axis_types": (AxisType.Auto,)}

    def fingerprint(over, kind=None):
        def constrained(x):
            layout = NamedSharding(over, PartitionSpec("data"), memory_kind=kind)
            return jax.lax.with_sharding_constraint(jnp.sin(x), layout)

        specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
        step = jax.shard_map(jnp.sin, mesh=over, **specs) if mapped else constrained
        return _fingerprint(jax.make_jaxpr(step)(jnp.ones((4, 4))))

    here = fingerprint(jax.make_mesh((1,), ("data",), **auto))
    assert here == fingerprint(AbstractMesh((1,), ("data",), **auto))
    assert here != fingerprint(AbstractMesh((2,), ("data",), **auto))
    if not mapped:
        away = jax.make_mesh((1,), ("data",), **auto)
        assert here != fingerprint(away, "unpinned_host"), "another memory is another program"


def test_a_program_printed_in_colours_has_the_same_fingerprint(monkeypatch):
    """As JAX prints it where standard output is a terminal or a notebook."""

    def loop(x):
        return lax.scan(lambda y, row: (jnp.tanh(y + row), y), x[0], x)

    printed = type(jax.make_jaxpr(loop)(X).jaxpr)
    same = program(loop, X).fingerprint
    monkeypatch.setattr(printed, "__str__", lambda it: it.pretty_print(use_color=True))
    assert "\x1b[" in str(jax.make_jaxpr(loop)(X).jaxpr)
    assert program(loop, X).fingerprint == same


def test_callbacks_and_functions_do_not_change_the_fingerprint():
    def make():
        return lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x)

    assert program(make(), 1.0).fingerprint == program(make(), 1.0).fingerprint


def test_captured_arrays_become_constants_once():
    table = np.linspace(0, 1, 4, dtype=np.float32)
    inner = jax.jit(lambda x: x + table)
    step = program(lambda x: inner(x) + inner(2 * x) + table, X)
    assert len(step.block.inputs) == len(step.consts) + 1
    assert sum(np.shape(c) == (4,) for c in step.consts) <= 2
    assert step.argument_bytes == X.nbytes + sum(np.asarray(c).nbytes for c in step.consts)


def test_results_that_are_arguments():
    def step(state, x):
        return state + x, state, x, state

    plain = program(step, X, X + 1)
    assert (plain.output_bytes, plain.aliased_bytes) == (4 * X.nbytes, 0)
    donating = program(step, X, X + 1, donate=(0,))
    assert donating.aliased_bytes == X.nbytes
    assert donating.fixed_bytes == 5 * X.nbytes, "two arguments, four results, one shared"


def test_aliasing_needs_the_same_shape_and_dtype():
    def step(a, b, c):
        return a.T * 1.0, b + 1, c.astype(jnp.float32) + 1

    args = X, X, X.astype(jnp.bfloat16)
    donating = program(step, *args, donate=(0, 1, 2))
    assert donating.aliased_bytes == 2 * X.nbytes, "two float32 [3, 4] are given and wanted"


def test_checkpoints_branches_and_while_loops_stay_whole():
    def step(x):
        y = jax.checkpoint(jnp.sin)(x)
        y = lax.cond(y[0, 0] > 0, jnp.cos, jnp.tan, y)
        return lax.while_loop(lambda y: y.sum() < 10, lambda y: y + 1, y)

    names = [op.name for op in program(step, X).block.ops]
    assert names.count("cond") == names.count("while") == 1
    assert {"checkpoint", "remat2", "remat"} & set(names)
    assert not {"sin", "cos", "tan"} & set(names)


def test_bytes_of_odd_things():
    assert aval_bytes(jax.typeof(jax.random.key(0))) == 8
    assert aval_bytes(object()) == 0, "a token has no shape"
    assert aval_bytes(jax.ShapeDtypeStruct((3, 0), jnp.float32)) == 0
    assert aval_bytes(jax.ShapeDtypeStruct((), jnp.bool_)) == 1
