"""Laws of a line that is looked at closely: on random steps, on nets, and with barriers in them."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmem.planner.simulate import Simulation, Simulator
from jaxmem.program.ir import Block, Program, Value
from jaxmem.program.primitives import Kind
from tests.planner.lines import RATES, program
from tests.problems import PROBLEMS, pure, random_step

CLOSELY = dataclasses.replace(RATES, together=True)
STEPS = [*range(16), "unet_nnx", "conv_nnx", "autoencoder", "transformer_bf16", "mlp"]


@pytest.fixture(params=STEPS, ids=str, scope="module")
def traced(request) -> Program:
    """A random step's gradients, or a train step of a net."""
    if isinstance(request.param, str):
        step = pure(PROBLEMS[request.param])
        return program(step.function, *step.args)
    function, args = random_step(request.param)
    return program(function, *args)


@pytest.fixture(params=[False, True], ids=["barriers keep nothing", "barriers keep"])
def simulator(request) -> Simulator:
    return Simulator(dataclasses.replace(CLOSELY, barriers_keep=request.param))


def read(block: Block, roots: dict[Value, tuple[Value, ...]], index: int) -> set[Value]:
    return {root for v in block.ops[index].values for root in roots[v]}


def test_lifetimes_add_up_to_the_timeline(traced: Program, simulator: Simulator):
    block = traced.block
    simulation: Simulation = simulator.step(block)
    kinds = simulation.fusion.kinds
    spans = simulation.lifetimes
    change = [0] * (len(block.ops) + 1)
    for span in spans:
        assert span.start <= span.end + 1, "what is written over at once ends before it starts"
        change[span.start] += span.value.nbytes
        change[span.end + 1] -= span.value.nbytes
    live = 0
    for index, op in enumerate(block.ops):
        live += change[index]
        inside = simulator.working_bytes(op) if kinds[index] is Kind.OPAQUE else 0
        assert simulation.timeline[index] == live + inside
    assert live + change[-1] == 0


def test_kernels_run_when_all_that_they_read_is_there_and_it_stays_until_then(
    traced: Program, simulator: Simulator
):
    block = traced.block
    simulation = simulator.step(block)
    fusion = simulation.fusion
    maker = {v: index for index, made in enumerate(fusion.made) for v in made}
    ends = {span.value: span.end for span in simulation.lifetimes}
    for index, made in enumerate(fusion.made):
        assert fusion.at[index] <= index
        if not made:
            continue
        for value in read(block, fusion.roots, index) & maker.keys():
            # In one kernel with what makes it, or after that.
            assert fusion.at[maker[value]] <= fusion.at[index]
            if value in ends:
                # One less where it is written over.
                assert ends[value] >= fusion.at[index] - 1


def test_nothing_is_written_over_what_is_spared(traced: Program, simulator: Simulator):
    """What an operation may not write over is alive while it runs, or was never made here."""
    block = traced.block
    simulation = simulator.step(block)
    fusion = simulation.fusion
    ends = {span.value: span.end for span in simulation.lifetimes}
    for index, (made, spared) in enumerate(zip(fusion.made, fusion.spared, strict=True)):
        if made and fusion.at[index] == index:
            assert all(ends.get(v, index) >= index for v in spared)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_twice(seed: int):
    function, args = random_step(seed)
    one, other = (Simulator(CLOSELY).step(program(function, *args).block) for _ in range(2))
    assert one.timeline == other.timeline and one.seconds == other.seconds
