"""Make a MemoryReport of a compiled program: the compiler's buffers, with names people know."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxmem.errors import ReportError
from jaxmem.hlo.assignment import Allocation, Slice, parse_assignment
from jaxmem.hlo.lifetimes import Life, live_bytes, lives
from jaxmem.hlo.module import HOST_SPACE, UNREADABLE, Frame, read_module
from jaxmem.hlo.origins import Made, Origins
from jaxmem.hlo.schedule import Place, Schedule, places, scheduled
from jaxmem.hlo.serialized import buffer_assignment, unreadable
from jaxmem.planner.report import Buffer, MemoryReport
from jaxmem.program.source import file_name, module_path
from jaxmem.runtime.fusing import fusion_report
from jaxmem.runtime.known import NOTHING, Known
from jaxmem.targets.compiling import CompiledMemory, read_memory
from jaxmem.units import format_bytes

_CALLS = re.compile(r"\bp?jit\([^()]*\)")
_FLOW = re.compile(
    r"(?:^|/)(?:while/(?:body|cond)|while|cond/branch_\d+_fun|branch_\d+_fun|closed_call|core_call|eval_jaxpr"
    r"|custom_jvp_call|custom_vjp_call|checkpoint|remat\d?)(?=/|$)"
)


def compiled_report(
    executable: jax.stages.Compiled,
    *,
    function: str = "",
    target: str = "",
    device_bytes: int = 0,
    known: Known = NOTHING,
) -> MemoryReport:
    """What a compiled function takes and when, as the compiler assigned it; runs nothing.

    The program need not be jaxmem's: any ``jax.jit(f).lower(*args).compile()`` does.

    Args:
        executable: JAX's compiled object.
        function: how the report names it; by default as JAX does.
        target: name of the hardware; ``device_bytes`` what one device has, 0 for unknown.
        known: paths of arguments and results, and checkpoint names, where the traced program is
            there. Otherwise arguments have the names that JAX gave them in the program.

    Raises:
        ReportError: this jaxlib does not tell the compiler's buffers, or not in a form that is
            known.

    Cost:
        About 0.3 s for 10,000 instructions.

    >>> import jax, jax.numpy as jnp
    >>> step = jax.jit(lambda x: jnp.sin(x) @ x)
    >>> report = compiled_report(step.lower(jnp.ones((64, 64))).compile())
    >>> report.source, report.peak_bytes == report.compiled_bytes, report.by_argument()
    ('compiled', True, {'x': 16384})
    """
    try:
        allocations = parse_assignment(buffer_assignment(executable))
        schedule = scheduled(read_module(executable))
    except UNREADABLE as error:
        raise ReportError(f"{unreadable()}: {type(error).__name__}: {error}") from error
    reading = _Reading(schedule, Origins(schedule), known)
    memory = read_memory(executable)
    buffers = [b for a in allocations if not a.is_private for b in reading.buffers(a)]
    end = schedule.end
    live = live_bytes(
        (Life([], b.start, b.end, 0, b.nbytes) for b in buffers if b.memory == "device"), end + 1
    )
    heaps = sum(a.nbytes for a in allocations if _counts(a))
    lost = heaps - max(live)
    if lost > 0:
        buffers.append(_fragmentation(lost, end))
        live = [nbytes + lost for nbytes in live]
    peak = max(live)
    at = live.index(peak)
    return MemoryReport(
        function=function or schedule.module.name.removeprefix("jit_"),
        target=target,
        device_bytes=device_bytes,
        peak_bytes=peak,
        compiled_bytes=memory.total_bytes,
        compiled_temp_bytes=memory.temp_bytes,
        argument_bytes=memory.argument_bytes,
        output_bytes=memory.output_bytes,
        aliased_bytes=memory.alias_bytes,
        peak_index=at,
        timeline=tuple(live),
        phases=reading.phases(),
        buffers=tuple(buffers),
        equations=0,
        source="compiled",
        operations=tuple(i.name for i in schedule.order),
        fusion=fusion_report(
            schedule, reading.described, buffers, at, function=function, target=target
        ),
        notes=tuple(_notes(buffers, memory, peak)),
    )


def _counts(allocation: Allocation) -> bool:
    """Whether the compiler's figure for the device has it."""
    a = allocation
    return not (a.is_constant or a.is_private or a.space == HOST_SPACE)


def _fragmentation(nbytes: int, end: int) -> Buffer:
    name = "between buffers of the heap"
    return Buffer(name, nbytes, "fragmentation", 0, end, "", "", "", "", "", (nbytes,), "uint8")


def _notes(buffers: list[Buffer], memory: CompiledMemory, peak: int) -> Iterator[str]:
    if peak != memory.total_bytes:
        yield (
            f"the compiler's buffers add up to {format_bytes(peak)}, and its figure is "
            f"{format_bytes(memory.total_bytes)}"
        )
    constants = sum(b.nbytes for b in buffers if b.memory == "program")
    if constants > 2**20:
        yield f"{format_bytes(constants)} of constants come with the program and are not counted"


@dataclass(frozen=True)
class Described:
    """The names of where a value comes from, as a Buffer has them."""

    source: str
    module: str
    primitive: str
    op_name: str

    @property
    def is_backward(self) -> bool:
        """Whether JAX made it by transposing."""
        return _is_backward(self.op_name)


def _is_backward(op_name: str) -> bool:
    return "transpose(" in op_name


@functools.lru_cache(maxsize=4096)
def _names(op_name: str) -> tuple[str, str]:
    """Module path and primitive in the compiler's ``op_name``.

    >>> _names("jit(step)/transpose(jvp(Net))/Dense_0/while/body/dot_general")
    ('Net/Dense_0', 'dot_general')
    """
    stack, _, primitive = _CALLS.sub("", op_name).rpartition("/")
    while (plain := _FLOW.sub("", stack)) != stack:
        stack = plain
    return module_path(stack), primitive


@functools.lru_cache(maxsize=65536)
def _described(line: Frame | None, op_name: str) -> Described:
    source = f"{file_name(line.file)}:{line.line} ({line.function})" if line else ""
    return Described(source, *_names(op_name), op_name)


@dataclass(frozen=True, eq=False)
class _Reading:
    """A program whose buffers are read."""

    schedule: Schedule
    origins: Origins
    known: Known

    def described(self, place: Place) -> Described:
        """The names of where a value comes from."""
        made = self.origins.of(place)
        return _described(made.line, made.op_name)

    def argument(self, number: int) -> str:
        """The path of an argument."""
        if number < len(self.known.arguments):
            return self.known.arguments[number]
        one = self.schedule.parameters.get((self.schedule.module.entry.id, number))
        return (one and one.op_name) or f"argument {number}"

    @functools.cached_property
    def turn(self) -> tuple[int, int] | None:
        """First and last time at which the backward pass computes; making room is no computing."""
        runs = [
            t
            for t, one in enumerate(self.schedule.order)
            if _is_backward(one.op_name) and not self.origins.only_moves(one)
        ]
        return (runs[0], runs[-1]) if runs else None

    def waits(self, life: Life) -> bool:
        """Whether what a life holds is read in the backward pass."""
        at = (ident for piece in life.slices for ident, _ in places(self.schedule, piece.made))
        readers = (r for ident in set(at) for r in self.schedule.readers.get(ident, ()))
        return any(_is_backward(r.op_name) for r in readers)

    def phases(self) -> tuple[tuple[str, int], ...]:
        """Where forward, backward and update start."""
        if self.turn is None:
            return (("forward", 0),)
        first, last = self.turn
        after = (("update", last + 1),) if last < self.schedule.end else ()
        return (("forward", 0), ("backward", first), *after)

    def buffers(self, allocation: Allocation) -> Iterator[Buffer]:
        """What an allocation holds over time; an argument or a result is one thing all the time."""
        a = allocation
        memory = "host" if a.space == HOST_SPACE else "program" if a.is_constant else "device"
        if a.parameter >= 0:
            yield self._argument(a, memory)
        elif a.is_output:
            yield self._output(a, memory)
        elif a.is_constant:
            yield self._whole(a, "constant", memory, "constant")
        else:
            for life in lives(self.schedule, a):
                if life.nbytes:
                    yield self._temporary(life, memory)

    def _whole(
        self, a: Allocation, category: str, memory: str, name: str, path: str = "", at: int = 0
    ) -> Buffer:
        """A buffer that is there from the first to the last operation."""
        pieces = sorted(a.slices, key=lambda piece: -piece.nbytes)
        made = pieces[at].made if pieces else None
        one = self.schedule.module.instructions[made[0]] if made else None
        shape = one.shape.at(made[1]) if one and made else None
        told = self.described(made) if made and category == "output" else None
        return Buffer(
            name=name,
            nbytes=a.nbytes,
            category=category,
            start=0,
            end=self.schedule.end,
            path=path,
            source=told.source if told else "",
            module=told.module if told else "",
            checkpoint_name="",
            primitive=told.primitive if told else "",
            shape=shape.dims if shape else (),
            dtype=shape.dtype if shape else "",
            memory=memory,
            instruction=one.name if one else "",
        )

    def _argument(self, a: Allocation, memory: str) -> Buffer:
        path, entry = self.argument(a.parameter), self.schedule.module.entry.id
        own = self.schedule.parameters.get((entry, a.parameter))
        at = next((n for n, p in enumerate(_by_size(a)) if own and p.made[0] == own.id), 0)
        category = "constant" if a.parameter < self.known.constants else "argument"
        shown = "" if category == "constant" else path
        return self._whole(a, category, memory, path, shown, at)

    def _output(self, a: Allocation, memory: str) -> Buffer:
        if a.is_tuple:
            return self._whole(a, "output", memory, "addresses of the results")
        root = self.schedule.module.entry.root
        for at, piece in enumerate(_by_size(a)):
            for ident, index in places(self.schedule, piece.made):
                if ident == root:
                    path = self.known.result(index)
                    return self._whole(a, "output", memory, f"result{path}", path, at)
        return self._whole(a, "output", memory, "result")

    def _temporary(self, life: Life, memory: str) -> Buffer:
        piece, made = self._best(life)
        told = _described(made.line, made.op_name)
        ident, index = piece.made
        one = self.schedule.module.instructions[ident]
        shape = one.shape.at(index)
        path = self.argument(made.parameter) if made.parameter >= 0 else ""
        crosses = (
            not (told.is_backward and not made.read) and self.turn is not None and self.waits(life)
        )
        name = self.known.checkpoint_name(told.source, told.primitive)
        return Buffer(
            name=self._called(one.opcode, one.name, index, made, told, path, name),
            nbytes=life.nbytes,
            category="residual" if crosses else "temporary",
            start=life.start,
            end=life.end,
            path=path,
            source=told.source,
            module=told.module if not path else "",
            checkpoint_name=name,
            primitive=told.primitive if not path else "",
            shape=shape.dims,
            dtype=shape.dtype,
            memory=memory,
            instruction=one.name,
            offset=life.offset,
            repeats=self.schedule.turns.get(one.computation, 1),
        )

    def _best(self, life: Life) -> tuple[Slice, Made]:
        """Of the values that are there one after the other, the one that says most, and latest.

        A loop starts with zeros in what its turns fill: the turns say what it is.
        """
        found = [(self.origins.of(piece.made), piece) for piece in life.slices]

        def says(item: tuple[Made, Slice]) -> tuple[bool, bool, bool, bool, int]:
            made, piece = item
            at = self.schedule.at.get(piece.made[0], 0)
            return (
                made.line is not None,
                not (made.derived or made.read),
                not made.copied,
                made.is_known,
                at,
            )

        made, piece = max(found, key=says)
        return piece, made

    def _called(
        self,
        opcode: str,
        instruction: str,
        index: tuple[int, ...],
        made: Made,
        told: Described,
        path: str,
        checkpoint_name: str,
    ) -> str:
        if not made.is_known:
            return f"compiler's {instruction}"
        if made.read:
            return f"compiler's {instruction}, for {told.primitive}"
        if made.derived:
            return f"compiler's {instruction}, from {path or told.primitive}"
        if path:
            return f"copy of {path}"
        what = checkpoint_name or told.primitive or instruction
        if opcode == "custom-call" and index and index[-1] > 0:
            return f"{what} (workspace)"
        return f"copy of {what}" if made.copied and opcode.startswith("copy") else what


def _by_size(a: Allocation) -> list[Slice]:
    return sorted(a.slices, key=lambda piece: -piece.nbytes)
