"""Offload in loops: the same results, and copies an iteration apart from their use."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmem
from jaxmem.planner.search import Search
from jaxmem.program.ir import Block, Value
from jaxmem.program.layout import Layout
from jaxmem.program.making import kept_apart, may_be_kept_apart
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target, compile_for
from jaxmem.targets.options import memory_schedules, overlapping
from tests.planner.lines import program
from tests.problems import assert_same

H200 = Target("h200")


def scanned(x, w, *, reverse: bool = False):
    """Two products in an iteration; two things are carried, and something is stacked and used."""

    def layer(carry, w):
        x, total = carry
        y = jnp.tanh(x @ w)
        z = jnp.sin(y @ w.T)
        return (x + z, total + z.sum(0)), z.mean()

    (x, total), means = lax.scan(layer, (x, x[0]), w, reverse=reverse)
    return (x**2).mean() + (total * means.sum()).mean()


def with_everything_away(fun, *args):
    """The gradient's program with all that crosses from iteration to iteration on the host."""
    search = Search(program(jax.grad(fun, (0, 1)), *args), rates_of(H200))
    (choice,) = (c for c in search.choices if c.turn[0])
    names = {c.name for c in choice.candidates if c.op.name in ("dot_general", "tanh", "sin")}
    for outer in search.nest.walk():
        for pair, _ in outer.pairs:
            loop = outer.block.ops[pair.forward].loop
            assert loop is not None
            carries = loop.body.inputs[loop.num_consts :][: loop.num_carry]
            names |= {str(v.key) for v in carries}
    keep = {c.turn: frozenset(k.name for k in c.candidates) for c in search.choices}
    return search, search.scheduler.schedule(keep, {choice.turn: frozenset(names)})


def loops_with(block: Block, transfer: str) -> list[Block]:
    """The bodies of the loops that send, or that fetch."""
    bodies = [op.loop.body for op in block.ops if op.loop is not None]
    return [b for b in bodies if any(op.transfer == transfer for op in b.ops)]


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_results_are_the_same(length: int, reverse: bool):
    rng = np.random.default_rng(length)
    x = jnp.asarray(rng.standard_normal((32, 16)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((length, 16, 16)) / 4, jnp.float32)
    search, written = with_everything_away(lambda x, w: scanned(x, w, reverse=reverse), x, w)
    args = [*search.program.consts, x, w]
    options = memory_schedules(Target("cpu"))[0]
    run = compile_for("cpu", as_function(written), args, options=options).executable
    assert_same(jax.jit(as_function(search.program.block))(*args), run(*args))


@jax.custom_vjp
def chunked(x, w):
    """A sum over chunks, whose gradient goes through them in the same direction again."""
    return chunked_forward(x, w)[0]


def chunked_forward(x, w):
    def chunk(total, w):
        y = jnp.tanh(x @ w)
        return total + (y**2).sum(), y

    total, ys = lax.scan(chunk, 0.0, w)
    return total, (x, w, ys)


def chunked_backward(kept, g):
    x, w, ys = kept

    def chunk(total, given):
        w, y = given
        d = 2 * g * y * (1 - y * y)
        return total + d @ w.T, x.T @ d

    return lax.scan(chunk, jnp.zeros_like(x), (w, ys))


chunked.defvjp(chunked_forward, chunked_backward)


def hidden_states(x, w):
    """What is carried is also collected, and read by others."""

    def layer(x, w):
        y = jnp.tanh(x @ w)
        return x + jnp.sin(y @ w.T), x

    x, states = lax.scan(layer, x, w)
    return (x**2).mean() + jnp.sin(states).sum()


def counted(x, w):
    """Numbers that the program is written with, and an integer, are carried too."""

    def layer(carry, w):
        x, total, count = carry
        y = jnp.tanh(x @ w)
        return (x + jnp.sin(y @ w.T), total + (y**2).sum(), count + 1), None

    (x, total, count), _ = lax.scan(layer, (x, 0.0, jnp.int32(0)), w)
    return (x**2).mean() + total * count


@pytest.mark.parametrize("net", [chunked, hidden_states, counted])
def test_results_of_other_loops_are_the_same(net):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((32, 16)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((5, 16, 16)) / 4, jnp.float32)
    search, written = with_everything_away(net, x, w)
    assert loops_with(written, "send")
    args = [*search.program.consts, x, w]
    options = memory_schedules(Target("cpu"))[0]
    run = compile_for("cpu", as_function(written), args, options=options).executable
    assert_same(jax.jit(as_function(search.program.block))(*args), run(*args))


def test_an_iteration_sends_what_it_was_handed_and_hands_on_what_it_fetched():
    x, w = jnp.ones((32, 16)), jnp.ones((5, 16, 16))
    _, written = with_everything_away(scanned, x, w)
    (forward,), (backward,) = loops_with(written, "send"), loops_with(written, "fetch")
    behind = {v for op in forward.ops if op.barrier for v in op.outputs}
    sends = [op for op in forward.ops if op.transfer == "send"]
    assert len(sends) >= 3
    assert all(set(op.values) <= behind for op in sends)
    assert all(set(op.values) <= set(forward.inputs) for op in forward.ops if op.barrier)
    read = {v for op in backward.ops for v in op.values}
    fetched = {v for op in backward.ops if op.transfer == "fetch" for v in op.outputs}
    assert len(fetched) == len(sends)
    assert not fetched & read
    assert fetched <= set(backward.outputs)


@pytest.mark.parametrize(("wide", "apart"), [(2**17, False), (64, True)])
def test_only_what_is_made_before_its_copy_has_left_is_kept_apart(wide: int, apart: bool):
    """The wider a product is, the longer it takes beside the copy of its result."""
    x = jax.ShapeDtypeStruct((256, wide), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, wide, wide), jnp.bfloat16)

    def net(x, w):
        return lax.scan(lambda x, w: (jnp.sin(x @ w) @ w, None), x, w)[0].astype(jnp.float32).sum()

    _, written = with_everything_away(net, x, w)
    (forward,) = loops_with(written, "send")
    assert apart == any(op.name == "bitcast_convert_type" for op in forward.ops)


def test_copies_run_beside_the_products_of_an_iteration():
    """In XLA's schedule for the GPU every product stands between the start and end of each copy."""
    x = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((6, 1024, 1024), jnp.bfloat16)

    def net(x, w):
        return lax.scan(lambda x, w: (jnp.sin(x @ w) @ w, None), x, w)[0].astype(jnp.float32).sum()

    search, written = with_everything_away(net, x, w)
    text = compile_for(
        H200, as_function(written), search.program.avals(), options=overlapping(H200)
    ).hlo_text()
    bodies = [b for b in re.split(r"\n\n", text) if "S(5)" in b and "-start" in b and "ROOT" in b]
    seen = 0
    for body in bodies:
        lines = body.splitlines()
        places = {
            word: [n for n, line in enumerate(lines) if re.search(rf"%{word}[\w.-]* = ", line)]
            for word in ("dynamic-update-slice-start", "dynamic-slice-start", "gemm_fusion_dot")
        }
        ends = [n for n, line in enumerate(lines) if re.search(r"slice-done[\w.-]* = ", line)]
        products = places["gemm_fusion_dot"]
        starts = [*places["dynamic-update-slice-start"], *places["dynamic-slice-start"]]
        if not starts or not products:
            continue
        seen += 1
        assert max(starts) < products[-1]
        assert max(ends) > products[-1]
    assert seen == 2, "the loop forward and the loop back"


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "int8", "uint32", "float8_e4m3fn"]
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4)])
def test_what_is_kept_apart_is_the_same_bit_for_bit(dtype: str, shape: tuple[int, ...]):
    """But for which NaN it is: XLA:CPU makes one of another."""
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(0)
        kind = np.dtype(jnp.dtype(dtype))
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[kind.itemsize]
        for odd in (0, 1):
            drawn = [rng.integers(0, 255, (*shape, kind.itemsize), np.uint8) for _ in range(2)]
            value, other = (np.ascontiguousarray(d).view(bits).reshape(shape) for d in drawn)
            other = other ^ bits(odd)
            value, other = (jnp.asarray(a).view(dtype) for a in (value, other))
            place = program(lambda a: a + a, value).block.ops[0].eqn
            first, second = (Value(jax.typeof(a)) for a in (value, other))
            assert may_be_kept_apart(first)
            ops, result = kept_apart(first, second, place)
            run = as_function(Block("", (first, second), ops, (result,)))
            found, expected = (np.asarray(a) for a in (jax.jit(run)(value, other)[0], value))
            nan = expected != expected
            assert np.array_equal(nan, found != found)
            assert np.array_equal(found.view(bits)[~nan], expected.view(bits)[~nan])


def test_what_has_no_bits_of_its_own_is_not_kept_apart():
    others = [bool, np.complex64, np.complex128, jnp.int4, jnp.uint4, jnp.float4_e2m1fn]
    keys = jax.random.split(jax.random.key(0))
    values = [Value(jax.ShapeDtypeStruct((2,), dtype)) for dtype in (*others, keys.dtype)]
    assert not any(map(may_be_kept_apart, values))
    split = Value(jax.ShapeDtypeStruct((8, 2), np.float32))
    assert may_be_kept_apart(split)
    split.lay_out(Layout(((("data", 8),), ())))
    assert not may_be_kept_apart(split), "one device has its first number"
    assert not may_be_kept_apart(Value(jax.ShapeDtypeStruct((0, 2), np.float32)))


def test_what_loops_carry_is_kept_on_the_host_where_nothing_fits_without():
    x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    w = jax.ShapeDtypeStruct((48, 256, 256), jnp.float32)

    def net(w, x):
        return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2).mean()

    search = Search(program(jax.grad(net), w, x), rates_of(H200))
    ((name, _),) = [(c.name, c) for members in search.carried.values() for _, c in members]
    limit = int(0.9 * min(s.temp_bytes for s in search.least()))
    assert search.solve(limit) is None
    found = search.solve(limit, 2**36)
    assert found is not None
    assert any(name in names for names in found.offload.values())
    assert found.temp_bytes <= limit
    assert found.host_bytes >= 48 * 4096 * 256 * 4


def test_what_loops_carry_makes_smaller_budgets_work_by_itself():
    """The error names a budget that takes host memory, and that budget works."""
    x = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 512, 512), jnp.bfloat16)

    def step(w, x):
        def layer(x, w):
            return x + jnp.tanh(jnp.tanh(x @ w) @ w), None

        return jax.grad(lambda w: (lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2).sum())(w)

    def planned(budget, **options):
        return jaxmem.plan(step, w, x, budget=budget, target="h200", progress=False, **options)

    with pytest.raises(jaxmem.BudgetInfeasibleError) as without:
        planned("30MiB", host_budget=0)
    with pytest.raises(jaxmem.BudgetInfeasibleError) as found:
        planned("30MiB")
    assert found.value.smallest_bytes < without.value.smallest_bytes
    plan = planned(found.value.smallest_bytes)
    assert plan.compiled_bytes <= found.value.smallest_bytes
    assert plan.host_bytes >= 16 * 4096 * 512 * 2
