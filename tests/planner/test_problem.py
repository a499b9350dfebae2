"""Playing a choice through on paper: the same figures as writing it out and simulating that."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planner.fused import fused_line
from jaxmem.planner.problem import Turn
from jaxmem.planner.schedule import Scheduler, StillKept
from jaxmem.planner.simulate import Simulator
from jaxmem.program.primitives import may_repeat
from tests.planner.lines import RATES, Line, lines


@settings(max_examples=300, deadline=None)
@given(lines(), st.data())
def test_the_same_as_the_written_out_program(line: Line, data):
    kept = frozenset(data.draw(st.lists(st.sampled_from(line.keys), unique=True)))
    simulator = Simulator(RATES)
    fused = fused_line(line.block, line.block.ops, line.turn, simulator, may_repeat)
    run = fused.problem.run(fused.problem.keeping(fused.numbers(kept)))
    written = simulator.step(Scheduler(line.nest).schedule({("", line.turn): kept}))
    assert run.peak_bytes == written.temp_bytes
    assert run.seconds == pytest.approx(written.seconds)


@settings(max_examples=200, deadline=None)
@given(lines(), st.data())
def test_the_same_with_several_turns(line: Line, data):
    places = range(line.turn, len(line.block.ops))
    more = data.draw(st.lists(st.sampled_from(places), unique=True, max_size=3))
    turns = sorted({line.turn, *more})
    keep = {
        ("", at): (frozenset if at == line.turn else StillKept)(
            data.draw(st.lists(st.sampled_from(line.keys), unique=True))
        )
        for at in turns
    }
    simulator = Simulator(RATES)
    fused = fused_line(line.block, line.block.ops, line.turn, simulator, may_repeat)
    choice = tuple(Turn(at, fused.numbers(keep["", at])) for at in turns)
    run = fused.problem.run(choice)
    written = simulator.step(Scheduler(line.nest).schedule(keep))
    assert run.seconds == pytest.approx(written.seconds)
    assert run.peak_bytes == written.temp_bytes
