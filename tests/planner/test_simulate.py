"""The simulator against an interpreter that counts references, and against the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxmem.planner.schedule import Scheduler
from jaxmem.planner.simulate import Simulator
from jaxmem.program.ir import Block, Loop, Value
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target, compile_for
from tests.planner.lines import RATES, Line, lines, program

SIDE = 512
BYTES = SIDE * SIDE * 4


class Buffer:
    """Memory of the interpreter: freed when nothing is left that will read it."""

    def __init__(self, nbytes: int):
        self.nbytes, self.readers = nbytes, 0


def buffers_of(block: Block) -> dict[Value, Buffer]:
    """The buffer behind every value; what a barrier returns is what it was given."""
    buffers = {value: Buffer(0) for value in block.inputs}
    for op in block.ops:
        for position, result in enumerate(op.outputs):
            old = buffers[op.inputs[position]] if op.barrier else None
            buffers[result] = old or Buffer(result.nbytes)
    return buffers


def interpreted(block: Block, *, outputs_are_temporary: bool) -> list[int]:
    """Temporary bytes live while each operation runs, by counting references."""
    buffers = buffers_of(block)
    for op in block.ops:
        for buffer in {buffers[v] for v in op.inputs}:
            buffer.readers += 1
    for value in block.outputs:
        buffers[value].readers += 1
        if not outputs_are_temporary:
            buffers[value].nbytes = 0
    live: set[Buffer] = set()
    timeline = []
    for op in block.ops:
        live |= {buffers[v] for v in op.outputs}
        timeline.append(sum(buffer.nbytes for buffer in live))
        for buffer in {buffers[v] for v in op.inputs}:
            buffer.readers -= 1
        live = {buffer for buffer in live if buffer.readers}
    return timeline


@given(lines())
def test_opaque_operations_are_counted_exactly(line: Line):
    simulation = Simulator(RATES).step(line.block)
    expected = interpreted(line.block, outputs_are_temporary=False)
    assert list(simulation.timeline) == expected
    assert simulation.temp_bytes == max(expected)
    assert expected[simulation.peak_index] == max(expected)


@given(lines())
def test_in_a_loop_body_the_results_are_temporary_too(line: Line):
    body = line.block
    loop = Loop(body, len(body.inputs), len(body.outputs), length=3, reverse=False, unroll=1)
    simulation = Simulator(RATES).iteration(loop)
    expected = interpreted(line.block, outputs_are_temporary=True)
    assert list(simulation.timeline) == expected


@given(lines(), st.data(), st.booleans())
@settings(max_examples=200)
def test_written_out_recomputations_are_counted_exactly(line: Line, data, host: bool):
    kept = frozenset(data.draw(st.lists(st.sampled_from(line.keys), unique=True)))
    block = Scheduler(line.nest, host).schedule({("", line.turn): kept})
    simulation = Simulator(RATES).step(block)
    assert list(simulation.timeline) == interpreted(block, outputs_are_temporary=False)


@given(lines())
def test_lifetimes_add_up_to_the_timeline(line: Line):
    simulation = Simulator(RATES).step(line.block)
    for index, live in enumerate(simulation.timeline):
        spans = [s for s in simulation.lifetimes if s.start <= index <= s.end]
        assert sum(s.value.nbytes for s in spans) == live


@given(lines())
def test_seconds_are_the_bytes_that_operations_move(line: Line):
    moved = sum(
        sum(v.nbytes for v in set(op.inputs)) + sum(v.nbytes for v in op.outputs)
        for op in line.block.ops
    )
    simulation = Simulator(RATES).step(line.block)
    assert simulation.seconds == pytest.approx(moved / RATES.bytes_per_second)


def test_nothing_at_all():
    simulation = Simulator(RATES).step(Block("", (), (), ()))
    assert (simulation.temp_bytes, simulation.timeline, simulation.seconds) == (0, (), 0.0)


# --- fusion, rule by rule ----------------------------------------------------------------------
# Each program leaves this many buffers of one matrix, by the simulator and by XLA:CPU. The first
# product of most of them is there to have something that is not an argument.


def scanned(body, x, w):
    return lax.scan(lambda carry, _: (body(carry, w), None), x, None, length=4)[0].sum()


RULES = {
    "element-wise work has no buffers": (0, lambda x, w: jnp.tanh(jnp.sin(x)) * 2),
    "a product has one": (1, lambda x, w: (x @ w) @ w),
    "element-wise work is written over it": (1, lambda x, w: jnp.tanh(x @ w) @ w),
    "two readers share a buffer": (1, lambda x, w: _twice(jnp.tanh(x), w)),
    "a gather does not write over what it reads": (
        2,
        lambda x, w: (x @ w)[_backwards()] @ w[:, :1],
    ),
    "nor does a reversal": (2, lambda x, w: lax.rev(x @ w, (0,)) @ w[:, :1]),
    "nor a sum with what was padded": (2, lambda x, w: _shifted(x @ w) @ w[:, :1]),
    "a transposition may": (1, lambda x, w: jnp.tanh((x @ w).T) @ w[:, :1]),
    "a scatter into zeros adds to its sum": (1, lambda x, w: _scattered(x @ w, w) @ w),
    "rows that are reduced are absorbed": (1, lambda x, w: jax.nn.softmax(x @ w) @ w),
    "centred rows too": (1, lambda x, w: _centred(x @ w) @ w),
    "a broadcast that a product reads is real": (1, lambda x, w: _rows(x) @ w),
    "an iota too": (1, lambda x, w: lax.broadcasted_iota(jnp.float32, x.shape, 0) @ w),
    "an update is in place": (1, lambda x, w: lax.dynamic_update_slice(x @ w, w[:8], (0, 0)) @ w),
    "a scatter too": (1, lambda x, w: (x @ w).at[3].set(1.0) @ w),
    "joined matrices are real": (4, lambda x, w: _joined(x @ w, x) @ _joined(w, w).T),
    "a loop has its carry and its iteration": (2, lambda x, w: scanned(_layer, x, w)),
}


def _backwards():
    return jnp.arange(SIDE)[::-1]


def _shifted(h):
    return jnp.pad(h[:-1], ((1, 0), (0, 0))) * 2


def _scattered(h, w):
    return h * 2 + jnp.zeros_like(h).at[jnp.arange(len(h)), jnp.arange(len(h))].add(w[0])


def _twice(h, w):
    return h @ w, (h * w).sum()


def _centred(h):
    return h - h.mean(-1, keepdims=True)


def _rows(x):
    return jnp.broadcast_to(x[0], x.shape)


def _joined(a, b):
    return jnp.concatenate([a, b], 1)


def _layer(carry, w):
    return jnp.tanh(carry @ w)


def traced(function, side: int):
    matrix = jax.ShapeDtypeStruct((side, side), jnp.float32)
    return program(function, matrix, matrix)


@pytest.mark.parametrize("rule", RULES)
def test_fusion_rule(rule: str):
    count, function = RULES[rule]
    step = traced(function, SIDE)
    simulated = Simulator(RATES).step(step.block).temp_bytes
    compiled = compile_for("cpu", as_function(step.block), step.avals()).memory.temp_bytes
    assert simulated == pytest.approx(count * BYTES, rel=0.02)
    assert compiled == pytest.approx(count * BYTES, rel=0.02)


@pytest.mark.parametrize(
    "rule",
    [
        "element-wise work is written over it",
        "centred rows too",
        "joined matrices are real",
        "nor a sum with what was padded",
        "a transposition may",
        "a scatter into zeros adds to its sum",
    ],
)
def test_fusion_rule_on_an_absent_gpu(rule: str):
    """Large matrices, beside which the workspace of a product (4 MiB) is nothing."""
    count, function = RULES[rule]
    side = 16 * SIDE
    step = traced(function, side)
    simulated = Simulator(RATES).step(step.block).temp_bytes
    compiled = compile_for("h200", as_function(step.block), step.avals()).memory.temp_bytes
    assert simulated == pytest.approx(count * side * side * 4, rel=0.02)
    assert compiled == pytest.approx(count * side * side * 4, rel=0.03)


def test_what_lives_only_inside_an_operation_counts_while_it_runs():
    """A branch, a checkpoint and a loop body each have two products inside."""

    def inside(x, w):
        return ((x @ w) @ w).sum()

    forms = [
        lambda x, w: lax.cond(x[0, 0] > 0, inside, lambda x, w: x.sum(), x, w),
        lambda x, w: jax.checkpoint(inside)(x, w),
        lambda x, w: lax.scan(lambda c, _: (c + inside(x, w), None), 0.0, None, length=3)[0],
    ]
    for function in forms:
        step = traced(function, SIDE)
        simulation = Simulator(RATES).step(step.block)
        assert simulation.temp_bytes == pytest.approx(2 * BYTES, rel=0.01)
        peak = step.block.ops[simulation.peak_index]
        assert peak.name in ("cond", "checkpoint", "remat2", "scan")


def test_a_loop_takes_as_long_as_its_iterations():
    def looped(length):
        return lambda x, w: lax.scan(lambda c, _: (_layer(c, w), None), x, None, length=length)[0]

    four, eight = (Simulator(RATES).step(traced(looped(n), SIDE).block).seconds for n in (4, 8))
    assert eight == pytest.approx(2 * four)
    product = 2 * SIDE**3 / RATES.flops["float32"]
    assert four >= 4 * product


def test_rows_of_stacks_are_copied_where_nothing_element_wise_writes_or_reads_them():
    """A product's result is read and written once more; a product reads a copy of its slice."""
    length = 6

    def seconds(layer, xs=None):
        def looped(x, w):
            return lax.scan(lambda c, s: layer(c, w, s), x, xs, length=length)

        step = traced(looped, SIDE)
        return Simulator(RATES).step(step.block).seconds

    def same(c, w, _):
        return c @ w, None

    def stacks_product(c, w, _):
        y = c @ w
        return y, y

    def stacks_element_wise(c, w, _):
        y = c @ w
        return y, jnp.tanh(y)

    plain = seconds(same)
    one = length * BYTES / RATES.bytes_per_second
    assert seconds(stacks_product) - plain == pytest.approx(2 * one)
    assert seconds(stacks_element_wise) - plain == pytest.approx(2 * one)
    xs = jnp.ones((length, SIDE, SIDE))
    sliced = seconds(lambda c, w, s: (c @ s, None), xs)
    assert sliced - plain == pytest.approx(2 * one)
    added = seconds(lambda c, w, s: (c @ w + s, None), xs)
    written = seconds(lambda c, w, _: (c @ w + 1.0, None))
    assert added - written == pytest.approx(one), "read where it is added, and not copied"


def carried_on(c, ws):
    return lax.scan(lambda y, w: (jnp.tanh(y @ w), None), c, ws)[0], None


def as_a_constant_too(c, ws):
    return lax.scan(lambda y, w: (jnp.tanh(y @ w) + c, None), c, ws)[0], None


def read_later(c, ws):
    before = c * 2 + 1
    after = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), c, ws)[0]
    return after, (before * after).sum()


def renamed_and_read_later(c, ws):
    before = c.reshape(-1)
    after = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), c, ws)[0]
    return after, (before * after.reshape(-1)).sum()


@pytest.mark.parametrize(
    "outer", [carried_on, as_a_constant_too, read_later, renamed_and_read_later]
)
def test_what_an_inner_loop_carries_on_stays_where_it_is_unless_it_is_read_again(outer):
    """As it compiles for an absent GPU."""

    def step(x, ws):
        return lax.scan(outer, x, ws)

    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2**16, 64), (3, 4, 64, 64))]
    simulated = Simulator(rates_of(Target("h200"))).step(program(step, *given).block)
    made = compile_for("h200", step, given).memory
    assert simulated.temp_bytes == pytest.approx(made.temp_bytes, rel=0.02)
