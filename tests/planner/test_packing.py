"""Buffers that share memory: never less than what is there at once, and laid out as XLA does."""

from __future__ import annotations

import itertools

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planner import packing
from jaxmem.planner.packing import buffers, packed_bytes
from jaxmem.planner.places import Span
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.workspace import Workspace
from tests.planner.lines import RATES, Line, lines, program
from tests.planner.test_places import SPANS, apart


def most_at_once(spans: list[Span]) -> int:
    times = range(max((span.end for span in spans), default=0) + 1)
    return max((sum(s.nbytes for s in spans if s.start <= t <= s.end) for t in times), default=0)


def least_bytes(spans: list[Span]) -> int:
    """By brute force: spans are put down one after the other, each as low as it can be."""
    best = sum(span.nbytes for span in spans)
    for order in itertools.permutations(spans):
        placed: list[tuple[int, Span]] = []
        for span in order:
            there = [(at, other) for at, other in placed if not apart(span, other)]
            starts = sorted([0, *(at + other.nbytes for at, other in there)])
            free = (
                start
                for start in starts
                if all(
                    start + span.nbytes <= at or at + other.nbytes <= start for at, other in there
                )
            )
            placed.append((next(free), span))
        best = min(best, max((at + span.nbytes for at, span in placed), default=0))
    return best


@given(st.lists(SPANS, max_size=30))
def test_no_less_than_what_is_there_at_once_and_no_more_than_all_of_it(spans):
    assert most_at_once(spans) <= packed_bytes(spans) <= sum(span.nbytes for span in spans)


@given(st.lists(SPANS, max_size=6))
@settings(max_examples=100, deadline=None)
def test_no_layout_is_smaller_than_the_smallest(spans):
    assert packed_bytes(spans) >= least_bytes(spans)


@given(st.lists(SPANS, max_size=20))
def test_what_is_there_at_the_same_time_lies_apart(spans):
    seen: list[tuple[int, Span]] = []
    with pytest.MonkeyPatch.context() as patched:
        fit = packing._best_fit
        offsets = []
        patched.setattr(packing, "_best_fit", lambda *a: offsets.append(fit(*a)) or offsets[-1])
        packing._laid_out(spans)
    for at, span in zip(offsets, spans, strict=True):
        for other_at, other in seen:
            beside = at + span.nbytes <= other_at or other_at + other.nbytes <= at
            assert beside or apart(span, other)
        seen.append((at, span))


# The largest lies at 0, and so does the first of the two of 3. The other lies on that one, and 1,
# which is there with the other and with the largest, on both: 7, though all of them go into 6.
GAP = [Span(0, 3, 3), Span(3, 5, 3), Span(4, 8, 1), Span(6, 10, 4)]
# By size 1 of 3 to 7 lies on 3 of 6 to 6, and the other 1 on that; by life 3 is put last.
BY_SIZE = [Span(0, 4, 2), Span(3, 7, 1), Span(6, 6, 3), Span(6, 10, 1)]
BY_LIFE = [Span(2, 3, 3), Span(2, 6, 2), Span(4, 5, 2), Span(5, 9, 2)]
# The longest first puts 4 to 8 at 0 and 3 to 6 at 2; above that and 1 to 2 goes 2 to 3, to 4.
EQUALS = [Span(1, 2, 2), Span(2, 3, 2), Span(3, 6, 2), Span(4, 8, 2)]


@pytest.mark.parametrize(
    ("spans", "layouts"),
    [(GAP, [7, 8, 7]), (BY_SIZE, [5, 6, 5]), (BY_LIFE, [7, 6, 7]), (EQUALS, [6, 6, 4])],
)
def test_a_gap_is_counted_and_the_smallest_layout_is_taken(spans, layouts):
    orders = packing._ORDERS
    assert [packing._laid_out(sorted(spans, key=order)) for order in orders] == layouts
    assert packed_bytes(spans) == min(layouts)


def test_what_is_laid_out_with_a_gap_takes_more_than_is_there_at_once():
    assert packed_bytes(GAP) == 7 > least_bytes(GAP) == most_at_once(GAP) == 6
    assert packed_bytes([]) == 0


@given(lines(), st.data())
def test_workspaces_count_while_their_operation_runs(line: Line, data):
    block = line.block
    some = data.draw(st.lists(st.sampled_from(block.ops), unique=True))
    known = {
        op: Workspace(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))) for op in some
    }
    plain, simulated = Simulator(RATES).step(block), Simulator(RATES, known).step(block)
    for at, op in enumerate(block.ops):
        extra = simulated.timeline[at] - plain.timeline[at]
        workspace = known.get(op, Workspace())
        if not plain.fusion.made[at]:
            continue
        assert 0 <= extra <= workspace.total_bytes
        if not workspace.parts_bytes:
            assert extra == workspace.nbytes
    assert simulated.temp_bytes >= plain.temp_bytes


@given(lines())
def test_buffers_are_there_as_long_as_on_paper(line: Line):
    simulation = Simulator(RATES).step(line.block)
    spans = buffers(line.block, simulation, {})
    for at, live in enumerate(simulation.timeline):
        there = [span.nbytes for span in spans if span.start <= 2 * at + 1 and span.end >= 2 * at]
        assert sum(there) == live


def test_parts_are_there_before_their_sum_and_after_its_operands():
    def product(x, w, v):
        return ((x + 1) @ w) @ v

    square = jax.ShapeDtypeStruct((64, 64), "float32")
    block = program(product, square, square, square).block
    first = next(op for op in block.ops if op.name == "dot_general")
    one, known = 64 * 64 * 4, {first: Workspace(0, 4 * 64 * 64 * 4)}
    simulation = Simulator(RATES, known).step(block)
    # The sum of x + 1 is made in four parts: with the operand, or with the sum itself.
    assert simulation.temp_bytes == 5 * one
    assert packed_bytes(buffers(block, simulation, known)) == 5 * one


@pytest.mark.parametrize("room", [0, 1])
def test_parts_of_a_result_of_the_step_are_there_without_it(room):
    square = jax.ShapeDtypeStruct((64, 64), "float32")
    block = program(lambda x, w: (x + 1) @ w, square, square).block
    product = next(op for op in block.ops if op.name == "dot_general")
    one = 64 * 64 * 4
    known = {product: Workspace(room * one, 4 * one)}
    simulation = Simulator(RATES, known).step(block)
    assert simulation.temp_bytes == (5 + room) * one
    assert packed_bytes(buffers(block, simulation, known)) == (5 + room) * one
