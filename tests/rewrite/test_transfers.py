"""Programs with transfers: the same results on a CPU, and really on the host of an absent GPU."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.planner.schedule import Keep
from jaxmem.planner.search import Search
from jaxmem.program.ir import Block, Hosting, Op, Program, Value
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime import verify
from jaxmem.runtime.compiled import compiled_report
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target, compile_for
from jaxmem.targets.options import memory_schedules
from tests.fitted_steps import tanh_chain
from tests.planner.lines import program, random_keep
from tests.problems import PROBLEMS, assert_same, pure
from tests.problems.transformers import Form, Shape, make

H200 = Target("h200")
NAMES = ("transformer_unrolled", "transformer_scan", "autoencoder", "lstm_nested")


def everything(block: Block) -> list[Op]:
    """Every operation, those in loops too."""
    inner = [everything(op.loop.body) for op in block.ops if op.loop is not None]
    return [*block.ops, *(op for ops in inner for op in ops)]


def random_offload(search: Search, keep: Keep, seed: int) -> Keep:
    """At every turn about half of what is kept, and all that the loop carries there."""
    rng = np.random.default_rng(seed)
    offload = {turn: {n for n in sorted(kept) if rng.random() < 0.5} for turn, kept in keep.items()}
    for outer in search.nest.walk():
        for pair, inner in outer.pairs:
            loop = outer.block.ops[pair.forward].loop
            assert loop is not None
            carries = loop.body.inputs[loop.num_consts :][: loop.num_carry]
            turn = (inner.block.path, inner.cut)
            offload[turn] = offload.get(turn, set()) | {str(v.key) for v in carries}
    return {turn: frozenset(names) for turn, names in offload.items()}


@pytest.mark.parametrize("name", NAMES)
def test_offloading_changes_no_result(name: str):
    """On a CPU the transfers are made too, from memory to memory."""
    step = pure(PROBLEMS[name])
    traced = program(step.function, *step.args)
    search = Search(traced, rates_of(H200))
    args = [*traced.consts, *jax.tree.leaves(step.args)]
    expected = jax.jit(as_function(traced.block))(*args)
    keep = random_keep(search, 1)
    written = search.scheduler.schedule(keep, random_offload(search, keep, 2))
    transfers = [op.transfer for op in everything(written) if op.transfer]
    assert {"send", "fetch"} == set(transfers)
    options = memory_schedules(Target("cpu"))[0]
    run = compile_for("cpu", as_function(written), args, options=options).executable
    assert_same(expected, run(*args))


def adam(side: int, layers: int):
    """A chain of products trained by Adam, everything in float32 but the products."""

    def step(params, m, v, x):
        def loss(params):
            h = x
            for w in params:
                h = jnp.tanh(h @ w.astype(x.dtype))
            return jnp.square(h.astype(jnp.float32)).mean()

        value, g = jax.value_and_grad(loss)(params)
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        v = [0.99 * a + 0.01 * b * b for a, b in zip(v, g, strict=True)]
        new = [p - 1e-3 * a / (jnp.sqrt(b) + 1e-3) for p, a, b in zip(params, m, v, strict=True)]
        return new, m, v, value

    leaf = jax.ShapeDtypeStruct((side, side), jnp.float32)
    x = jax.ShapeDtypeStruct((2 * side, side), jnp.bfloat16)
    return program(step, *[[leaf] * layers] * 3, x, donate=(0, 1, 2))


def compiled(target, traced: Program, written: Block, hosting: Hosting):
    return compile_for(
        target,
        as_function(written),
        traced.avals(hosting),
        donate=traced.donated,
        out_shardings=traced.out_shardings(hosting),
    )


def test_hosted_arguments_change_no_result_and_come_back_to_the_host():
    traced = adam(16, 3)
    search = Search(traced, rates_of(H200))
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in traced.avals()]
    args[6:9] = [a**2 for a in args[6:9]]
    expected = jax.jit(as_function(traced.block))(*args)
    hosting = traced.hosting(frozenset(range(1, 9)))
    assert hosting.results == frozenset(range(1, 9))
    keep = random_keep(search, 0)
    written = search.scheduler.schedule(keep, {}, hosting)
    run = compiled(None, traced, written, hosting).executable
    given = zip(args, traced.layouts(hosting), strict=True)
    outs = run(*[a if s is None else jax.device_put(a, s) for a, s in given])
    assert [o.sharding.memory_kind == "pinned_host" for o in outs] == [False, *[True] * 8, False]
    assert_same(expected, outs)


# --- on an absent GPU ----------------------------------------------------------------------------


def test_nested_loops_are_stacked_twice_on_the_host():
    step = pure(PROBLEMS["lstm_nested"])
    search = Search(program(step.function, *step.args), rates_of(H200))
    keep = random_keep(search, 1)
    written = search.scheduler.schedule(keep, random_offload(search, keep, 2))
    done = compiled(H200, search.program, written, Hosting())
    planned = search.simulator.step(written).host_bytes
    assert done.memory.host_temp_bytes == pytest.approx(planned, rel=0.05)
    assert verify.not_on_host(written, done.hlo_text(), done.memory, planned) == []


@functools.cache
def transformer(scan: bool) -> tuple[Program, Search]:
    shape = Shape(8 if scan else 4, d_model=256, heads=2, vocab=256, batch=128, sequence=64)
    step, args = make(Form(scan=scan), shape, jnp.bfloat16)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    traced = program(step, *shapes, donate=(0, 1))
    return traced, Search(traced, rates_of(H200))


def products_offloaded(scan: bool):
    """Products are kept, those of the wide layer on the host; the rest is made again."""
    traced, search = transformer(scan)
    keep, offload = {}, {}
    for choice in search.choices:
        products = [c for c in choice.candidates if c.op.name == "dot_general"]
        keep[choice.turn] = frozenset(c.name for c in products) | choice.loops
        wide = max(c.value.nbytes for c in products)
        offload[choice.turn] = frozenset(c.name for c in products if c.value.nbytes == wide)
    offload = {turn: names for turn, names in offload.items() if turn[0] or not scan}
    written = search.scheduler.schedule(keep, offload)
    done = compiled(H200, traced, written, Hosting())
    simulation = search.simulator.step(written)
    assert done.memory.host_temp_bytes == pytest.approx(simulation.host_bytes, rel=0.05)
    assert verify.undone(written, done.hlo_text()) == ()
    assert verify.not_on_host(written, done.hlo_text(), done.memory, 0) == []
    return search.scheduler.schedule(keep), simulation, done.memory


@pytest.mark.wide
def test_unrolled_layers_are_off_the_device():
    """XLA makes up to 6% more of this net than is simulated, with transfers and without."""
    traced, search = transformer(False)
    kept, simulation, memory = products_offloaded(scan=False)
    plain = compiled(H200, traced, kept, Hosting()).memory.temp_bytes
    assert 0.94 * plain <= search.simulator.step(kept).temp_bytes <= 1.02 * plain
    assert 0.94 * memory.temp_bytes <= simulation.temp_bytes <= 1.02 * memory.temp_bytes


@pytest.mark.wide
def test_scanned_layers_are_off_the_device():
    """XLA transposes a stacked result here, with and without offload: the difference counts."""
    traced, search = transformer(True)
    kept, simulation, memory = products_offloaded(scan=True)
    before = search.simulator.step(kept).temp_bytes - simulation.temp_bytes
    assert before > 0.8 * simulation.host_bytes
    plain = compiled(H200, traced, kept, Hosting()).memory
    assert plain.temp_bytes - memory.temp_bytes >= 0.9 * before


@pytest.mark.wide
def test_a_chain_with_a_host_recomputes_less_and_what_it_sends_is_off_the_device():
    """What is sent on the way forward is on the host by the turn, in 18 turns.

    Gaps in XLA's heap left out, which are as large as two of these activations by chance.
    """
    shape = Shape(6, d_model=2048, heads=16, vocab=256, batch=32, sequence=512)
    step, args = make(Form(scan=False), shape, jnp.bfloat16)
    search = Search(program(step, *args, donate=(0, 1)), rates_of(H200))
    limit = int(0.25 * search.keep_all.temp_bytes)
    without, found = search.solve(limit), search.solve(limit, 2**36)
    assert without is not None
    assert found is not None
    assert found.solver == "MILP per block + chain DP"
    assert len(found.keep) > 1, "nested recomputation and offload together"
    assert found.seconds < without.seconds
    more = []
    for solution in (without, found):
        written = search.schedule(solution)
        done = compiled(H200, search.program, written, Hosting())
        assert verify.not_on_host(written, done.hlo_text(), done.memory, 0) == []
        assert done.memory.host_temp_bytes == pytest.approx(solution.host_bytes, rel=0.05)
        gaps = compiled_report(done.executable).by_category()["fragmentation"]
        more.append(done.memory.temp_bytes - gaps - solution.temp_bytes)
    assert max(more) <= 0.01 * limit


def test_hosted_state_is_off_the_device():
    traced = adam(2048, 4)
    search = Search(traced, rates_of(H200))
    hosting = traced.hosting(frozenset(range(4, 12)))
    written = search.scheduler.schedule({}, {}, hosting)
    done = compiled(H200, traced, written, hosting)
    state = 8 * 2048 * 2048 * 4
    assert traced.host_bytes(hosting) == state
    assert done.memory.host_argument_bytes == done.memory.host_output_bytes == state
    assert done.memory.argument_bytes == traced.argument_bytes - state
    simulation = search.simulator.step(written)
    assert 0.6 * simulation.temp_bytes <= done.memory.temp_bytes <= 1.1 * simulation.temp_bytes
    # Kernels read none of it where it waits, as they would if its arguments did not say so.
    text = done.hlo_text()
    starts = [line.partition(" = ")[2] for line in text.splitlines() if " copy-start(" in line]
    assert Counter("S(5)" in made.partition("}")[0] for made in starts) == {True: 8, False: 8}
    assert verify.not_on_host(written, done.hlo_text(), done.memory, 0, state) == []
    more = verify.not_on_host(written, done.hlo_text(), done.memory, 0, state + 2**20)
    assert more == ["the compiler put 128.0MiB of the arguments in host memory instead of 129.0MiB"]


def test_an_offload_that_xla_dropped_is_found():
    """Without the barriers between them XLA cancels a copy with the copy back."""

    step = jax.value_and_grad(functools.partial(tanh_chain, layers=4))
    side = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    search = Search(program(step, side, side), rates_of(H200))
    (choice,) = search.choices
    keep = {choice.turn: frozenset(c.name for c in choice.candidates if c.op.name == "tanh")}
    written = search.scheduler.schedule(keep, keep)
    done = compiled(H200, search.program, written, Hosting())
    assert verify.not_on_host(written, done.hlo_text(), done.memory, 0) == []
    now: dict = {}
    ops = []
    for op in written.ops:
        inputs = [now.get(v, v) if isinstance(v, Value) else v for v in op.inputs]
        if op.barrier:
            now.update(zip(op.outputs, inputs, strict=True))
        else:
            ops.append(Op(op.eqn, inputs, op.outputs, None, origin=op.origin, transfer=op.transfer))
    bare = Block("", written.inputs, tuple(ops), tuple(now.get(v, v) for v in written.outputs))
    done = compiled(H200, search.program, bare, Hosting())
    count = sum(op.transfer == "send" for op in ops)
    planned = search.simulator.step(written).host_bytes
    (problem,) = verify.not_on_host(bare, done.hlo_text(), done.memory, planned)
    assert problem.startswith(f"the compiler dropped {count} of {count} copies to host memory")
    assert "such as that of tanh at fitted_steps.py" in problem or "device_put" in problem
