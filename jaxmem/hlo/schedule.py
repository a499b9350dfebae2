"""The order in which a compiled program runs, and where each of its values goes.

As in XLA's own HloLiveRange of a whole module, the bodies of loops and branches are written out
once, in front of the instruction that runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxmem.hlo.module import Computation, Instruction, Module
from jaxmem.hlo.wire import WireError

Place = tuple[int, tuple[int, ...]]
"""An instruction's id and an index into its result: which part of which tuple."""

# Where the result is in what starts an operation that ends later; others give it as it is.
_RESULT_OF_START = {
    "copy-start": 0,
    "async-start": 1,
    "async-update": 1,
    "all-gather-start": 1,
    "collective-permute-start": 1,
    "recv": 0,
}
_AS_IT_IS = frozenset(["bitcast", "opt-barrier", "all-reduce-done", "while", "async-update"])
_OF_OPERANDS = frozenset(["tuple", "call", "conditional", "async-start"])
# Where its operands are.
_OPERANDS_OF_START = {"copy-start": 1, "all-gather-start": 0, "collective-permute-start": 0}


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order in which a program runs, its loops' bodies once.

    Attributes:
        order: the instructions; an index in it is a time.
        at: time of each instruction, by its id.
        spans: first and last time of each computation, by its id.
        turns: how often each computation runs per step, by its id, as far as the compiler knows.
        readers: what has each instruction's result as an operand, by its id, but for parts.
        parts: the ``get-tuple-element`` instructions, by the tuple's id and the number of the part.
        callers: what runs each computation, by its id.
        parameters: the parameters of each computation that runs, by its id and their numbers.
    """

    module: Module
    order: list[Instruction]
    at: dict[int, int]
    spans: dict[int, tuple[int, int]]
    turns: dict[int, int]
    readers: dict[int, list[Instruction]]
    parts: dict[tuple[int, int], list[Instruction]]
    callers: dict[int, Instruction]
    parameters: dict[tuple[int, int], Instruction]

    @property
    def end(self) -> int:
        """The last time."""
        return max(0, len(self.order) - 1)


def scheduled(module: Module) -> Schedule:
    """The order in which a module runs.

    Raises:
        WireError: a loop without a body.
    """
    order: list[Instruction] = []
    at: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    turns = {module.entry.id: 1}
    # An explicit stack: loops may be nested deeper than Python's own would take.
    stack = [(module.entry, iter(module.entry.sequence), 0)]
    entered = {module.entry.id}
    while stack:
        computation, rest, first = stack[-1]
        for ident in rest:
            instruction = module.instructions[ident]
            inner = [c for c in _run_by(module, instruction) if c.id not in entered]
            if inner:
                again = turns[computation.id] * instruction.turns
                for called in reversed(inner):
                    entered.add(called.id)
                    turns[called.id] = again
                # It runs itself when what it calls has run.
                stack[-1] = (computation, _chained(ident, rest), first)
                stack += [(c, iter(c.sequence), -1) for c in reversed(inner)]
                break
            if instruction.opcode == "while":
                body_of(module, instruction)
            at[ident] = len(order)
            order.append(instruction)
        else:
            stack.pop()
            spans[computation.id] = (first, len(order) - 1)
        if stack and stack[-1][2] < 0:
            stack[-1] = (*stack[-1][:2], len(order))
    return Schedule(module, order, at, spans, turns, *_edges(module, order))


def _chained(first: int, rest: Iterator[int]) -> Iterator[int]:
    yield first
    yield from rest


def _run_by(module: Module, instruction: Instruction) -> list[Computation]:
    """What an instruction runs that has a schedule of its own; fusions have none."""
    if instruction.opcode == "fusion":
        return []
    called = (module.computations[c] for c in instruction.called if c in module.computations)
    return [c for c in called if c.sequence]


def _edges(module: Module, order: list[Instruction]) -> tuple[dict, dict, dict, dict]:
    readers: dict[int, list[Instruction]] = {}
    parts: dict[tuple[int, int], list[Instruction]] = {}
    callers: dict[int, Instruction] = {}
    parameters: dict[tuple[int, int], Instruction] = {}
    for one in order:
        if one.opcode == "parameter":
            parameters[one.computation, one.parameter] = one
        if one.opcode == "get-tuple-element":
            parts.setdefault((one.operands[0], one.tuple_index), []).append(one)
        else:
            for operand in dict.fromkeys(one.operands):
                readers.setdefault(operand, []).append(one)
        for called in _run_by(module, one):
            callers.setdefault(called.id, one)
    return readers, parts, callers, parameters


def places(schedule: Schedule, made: Place) -> list[Place]:
    """Everywhere that a value is: where it is made, and what tuples and loops it goes through.

    Nothing is copied on the way: it is the same bytes at all of them.
    """
    found = {made: None}
    left = [made]
    while left:
        for place in _next(schedule, left.pop()):
            if place not in found:
                found[place] = None
                left.append(place)
    return list(found)


def _next(schedule: Schedule, place: Place) -> Iterator[Place]:
    ident, index = place
    if index:
        for part in schedule.parts.get((ident, index[0]), ()):
            yield part.id, index[1:]
    for reader in schedule.readers.get(ident, ()):
        yield from _through(schedule, reader, ident, index)
    here = schedule.module.instructions[ident]
    caller = schedule.callers.get(here.computation)
    if caller is not None and schedule.module.computations[here.computation].root == ident:
        yield from _returned(schedule, caller, here.computation, index)


def _through(
    schedule: Schedule, reader: Instruction, ident: int, index: tuple[int, ...]
) -> Iterator[Place]:
    """Where a value is in the result of what reads it, or inside of what that runs."""
    opcode = reader.opcode
    if opcode in _AS_IT_IS:
        yield reader.id, index
    elif opcode in _OPERANDS_OF_START:
        yield reader.id, (_OPERANDS_OF_START[opcode], *index)
    elif opcode.endswith("-done") and index:
        started = schedule.module.instructions[ident].opcode
        if _RESULT_OF_START.get(started) == index[0]:
            yield reader.id, index[1:]
    if opcode == "while":
        yield from _into(schedule, reader.called, 0, index)
    elif opcode in _OF_OPERANDS:
        for n in (n for n, operand in enumerate(reader.operands) if operand == ident):
            yield from _as_operand(schedule, reader, n, index)


def _as_operand(
    schedule: Schedule, reader: Instruction, n: int, index: tuple[int, ...]
) -> Iterator[Place]:
    """Where the operand of number ``n`` is in a result, or inside."""
    if reader.opcode == "tuple":
        yield reader.id, (n, *index)
    elif reader.opcode == "conditional":
        yield from _into(schedule, reader.called[n - 1 : n] if n else (), 0, index)
    else:
        if reader.opcode == "async-start":
            yield reader.id, (0, n, *index)
        yield from _into(schedule, reader.called, n, index)


def _into(
    schedule: Schedule, called: Iterable[int], parameter: int, index: tuple[int, ...]
) -> Iterator[Place]:
    for computation in called:
        inner = schedule.parameters.get((computation, parameter))
        if inner is not None:
            yield inner.id, index


def _returned(
    schedule: Schedule, caller: Instruction, computation: int, index: tuple[int, ...]
) -> Iterator[Place]:
    """Where a value is that a computation returns; a loop's next turn is given it, too."""
    if caller.opcode == "while":
        if computation == body_of(schedule.module, caller):
            yield caller.id, index
            yield from _into(schedule, caller.called, 0, index)
    elif caller.opcode == "async-start":
        yield caller.id, (1, *index)
    elif caller.opcode in ("call", "conditional"):
        yield caller.id, index


def body_of(module: Module, loop: Instruction) -> int:
    """The body of a loop: its condition returns one truth value, which a body hardly does alone.

    Raises:
        WireError: nothing that the loop runs can be its body.
    """
    # Layouts are part of a type, and need not be the same inside.
    same = [c for c in loop.called if module.root(c).raw_shape == loop.raw_shape]
    found = same or [c for c in loop.called if not _is_truth(module.root(c))]
    if not found:
        raise WireError(f"the loop {loop.name} runs nothing that returns what it does")
    return found[0]


def _is_truth(instruction: Instruction) -> bool:
    shape = instruction.shape
    return shape.dtype == "bool" and not shape.dims
