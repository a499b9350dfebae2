"""Which values are buffers: the laws every answer keeps, and the rules one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.program.fusion import Fusion, fuse
from jaxmem.program.ir import Block, Op, Value
from jaxmem.program.primitives import Kind, kind_of, may_repeat
from tests.planner.lines import program
from tests.problems import PROBLEMS, pure

X = jnp.ones((64, 64))
ROWS = jnp.arange(64)
NAMES = ("transformer_dropout_unrolled", "branches", "custom_vjp", "mixed_leaves")


def fused(block: Block) -> Fusion:
    return fuse(block.inputs, block.ops, block.outputs)


@pytest.mark.parametrize("name", NAMES)
def test_laws_of_every_answer(name: str):
    step = pure(PROBLEMS[name])
    block = program(step.function, *step.args).block
    fusion = fused(block)
    made = {v: kind for op, kind in zip(block.ops, fusion.kinds, strict=True) for v in op.outputs}
    added = {v for op in block.ops if op.name.startswith("scatter") for v in op.outputs}
    for value, roots in fusion.roots.items():
        assert all(fusion.is_buffer(root) for root in roots), "roots are buffers"
        if made.get(value) in (Kind.OPAQUE, Kind.REDUCE) and value not in added:
            assert fusion.is_buffer(value)
    for op, kind in zip(block.ops, fusion.kinds, strict=True):
        assert kind is kind_of(op)
        if kind is Kind.OPAQUE:
            assert all(len(fusion.roots[v]) <= 1 for v in op.values), "it reads buffers"
    assert all(len(fusion.roots[v]) <= 1 for v in block.outputs if isinstance(v, Value))


def buffers(function, *args) -> list[str]:
    """Names of the operations of a function whose results are buffers."""
    block = program(function, *args).block
    fusion = fused(block)
    return [op.name for op in block.ops if any(fusion.is_buffer(v) for v in op.outputs)]


def loop(x, given):
    return lax.scan(lambda carry, _: (jnp.where(carry > 0, carry, given), None), x, length=3)[0]


def _picked(x):
    return jnp.zeros_like(x).at[ROWS].add(x, mode="promise_in_bounds")


RULES = {
    "a repeated number is sunk into a loop": (
        lambda x: loop(x, jnp.full((64, 64), jnp.int32(3).astype(jnp.float32))),
        ["scan"],
    ),
    "other values are given to a loop": (
        lambda x: loop(x, lax.broadcasted_iota(jnp.float32, (64, 64), 0)),
        ["iota", "scan"],
    ),
    "a loop's first carry is a buffer": (
        lambda x: loop(jnp.full((64, 64), 2.0), 1.0) + x,
        ["broadcast_in_dim", "scan", "add"],
    ),
    "a chain ends in its result": (lambda x: jnp.sin(jnp.cos(x)) + 1, ["add"]),
    "a product reads and makes buffers": (lambda x: jnp.sin(x) @ x, ["sin", "dot_general"]),
    "views have no bytes": (lambda x: (x @ x).T.reshape(-1), ["dot_general"]),
    "a reduction absorbs": (lambda x: jnp.exp(jnp.sin(x)).sum(), ["reduce_sum"]),
    "two readers of a cheap value recompute it": (
        lambda x: (lambda y: (y.sum(), y.max()))(jnp.sin(x)),
        ["reduce_sum", "reduce_max"],
    ),
    "a scatter into zeros adds to what it is added to": (
        lambda x: jnp.tanh(_picked(x) + jnp.sin(x)) @ x,
        ["broadcast_in_dim", "add", "tanh", "dot_general"],  # The indices; no zeros.
    ),
    "unless something else reads it": (
        lambda x: (lambda s: (s + jnp.sin(x)).sum() * s[0, 0])(_picked(x)),
        ["broadcast_in_dim", "broadcast_in_dim", "scatter-add", "reduce_sum", "mul"],
    ),
    "two readers of a dear value share it": (
        lambda x: (lambda y: (y.sum(), y.max()))((x @ x) + (x @ x.T)),
        ["dot_general", "dot_general", "add", "reduce_sum", "reduce_max"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str):
    function, expected = RULES[rule]
    assert buffers(function, X) == expected


def test_numbers_are_results_and_operands_of_scatters_too():
    block = program(lambda x: (jnp.float32(0).at[()].add(x[0, 0]), _picked(x) + x, 1.0), X).block
    fusion = fused(block)
    assert len(fusion.made) == len(block.ops)


def test_a_kernel_takes_a_limited_number_of_operands():
    many = [jnp.ones((64, 64)) for _ in range(20)]
    found = buffers(lambda *xs: jnp.square(sum(x @ x for x in xs)).sum(), *many)
    assert "add" in found


# --- what may run twice ------------------------------------------------------------------------


def operations(function, *args):
    return {op.name: op for op in program(function, *args).block.ops}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        lambda x: (jax.debug.print("{}", x), x)[1],
        lambda x: jax.checkpoint(lambda y: (jax.debug.print("{}", y), jnp.sin(y))[1])(x),
        lambda x: lax.scan(lambda c, _: ((jax.debug.print("{}", c), c)[1], None), x, None, 2)[0],
        lambda x: lax.cond(x[0, 0] > 0, lambda: (jax.debug.print("hello"), x)[1], lambda: x),
    ],
    ids=["pure_callback", "print", "in a checkpoint", "in a scan", "in a branch"],
)
def test_effects_and_host_calls_may_not_run_twice(function):
    assert not all(may_repeat(op) for op in program(function, X).block.ops)


def test_collectives_may_not_run_twice():
    step = pure(PROBLEMS["experts"])
    ops = operations(step.function, *step.args)
    assert not may_repeat(ops["shard_map"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.scan(lambda c, _: (c @ x, None), x, None, length=2)[0],
        lambda x: jax.random.normal(jax.random.key(0), x.shape) * x,
        lambda x: jax.checkpoint(lambda y: jnp.sin(y @ y))(x),
        lambda x: jnp.linalg.cholesky(x @ x.T),
    ],
    ids=["scan", "random numbers", "checkpoint", "library"],
)
def test_everything_else_may(function):
    assert all(may_repeat(op) for op in program(function, X).block.ops)


def test_common_element_wise_functions_fuse():
    """On every JAX version: a new name for an old operation would count bytes twice."""
    functions = [jnp.tanh, jnp.sin, jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.relu]
    functions += [jnp.log2, jnp.exp2, jnp.log1p, jnp.cbrt, jax.nn.sigmoid, jax.lax.erf, jnp.abs]
    for function in functions:
        block = program(jax.grad(lambda x, f=function: f(x).sum()), X).block
        opaque = {op.name for op in block.ops if kind_of(op) is Kind.OPAQUE}
        assert not opaque, f"{function}: {opaque}"


def waiting() -> tuple[Block, dict[str, Value]]:
    """A fetched copy ``c`` and a product ``d``, each read by a product of its own.

    ``c`` goes through the barrier of a recomputation, and ``d`` through one that lands ``h``.
    """
    given = {k: Value(jax.ShapeDtypeStruct((64, 64), jnp.float32), k) for k in "xcdpqrs"}
    x, c, d, p, q, r, s = given.values()
    h, k = x.on_host(), x.on_host()
    twice = program(lambda x: jnp.tanh(x), X).block.ops[0].eqn
    dot = program(lambda x: x @ x, X).block.ops[0].eqn
    ops = (
        Op(dot, (x, x), (d,)),
        Op(twice, (d,), (h,), None, "sent", transfer="send"),
        Op(twice, (h,), (c,), None, "back", transfer="fetch"),
        Op(dot, (h, d), (k, p), None, "landed", barrier=True),
        Op(dot, (c,), (q,), None, "made again", barrier=True),
        Op(twice, (p,), (r,)),
        Op(twice, (q,), (s,)),
    )
    return Block("", (x,), ops, (r, s)), given


@pytest.mark.parametrize("barriers_keep", [False, True])
def test_nothing_is_written_over_copies_nor_over_what_waited_for_one(barriers_keep):
    block, values = waiting()
    fusion = fuse(block.inputs, block.ops, block.outputs, barriers_keep=barriers_keep)
    assert fusion.roots[values["q"]] == (values["c"],) and fusion.roots[values["p"]] == (
        values["d"],
    )
    assert fusion.spared[6] == (values["c"],), "a barrier in between changes nothing"
    assert fusion.spared[5] == ((values["d"],) if barriers_keep else ())
