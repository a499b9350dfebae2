"""A compiled program played through: what waits for copies, and for how long."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.errors import TargetError
from jaxmem.hlo.module import HOST_SPACE, Computation, Instruction, Module, read_module
from jaxmem.program.cost import Rates
from jaxmem.runtime.played import Played, played
from tests.messages import field_bytes

# A kernel that writes 8 bytes takes a second, and a copy of 4.
RATES = Rates({"float32": 1.0}, 8.0, 4.0, 4.0)
FLOAT32, TUPLE, BODY = 11, 13, 2


def array(count: int, space: int = 0) -> bytes:
    """An xla.ShapeProto of numbers."""
    layout = field_bytes(5, field_bytes(8, space)) if space else b""
    return field_bytes(2, FLOAT32) + field_bytes(3, count) + layout


def pair(*parts: bytes) -> bytes:
    return field_bytes(2, TUPLE) + b"".join(field_bytes(4, part) for part in parts)


class Written:
    """A program written down instruction by instruction, as a compiler would order it."""

    def __init__(self) -> None:
        self.instructions: dict[int, Instruction] = {}
        self.computations: dict[int, Computation] = {}
        self.sequence: list[int] = []

    def add(
        self, opcode: str, shape: bytes, *operands: int, called=(), config=b"", target=""
    ) -> int:
        ident = len(self.instructions) + 1
        self.instructions[ident] = Instruction(
            ident, f"{opcode}.{ident}", opcode, list(operands), list(called), 0, 0, "", target, 1,
            shape, b"", config,
        )  # fmt: skip
        self.sequence.append(ident)
        return ident

    def argument(self, count: int, space: int = 0) -> int:
        return self.add("parameter", array(count, space))

    def kernel(self, count: int) -> int:
        """Takes a second for each number."""
        return self.add("iota", array(2 * count))

    def start(self, count: int, source: int, space: int = 0) -> int:
        """A copy, of a second for each number, that is asked for."""
        there = array(count, HOST_SPACE - space)
        return self.add("copy-start", pair(array(count, space), there), source)

    def done(self, count: int, started: int, space: int = 0) -> int:
        return self.add("copy-done", array(count, space), started)

    def loop(self, turns: int, body: list[int]) -> None:
        """What was written in ``body`` runs so many times."""
        self.sequence = [ident for ident in self.sequence if ident not in body]
        self.computations[BODY] = Computation(BODY, "body", body, body[-1], body)
        config = b'{"known_trip_count":{"n":"%d"}}' % turns
        shape = self.instructions[body[-1]].raw_shape
        self.add("while", shape, called=[BODY], config=config)

    def module(self) -> Module:
        entry = Computation(1, "main", list(self.instructions), self.sequence[-1], self.sequence)
        return Module("m", entry, {1: entry, **self.computations}, self.instructions)


def test_a_copy_beside_kernels_is_hidden():
    program = Written()
    start = program.start(3, program.argument(3, HOST_SPACE))
    program.kernel(5)
    program.done(3, start)
    assert played(program.module(), RATES) == Played(5.0, 0.0)


def test_what_reads_a_copy_waits_for_the_rest_of_it():
    program = Written()
    start = program.start(7, program.argument(7, HOST_SPACE))
    program.kernel(5)
    program.done(7, start)
    program.kernel(1)
    assert played(program.module(), RATES) == Played(8.0, 2.0)


def test_copies_of_one_way_are_one_after_the_other_and_of_both_ways_together():
    for space, waits in ((HOST_SPACE, 4.0), (0, 8.0)):
        program = Written()
        first = program.start(4, program.argument(4, HOST_SPACE))
        second = program.start(4, program.argument(4, HOST_SPACE - space), space)
        program.done(4, first)
        program.done(4, second, space)
        assert played(program.module(), RATES) == Played(waits, waits)


def test_a_copy_that_is_not_begun_beforehand_is_waited_for_whole():
    program = Written()
    program.add("copy", array(4), program.argument(4, HOST_SPACE))
    assert played(program.module(), RATES) == Played(4.0, 4.0)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 9))
def test_a_loop_is_its_turns_one_after_the_other(turns: int, copied: int, computed: int):
    """Turns that are alike need not all be played."""

    def turn(program: Written, source: int) -> list[int]:
        start = program.start(copied, source)
        kernel = program.kernel(computed)
        return [start, kernel, program.done(copied, start)]

    looped, unrolled = Written(), Written()
    source = looped.argument(copied, HOST_SPACE)
    looped.loop(turns, turn(looped, source))
    source = unrolled.argument(copied, HOST_SPACE)
    for _ in range(turns):
        turn(unrolled, source)
    found, expected = (played(p.module(), RATES) for p in (looped, unrolled))
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.exposed_seconds == pytest.approx(expected.exposed_seconds)
    assert expected.exposed_seconds == pytest.approx(turns * max(0, copied - computed))


@pytest.mark.parametrize("turns", [1, 100])
def test_a_copy_goes_on_beside_a_loop(turns: int):
    program = Written()
    start = program.start(150, program.argument(150, HOST_SPACE))
    program.loop(turns, [program.kernel(1)])
    program.done(150, start)
    assert played(program.module(), RATES) == Played(150.0, 150.0 - turns)


def test_room_for_what_is_on_the_host_takes_no_time():
    program = Written()
    room = program.add("custom-call", array(50, HOST_SPACE), target="AllocateBuffer")
    program.add("add-dependency", array(50, HOST_SPACE), room, program.argument(1))
    program.kernel(2)
    assert played(program.module(), RATES) == Played(2.0, 0.0)


def test_kernels_take_their_share_of_what_all_take():
    program = Written()
    start = program.start(6, program.argument(6, HOST_SPACE))
    program.kernel(1)
    program.done(6, start)
    program.kernel(3)
    assert played(program.module(), RATES, computing=16.0) == Played(18.0, 2.0)


def test_a_host_link_that_is_not_known_is_said():
    program = Written()
    program.start(6, program.argument(6, HOST_SPACE))
    without = dataclasses.replace(RATES, h2d_bytes_per_second=0.0)
    with pytest.raises(TargetError, match="the rates have no host link"):
        played(program.module(), without)


def test_a_program_without_copies_waits_for_none():
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    module = read_module(step.lower(jnp.ones((64, 64))).compile())
    found = played(module, RATES)
    assert found.exposed_seconds == 0.0
    assert 0 < found.seconds < math.inf
