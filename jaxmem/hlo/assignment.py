"""The compiler's buffer assignment: where in memory each value is."""

from __future__ import annotations

from dataclasses import dataclass

from jaxmem.hlo.wire import bytes_of, fields, number, numbers


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """A part of an allocation and the value that has it for a while.

    Attributes:
        made: the instruction that makes the value, by its id, and the part of its result.
    """

    made: tuple[int, tuple[int, ...]]
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Allocation:
    """Memory that is taken at once, when the program starts.

    Attributes:
        nbytes: its size; of the heap of temporaries all that it ever needs.
        parameter: number of the argument that it is, or -1.
        is_output: whether it holds a result, or a part of one.
        is_constant: whether it comes with the program; ``is_private`` with a thread.
        is_tuple: whether it is a table of addresses of results.
        space: memory space of the compiler; :data:`jaxmem.hlo.module.HOST_SPACE` is host
            memory.
        slices: what is in it and where, overlapping where not at the same time.
    """

    nbytes: int
    parameter: int
    is_output: bool
    is_constant: bool
    is_private: bool
    is_tuple: bool
    space: int
    slices: list[Slice]


def parse_assignment(data: bytes) -> list[Allocation]:
    """Allocations from the bytes of a BufferAssignmentProto.

    Raises:
        WireError: they are something else.
    """
    values: dict[int, tuple[int, tuple[int, ...]]] = {}
    raw = []
    for n, content in fields(data):
        if n == 1:
            ident, made = _value(bytes_of(content))
            values[ident] = made
        elif n == 3:
            raw.append(bytes_of(content))
    return [_allocation(part, values) for part in raw]


def _allocation(data: bytes, values: dict[int, tuple[int, tuple[int, ...]]]) -> Allocation:
    found: dict[int, int] = {}
    slices = []
    for n, content in fields(data):
        if n == 9:
            part = {m: number(v) for m, v in fields(bytes_of(content))}
            slices.append(Slice(values[part.get(1, 0)], part.get(2, 0), part.get(3, 0)))
        elif isinstance(content, int):
            found[n] = content
    return Allocation(
        nbytes=found.get(2, 0),
        parameter=found.get(6, 0) if found.get(5) else -1,
        is_output=bool(found.get(7)),
        is_constant=bool(found.get(12)),
        is_private=bool(found.get(3)),
        is_tuple=bool(found.get(11)),
        space=found.get(8, 0),
        slices=slices,
    )


def _value(data: bytes) -> tuple[int, tuple[int, tuple[int, ...]]]:
    ident, made = 0, (0, ())
    for n, content in fields(data):
        if n == 1:
            ident = number(content)
        elif n == 3:
            made = _place(bytes_of(content))
    return ident, made


def _place(data: bytes) -> tuple[int, tuple[int, ...]]:
    instruction, index = 0, []
    for n, content in fields(data):
        if n == 4:
            instruction = number(content)
        elif n == 3:
            index += numbers(content)
    return instruction, tuple(index)
