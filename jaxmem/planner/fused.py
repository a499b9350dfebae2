"""A line of operations as the problem of its kernels: what is fused away has no part in it."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmem.planner.facts import kept_name
from jaxmem.planner.inplace import IN_PLACE
from jaxmem.planner.problem import Choice, Kernel, Problem, Run
from jaxmem.planner.problem import Turn as ProblemTurn
from jaxmem.planner.schedule import Keep, StillKept, Turn
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.transfers import FEWEST_MOVED
from jaxmem.program.ir import Block, Op, Value
from jaxmem.program.primitives import Kind


@dataclass(frozen=True, eq=False)
class FusedLine:
    """A problem and what its numbers stand for.

    Attributes:
        problem: the line of kernels.
        ops: the operation behind each kernel.
        values: the buffer behind each number.
        names: how each droppable number stands in a kept set.
        places: the position of each kernel's operation.
    """

    problem: Problem
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    names: dict[int, str]
    places: tuple[int, ...]

    def numbers(self, names: frozenset[str]) -> frozenset[int]:
        """The values of a kept set."""
        found = (self._called[name] for name in names if name in self._called)
        return frozenset(itertools.chain.from_iterable(found))

    @functools.cached_property
    def _called(self) -> dict[str, list[int]]:
        """The values of each name."""
        called: dict[str, list[int]] = {}
        for value, name in self.names.items():
            called.setdefault(name, []).append(value)
        return called

    def run(self, keep: Keep, offload: Keep | None = None) -> Run:
        """What a kept set needs on paper."""
        away = offload or {}
        turns = sorted((turn[1], turn, kept) for turn, kept in keep.items())
        choice = []
        for at, turn, kept in turns:
            moved = self.numbers(away[turn]) if turn in away else frozenset[int]()
            place = bisect_left(self.places, at)
            choice.append(ProblemTurn(place, self.numbers(kept) - moved, moved))
        assert choice[0].at == self.problem.turn
        return self.problem.run(tuple(choice))

    def keep_of(self, choice: Choice, main: Turn) -> dict[Turn, frozenset[str]]:
        """The kept sets that a choice stands for.

        A turn stands before everything that is fused into its kernel: in the middle of it, what the
        kernel needs would be made again once before the turn and once behind it.
        """
        path, _ = main
        first = choice[0]
        keep: dict[Turn, frozenset[str]] = {main: self.kept(first.keep | first.offload)}
        for turn in choice[1:]:
            keep[path, self.places[turn.at - 1] + 1] = StillKept(self.kept(turn.keep))
        return keep

    def offload_of(self, choice: Choice, main: Turn) -> Keep:
        """What of these kept sets crosses the main turn in host memory, if it is worth a copy."""
        nbytes = self.problem.nbytes
        away = self.kept(frozenset(v for v in choice[0].offload if nbytes[v] >= FEWEST_MOVED))
        return {main: away} if away else {}

    def kept(self, numbers: frozenset[int]) -> frozenset[str]:
        """The kept set of values."""
        return frozenset(self.names[v] for v in numbers)


def fused_line(
    block: Block,
    ops: Sequence[Op],
    turn: int,
    simulator: Simulator,
    repeatable: Callable[[Op], bool],
    *,
    d2h_bytes_per_second: float = 0.0,
    h2d_bytes_per_second: float = 0.0,
) -> FusedLine:
    """The problem of ``ops``, which stand for the operations of ``block``.

    Args:
        block: gives inputs and outputs.
        ops: its operations; loops inside may be written out already.
        turn: the operation at which the late part starts.
        simulator: gives seconds and working bytes of single operations.
        repeatable: whether an operation may run again.
    """
    fusion = simulator.fused(block, ops)
    results = {r for v in block.outputs if isinstance(v, Value) for r in fusion.roots[v]}
    numbers: dict[Value, int] = {}

    def number(value: Value) -> int:
        return numbers.setdefault(value, len(numbers))

    kernels: list[Kernel] = []
    behind: list[Op] = []
    places: list[int] = []
    late_from = 0
    for index, (op, kind, made) in enumerate(zip(ops, fusion.kinds, fusion.made, strict=True)):
        if index == turn:
            late_from = len(kernels)
        if not made and kind is not Kind.OPAQUE:
            continue
        reads = dict.fromkeys([r for v in op.values for r in fusion.roots[v]])
        kernels.append(
            Kernel(
                seconds=simulator.seconds(op, kind, fusion) if made else 0.0,
                reads=tuple([number(r) for r in reads]),
                makes=tuple([number(v) for v in made]),
                repeatable=repeatable(op.origin),
                working_bytes=simulator.working_bytes(op) if kind is Kind.OPAQUE else 0,
                in_place=kind is Kind.FUSED or op.name in IN_PLACE,
                spared=tuple([number(v) for v in fusion.spared[index]]),
            )
        )
        behind.append(op)
        places.append(index)
    values = tuple(numbers)
    problem = Problem(
        kernels=tuple(kernels),
        nbytes=tuple([v.nbytes for v in values]),
        turn=late_from,
        results=frozenset(numbers[v] for v in results if v in numbers),
        d2h_bytes_per_second=d2h_bytes_per_second,
        h2d_bytes_per_second=h2d_bytes_per_second,
    )
    names = {v: kept_name(behind[problem.made[v]], values[v]) for v in problem.droppable}
    return FusedLine(problem, tuple(behind), values, names, tuple(places))
