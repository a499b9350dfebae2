"""What waits in host memory: the same is computed, and simulated as worked out by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from jaxmem.planner.schedule import Scheduler
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.updates import by_result
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Block, Hosting, Loop, Op, Value
from jaxmem.program.loops import Nest
from tests.planner.lines import OPAQUE, RATES, Line, lines, program
from tests.planner.test_schedule import expressions

LINKED = dataclasses.replace(RATES, d2h_bytes_per_second=1e10, h2d_bytes_per_second=1e10)


def scheduler(line: Line, rates: Rates | None = LINKED) -> Scheduler:
    return Scheduler(line.nest, simulator=None if rates is None else Simulator(rates))


@given(lines(), st.data(), st.sampled_from((None, LINKED)))
@settings(max_examples=300)
def test_a_schedule_with_transfers_computes_what_the_line_computes(line: Line, data, rates):
    count = len(line.block.ops)
    returned = set(line.block.outputs)
    turns = data.draw(st.lists(st.integers(1, count), min_size=1, max_size=2, unique=True))
    keep, offload = {}, {}
    for turn in turns:
        made = [v for op in line.block.ops[:turn] for v in op.outputs]
        kept = data.draw(st.lists(st.sampled_from(made), unique=True))
        away = data.draw(st.lists(st.sampled_from(kept), unique=True)) if kept else []
        keep["", turn] = frozenset(str(v.key) for v in kept)
        offload["", turn] = frozenset(str(v.key) for v in away if v not in returned)
    inputs = frozenset(data.draw(st.lists(st.integers(0, len(line.block.inputs) - 1))))
    results = frozenset(data.draw(st.lists(st.integers(0, len(line.block.outputs) - 1))))
    hosting = Hosting(inputs, results)
    most = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    written = scheduler(line, rates).schedule(keep, offload, hosting, in_flight=most)
    assert expressions(written)[0] == expressions(line.block)[0]
    check_memories(written)
    check_landings(written)
    assert [n for n, v in enumerate(written.inputs) if v.host] == sorted(inputs)
    assert [n for n, v in enumerate(written.outputs) if v.host] == sorted(results)
    simulation = Simulator(LINKED).step(written)
    assert simulation.temp_bytes >= 0
    assert simulation.seconds >= Simulator(LINKED).step(line.block).seconds * (1 - 1e-9)


def check_memories(block: Block) -> None:
    """Only transfers and barriers read host memory, and everything is read after it is made."""
    known = set(block.inputs)
    for op in block.ops:
        assert known.issuperset(op.values)
        known.update(op.outputs)
        if op.transfer:
            assert [v.host for v in op.values] == [op.transfer == "fetch"]
            assert [v.host for v in op.outputs] == [op.transfer == "send"]
        elif op.barrier:
            assert [v.host for v in op.inputs] == [v.host for v in op.outputs]
        else:
            assert not any(v.host for v in (*op.values, *op.outputs))
    assert known.issuperset(block.outputs)


def check_landings(block: Block) -> None:
    """What waits for a copy to the host is read: XLA drops the order with a result nobody reads."""
    for index, op in enumerate(block.ops):
        then = block.ops[index + 1].transfer if index + 1 < len(block.ops) else ""
        if op.barrier and then != "fetch" and any(v.host for v in op.values):
            read = {v for later in block.ops[index + 1 :] for v in later.values}
            read.update(v for v in block.outputs if isinstance(v, Value))
            assert any(v in read for v in op.outputs if not v.host)


@given(lines(), st.data())
def test_without_anything_to_offload_nothing_changes(line: Line, data):
    kept = frozenset(data.draw(st.lists(st.sampled_from(line.keys), unique=True)))
    keep = {("", line.turn): kept}
    plain = Scheduler(line.nest).schedule(keep)
    empty = scheduler(line).schedule(keep, {("", line.turn): frozenset()})
    shape = [(op.name, op.recompute, [v.key for v in op.values]) for op in plain.ops]
    assert [(op.name, op.recompute, [v.key for v in op.values]) for op in empty.ops] == shape
    assert not any(op.transfer for op in empty.ops)


# --- by hand -------------------------------------------------------------------------------------
# x -> a -> b -> c | d -> e -> r(e, a): every value has 4 bytes; with a byte a second a step of the
# chain takes 8 seconds, the last one, which reads two values, 12, and a transfer 4.


def chain() -> Line:
    x, a, b, c, d, e, r = (Value(jax.ShapeDtypeStruct((1,), jnp.float32), k) for k in "xabcder")
    reads = [((x,), a), ((a,), b), ((b,), c), ((c,), d), ((d,), e), ((e, a), r)]
    ops = tuple(Op(OPAQUE, operands, (result,)) for operands, result in reads)
    return Line(Block("", (x,), ops, (r,)), 3, ("a", "b", "c"))


def simulated(d2h: float, h2d: float):
    rates = Rates({"float32": 1.0}, 1.0, d2h, h2d)
    line = chain()
    written = scheduler(line, rates).schedule(
        {("", 3): frozenset("abc")}, {("", 3): frozenset("a")}
    )
    return written, Simulator(rates).step(written)


def test_with_nothing_in_flight_each_copy_is_waited_for_where_it_is():
    rates = Rates({"float32": 1.0}, 1.0, 1.0, 1.0)
    for most, order in (
        ((0, 0), "a send wait b c d e wait fetch r"),
        ((0, 4), "a send wait b c d wait fetch e r"),
        ((4, 0), "a send b wait c d e wait fetch r"),
        ((4, 4), "a send b wait c d wait fetch e r"),
    ):
        written = scheduler(chain(), rates).schedule(
            {("", 3): frozenset("abc")}, {("", 3): frozenset("a")}, in_flight=most
        )
        assert names(written) == order.split(), most
        waited = 4 * (most[0] == 0) + 4 * (most[1] == 0)
        assert Simulator(rates).step(written).seconds == 5 * 8 + 12 + waited


def names(block: Block) -> list[str]:
    held = [op for op in block.ops if not (op.barrier and not any(v.host for v in op.values))]
    return [op.transfer or ("wait" if op.barrier else str(op.outputs[0].key)) for op in held]


def test_transfers_that_hide():
    """Sent while b is made; fetched while e is, 4 seconds before r reads it."""
    written, simulation = simulated(1.0, 1.0)
    assert names(written) == ["a", "send", "b", "wait", "c", "d", "wait", "fetch", "e", "r"]
    assert simulation.seconds == 5 * 8 + 12
    assert simulation.host_bytes == 4
    live = [
        n
        for op, n in zip(written.ops, simulation.timeline, strict=True)
        if not (op.barrier and not any(v.host for v in op.values))
    ]
    #               a  send  b  wait  c  d  wait  fetch  e  r
    assert live == [4, 4, 8, 8, 8, 8, 4, 8, 12, 8]


def test_a_copy_to_the_host_that_is_slow_holds_up_the_turn():
    """It takes from second 8 to 48; the forward pass ends at 24."""
    written, simulation = simulated(0.1, 1.0)
    assert names(written)[:5] == ["a", "send", "b", "c", "wait"]
    assert simulation.seconds == pytest.approx(5 * 8 + 12 + (48 - 24))
    assert simulation.timeline[3] == 12, "a is still on the device while c is made"


def test_a_copy_back_that_is_slow_is_waited_for():
    """It starts at the turn, at second 24, and takes 40; r could start at 40."""
    written, simulation = simulated(1.0, 0.1)
    assert names(written)[5:7] == ["wait", "fetch"]
    assert simulation.seconds == pytest.approx(5 * 8 + 12 + (64 - 40))


def test_in_a_loop_the_slowest_of_computing_and_links_decides():
    rates = Rates({"float32": 1.0}, 1.0, 0.05, 1.0)
    line = chain()
    joint = Scheduler(dataclasses.replace(line.nest, cut=3), simulator=Simulator(rates))
    body = joint._level(
        joint.nest, line.block.ops, wanted({("", 3): frozenset("a")}), barriers=False
    )[0]
    assert not any(op.barrier for op in body.ops)
    loop = Loop(body, len(body.inputs), 0, length=3, reverse=False, unroll=1)
    assert Simulator(rates).iteration(loop).seconds == pytest.approx(max(52, 4 / 0.05, 4 / 1.0))


def wanted(offload):
    from jaxmem.planner.schedule import _Wanted

    return _Wanted({}, offload, Hosting(), {})


def test_sends_follow_each_other_on_their_link():
    """a and b leave one after the other, 20 seconds each: from 8 to 28 and from 28 to 48."""
    rates = Rates({"float32": 1.0}, 1.0, 0.2, 1.0)
    line = chain()
    extra = Op(OPAQUE, (line.block.outputs[0], line.block.ops[1].outputs[0]), (like(line),))
    block = dataclasses.replace(line.block, ops=(*line.block.ops, extra), outputs=extra.outputs)
    both = {("", 3): frozenset("ab")}
    written = Scheduler(Nest(block, None, (), ()), simulator=Simulator(rates)).schedule(
        {("", 3): frozenset("abc")}, both
    )
    simulation = Simulator(rates).step(written)
    assert simulation.seconds == pytest.approx(5 * 8 + 2 * 12 + (48 - 24))
    assert simulation.host_bytes == 8


def like(line: Line) -> Value:
    return line.block.ops[0].outputs[0].like()


def test_an_optimizer_is_written_out_by_result():
    """First moments, then second moments, then weights; each weight's own are used together."""

    def step(x, m, v):
        g = [x @ x for _ in m]
        m = [0.9 * a + b for a, b in zip(m, g, strict=True)]
        v = [0.9 * a + b * b for a, b in zip(v, g, strict=True)]
        return [a / b for a, b in zip(m, v, strict=True)], m, v

    leaf = jnp.ones((4, 4))
    block = program(step, leaf, [leaf] * 3, [leaf] * 3).block
    ordered = by_result(block.ops, block.outputs)
    assert set(ordered) == set(block.ops)
    check_memories(dataclasses.replace(block, ops=tuple(ordered)))
    quotients = [n for n, op in enumerate(ordered) if op.name == "div"]
    assert quotients[0] < len(block.ops) - 10 < quotients[-1]


# --- what is refused -----------------------------------------------------------------------------


def test_what_cannot_be_offloaded_is_refused():
    line = chain()
    keep = {("", 3): frozenset("ab")}
    cases = [
        ({("", 3): frozenset("z")}, "nothing called 'z' can be offloaded across operation 3"),
        ({("", 3): frozenset("e")}, "nothing called 'e' can be offloaded"),
        ({("", 3): frozenset("c")}, "'c' is to be offloaded .* and is not kept there"),
        ({("loop", 3): frozenset("a")}, "no block 'loop' has a turn 3"),
    ]
    for offload, message in cases:
        with pytest.raises(jaxmem.JaxmemError, match=message):
            scheduler(line).schedule(keep, offload)


def test_a_cpu_has_no_other_memory_to_use():
    line = chain()
    on_cpu = Scheduler(line.nest, host=True)
    for offload, hosting in (({("", 3): frozenset("a")}, Hosting()), ({}, Hosting(frozenset([0])))):
        with pytest.raises(jaxmem.JaxmemError, match="its device memory is host memory"):
            on_cpu.schedule({("", 3): frozenset("abc")}, offload, hosting)


def test_transfers_need_the_rates_of_their_links():
    with pytest.raises(jaxmem.JaxmemError, match="no host link"):
        scheduler(chain(), RATES).schedule({}, {("", 3): frozenset("a")})


def test_what_is_made_at_once_is_sent_in_the_same_order_every_time():
    """A set has another order in every process, and over a mesh all must run the same program."""
    for _ in range(5):
        x, last, *made = (
            Value(jax.ShapeDtypeStruct((4,), jnp.float32), key) for key in ("x", "y", *"abcdef")
        )
        ops = [Op(OPAQUE, [x], made), Op(OPAQUE, [x], [last])]
        line = Line(Block("", (x,), (*ops, *_read(made)), (last,)), 2, ())
        names = frozenset(str(v.key) for v in made)
        written = scheduler(line).schedule({("", 2): names}, {("", 2): names})
        sent = [op.values[0].key for op in written.ops if op.transfer == "send"]
        (landed,) = [op for op in written.ops if op.barrier and len(op.values) > len(made)]
        assert sent == [v.key for v in made]
        assert [v.key for v in landed.values if v.host] == [f"{key}.host" for key in sent]


def _read(values: list[Value]) -> list[Op]:
    results = [Value(v.aval, f"{v.key} read") for v in values]
    return [Op(OPAQUE, [v], [result]) for v, result in zip(values, results, strict=True)]


@given(lines(), st.data(), st.sampled_from((1e-6, 1e-3, 60.0)))
@settings(max_examples=200)
def test_slack_moves_copies_apart_and_computes_the_same(line: Line, data, slack: float):
    """Nothing is computed elsewhere, and nothing is fetched later than without."""
    made = [v for op in line.block.ops[: line.turn] for v in op.outputs]
    kept = data.draw(st.lists(st.sampled_from(made), unique=True, min_size=1))
    returned = set(line.block.outputs)
    keep = {("", line.turn): frozenset(str(v.key) for v in kept)}
    offload = {("", line.turn): frozenset(str(v.key) for v in kept if v not in returned)}
    hosting = Hosting(
        frozenset(data.draw(st.lists(st.integers(0, len(line.block.inputs) - 1)))),
        frozenset(data.draw(st.lists(st.integers(0, len(line.block.outputs) - 1)))),
    )
    prompt, loose = (
        scheduler(line).schedule(keep, offload, hosting, slack_seconds=seconds)
        for seconds in (0.0, slack)
    )
    numbers: dict[tuple, int] = {}
    assert expressions(loose, numbers)[0] == expressions(prompt, numbers)[0]
    check_memories(loose)
    check_landings(loose)
    assert computed(loose) == computed(prompt)
    fetched = [positions(block, "fetch") for block in (prompt, loose)]
    assert fetched[0].keys() == fetched[1].keys()
    assert all(fetched[1][name] <= fetched[0][name] for name in fetched[0])
    assert positions(loose, "send").keys() == positions(prompt, "send").keys()


def computed(block: Block) -> list[tuple]:
    """What is computed, in order."""
    return [
        tuple(v.key for v in op.outputs) for op in block.ops if not op.transfer and not op.barrier
    ]


def positions(block: Block, transfer: str) -> dict[tuple, int]:
    """How much is computed before each copy, by what is copied and which copy of it that is."""
    found: dict[tuple, int] = {}
    done = 0
    for op in block.ops:
        if op.transfer == transfer:
            number = sum(key == op.outputs[0].key for key, _ in found)
            found[op.outputs[0].key, number] = done
        done += not op.transfer and not op.barrier
    return found


def test_slack_starts_a_fetch_earlier_and_ends_a_copy_to_the_host_later():
    """With time for it b is computed before what waits for a, and e after what fetches it."""
    line, rates = chain(), Rates({"float32": 1.0}, 1.0, 4.0, 4.0)
    keep, offload = {("", 3): frozenset("abc")}, {("", 3): frozenset("a")}

    def written(slack: float) -> list[str]:
        return names(scheduler(line, rates).schedule(keep, offload, slack_seconds=slack))

    assert written(0.0) == ["a", "send", "b", "wait", "c", "d", "wait", "fetch", "e", "r"]
    assert written(9.0) == ["a", "send", "b", "c", "wait", "wait", "fetch", "d", "e", "r"]
    # Not across the turn behind which the value is in host memory.
    assert written(1e6) == written(9.0)
