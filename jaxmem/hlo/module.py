"""A compiled and scheduled HLO module, as far as memory and names need it."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jaxmem.hlo.wire import WireError, bytes_of, fields, number, numbers, text

# What reading a program may raise that another jaxlib made: its bytes mean something else
# (WireError), a field that was always there is not (LookupError), or its runtime does not give
# programs away (the others). Who catches it says so: in an error, or in a plan's notes.
UNREADABLE = (WireError, LookupError, jax.errors.JaxRuntimeError, NotImplementedError)

# xla_data.proto, PrimitiveType: what JAX has a dtype for.
_DTYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64",
    6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "float16", 11: "float32", 12: "float64", 13: "tuple", 15: "complex64", 16: "bfloat16",
    17: "token", 18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn", 21: "int4", 22: "uint4",
    23: "float8_e4m3b11fnuz", 24: "float8_e5m2fnuz", 25: "float8_e4m3fnuz", 26: "int2",
    27: "uint2", 28: "float8_e4m3", 29: "float8_e3m4", 32: "float4_e2m1fn", 33: "float8_e8m0fnu",
}  # fmt: skip


_BITS = re.compile(r"\d+")
# xla/layout.h: the memory space of what is in host memory.
HOST_SPACE = 5


class Frame(NamedTuple):
    """One line of a traceback: ``file``, ``function`` and ``line``."""

    file: str
    function: str
    line: int


@dataclass(frozen=True, eq=False)
class Shape:
    """``dtype`` (a NumPy name, ``"tuple"``, or ``""``), ``dims``, and the parts of a tuple.

    ``space`` is the compiler's memory space: :data:`HOST_SPACE` is host memory.
    """

    dtype: str
    dims: tuple[int, ...]
    parts: tuple[Shape, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """How many numbers an array has."""
        return math.prod(self.dims)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of its numbers, without padding."""
        if self.parts:
            return sum(part.nbytes for part in self.parts)
        bits = 8 if self.dtype == "bool" else int((_BITS.findall(self.dtype) or [0])[0])
        return -(-self.size * bits // 8)

    def at(self, index: tuple[int, ...]) -> Shape:
        """The shape of a part of a tuple."""
        return self if not index else self.parts[index[0]].at(index[1:])


@dataclass(eq=False)
class Instruction:
    """One instruction; ids are unique in the module.

    Attributes:
        called: ids of computations: body and condition of a ``while``, branches, what is fused.
        tuple_index: of a ``get-tuple-element``; ``parameter`` the number of a ``parameter``.
        fusion_kind: of a ``fusion``: ``"kLoop"``, ``"kInput"``, ``"kOutput"`` or ``"kCustom"``.
        computation: id of the computation that it is in.
    """

    id: int
    name: str
    opcode: str
    operands: list[int]
    called: list[int]
    tuple_index: int
    parameter: int
    fusion_kind: str
    target: str
    computation: int
    raw_shape: bytes
    raw_metadata: bytes
    raw_config: bytes
    raw_convolution: bytes = b""
    raw_dot: bytes = b""

    @functools.cached_property
    def shape(self) -> Shape:
        """Its type."""
        return _shape(self.raw_shape)

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name stack and primitive, such as ``jit(step)/jvp(h3)/dot_general``, or ``""``."""
        return next((text(v) for n, v in fields(self.raw_metadata) if n == 2), "")

    @functools.cached_property
    def frame_id(self) -> int:
        """Its innermost line in the module's stack frames; 0 for none."""
        return next((number(v) for n, v in fields(self.raw_metadata) if n == 15), 0)

    @functools.cached_property
    def turns(self) -> int:
        """How often the body of a ``while`` runs; 1 where the compiler does not know."""
        return _turns(self.raw_config)


@dataclass(frozen=True, eq=False)
class Computation:
    """A list of instructions; ``sequence`` is the order in which they run, empty if fused."""

    id: int
    name: str
    instructions: list[int]
    root: int
    sequence: list[int]


@dataclass(frozen=True, eq=False)
class Module:
    """A scheduled program.

    Attributes:
        name: of the module, ``jit_`` and the name of the function.
        entry: the computation that runs.
        computations: by id; ``instructions`` likewise.
        files, functions, locations, frames: the stack frames, as XLA packs them.
    """

    name: str
    entry: Computation
    computations: dict[int, Computation]
    instructions: dict[int, Instruction]
    files: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    locations: list[tuple[int, int, int]] = field(default_factory=list)
    frames: list[tuple[int, int]] = field(default_factory=list)

    def root(self, computation: int) -> Instruction:
        """The instruction whose result a computation returns."""
        return self.instructions[self.computations[computation].root]

    def traceback(self, instruction: Instruction) -> list[Frame]:
        """The lines that led to an instruction, innermost first."""
        found, at, seen = [], instruction.frame_id, set()
        while 0 < at <= len(self.frames) and at not in seen:
            seen.add(at)
            location, at = self.frames[at - 1]
            if 0 < location <= len(self.locations):
                file, function, line = self.locations[location - 1]
                found.append(Frame(self.files[file - 1], self.functions[function - 1], line))
        return found


def read_module(executable: jax.stages.Compiled) -> Module:
    """The optimised and scheduled program of a compiled JAX function.

    Cost:
        About 0.1 s for 10,000 instructions.

    >>> import jax
    >>> module = read_module(jax.jit(lambda x: x + 1).lower(1.0).compile())
    >>> module.name, len(module.entry.sequence) > 1
    ('jit__lambda', True)
    """
    loaded: Any = executable.runtime_executable()
    (first, *_) = loaded.hlo_modules()
    return parse_module(first.as_serialized_hlo_module_proto())


def parse_module(data: bytes) -> Module:
    """A module from the bytes of its HloModuleProto.

    Raises:
        WireError: they are something else.
    """
    name, entry = "", 0
    computations: list[bytes] = []
    sequences: dict[int, list[int]] = {}
    index = b""
    for n, value in fields(data):
        if n == 1:
            name = text(value)
        elif n == 6:
            entry = number(value)
        elif n == 3:
            computations.append(bytes_of(value))
        elif n == 7:
            sequences = dict(_sequence(bytes_of(v)) for m, v in fields(bytes_of(value)) if m == 1)
        elif n == 17:
            index = bytes_of(value)
    instructions: dict[int, Instruction] = {}
    found = [_computation(raw, sequences, instructions) for raw in computations]
    by_id = {c.id: c for c in found}
    return Module(name, by_id[entry], by_id, instructions, *_frames(index))


def _computation(
    data: bytes, sequences: dict[int, list[int]], into: dict[int, Instruction]
) -> Computation:
    ident = root = 0
    name, raw = "", []
    for n, value in fields(data):
        if n == 2:
            raw.append(bytes_of(value))
        elif n == 1:
            name = text(value)
        elif n == 5:
            ident = number(value)
        elif n == 6:
            root = number(value)
    made = [_instruction(part, ident) for part in raw]
    into.update((i.id, i) for i in made)
    return Computation(ident, name, [i.id for i in made], root, sequences.get(ident, []))


_KEPT = frozenset([1, 2, 3, 7, 9, 11, 13, 16, 28, 30, 35, 43])


def _instruction(data: bytes, computation: int) -> Instruction:
    found: dict[int, Any] = {}
    operands: list[int] = []
    called: list[int] = []
    for n, value in fields(data):
        if n in _KEPT:
            found[n] = value
        elif n == 36:
            operands += numbers(value)
        elif n == 38:
            called += numbers(value)
    get = found.get
    return Instruction(
        found[35],
        found[1].decode("utf-8", "replace"),
        sys.intern(found[2].decode()),
        operands,
        called,
        get(13, 0),
        get(9, 0),
        get(11, b"").decode(),
        get(28, b"").decode("utf-8", "replace"),
        computation,
        get(3, b""),
        get(7, b""),
        get(43, b""),
        get(16, b""),
        get(30, b""),
    )


@functools.lru_cache(maxsize=4096)
def _shape(data: bytes) -> Shape:
    dtype, dims, parts, space = 0, [], [], 0
    for n, value in fields(data):
        if n == 2:
            dtype = number(value)
        elif n == 3:
            dims += numbers(value)
        elif n == 4:
            parts.append(_shape(bytes_of(value)))
        elif n == 5:
            space = next((number(v) for m, v in fields(bytes_of(value)) if m == 8), 0)
    return Shape(_DTYPES.get(dtype, ""), tuple(dims), tuple(parts), space)


@functools.lru_cache(maxsize=4096)
def _turns(config: bytes) -> int:
    if b"known_trip_count" not in config:
        return 1
    return int(json.loads(config)["known_trip_count"]["n"])


def _sequence(entry: bytes) -> tuple[int, list[int]]:
    """An entry of the schedule's map: a computation and the order of its instructions."""
    key, order = 0, []
    for n, value in fields(entry):
        if n == 1:
            key = number(value)
        else:
            order = [i for _, ids in fields(bytes_of(value)) for i in numbers(ids)]
    return key, order


def _frames(
    index: bytes,
) -> tuple[list[str], list[str], list[tuple[int, int, int]], list[tuple[int, int]]]:
    files, functions, locations, frames = [], [], [], []
    for n, value in fields(index):
        if n == 1:
            files.append(text(value))
        elif n == 2:
            functions.append(text(value))
        elif n == 3:
            part = {m: number(v) for m, v in fields(bytes_of(value))}
            locations.append((part.get(1, 0), part.get(2, 0), part.get(3, 0)))
        elif n == 4:
            part = {m: number(v) for m, v in fields(bytes_of(value))}
            frames.append((part.get(1, 0), part.get(2, 0)))
    return files, functions, locations, frames
