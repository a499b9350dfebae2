"""Where in the user's code a compiled value comes from, as far as the compiler says."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jaxmem.hlo
from jaxmem import _compat
from jaxmem.hlo.module import Frame, Instruction
from jaxmem.hlo.schedule import Place, Schedule, body_of, places

_OURS = str(Path(jaxmem.hlo.__file__).parent.parent)
# What moves or repeats numbers and makes none.
MOVING = frozenset(
    "copy copy-start copy-done bitcast reshape transpose broadcast slice dynamic-slice pad "
    "opt-barrier concatenate reverse async-start async-update async-done bitcast-convert".split()
)
# XLA:CPU computes some types in wider ones, with conversions that have no place in the user's code.
_SAME = MOVING | {"convert"}
_MAKING_NOTHING = _SAME | {"parameter", "constant", "iota", "tuple", "get-tuple-element"}


@dataclass(frozen=True)
class Made:
    """Where a value comes from.

    Attributes:
        op_name: JAX's name stack and primitive, ``""`` where the compiler does not know.
        line: the user's own line, ``None`` where there is none.
        parameter: number of the argument that it is or copies, -1 for others.
        copied: whether it is a copy of what the rest says.
        derived: whether it is computed from what the rest says, and from nothing else of its size;
            the compiler does not say by which line.
        read: whether the rest says what reads it: it is made of constants alone, by no line.
    """

    op_name: str
    line: Frame | None
    parameter: int = -1
    copied: bool = False
    derived: bool = False
    read: bool = False

    @property
    def is_known(self) -> bool:
        """Whether there is a line or an argument to point at."""
        return self.line is not None or self.parameter >= 0


NOWHERE = Made("", None)


class Origins:
    """Looks up where values come from; remembers what it found."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._module = schedule.module
        self._lines: dict[int, Frame | None] = {}
        self._made: dict[Place, Made] = {}

    def line(self, instruction: Instruction) -> Frame | None:
        """The innermost line that is neither JAX's nor jaxmem's own."""
        frame = instruction.frame_id
        if frame not in self._lines:
            lines = self._module.traceback(instruction)
            self._lines[frame] = next((f for f in lines if _is_users(f.file)), None)
        return self._lines[frame]

    def of(self, place: Place) -> Made:
        """Where a value comes from that is made, or handed on, at a place."""
        if place not in self._made:
            found = next((f for f in self._followed(place) if f.is_known), None)
            self._made[place] = found or self._by_readers(place)
        return self._made[place]

    def _by_readers(self, place: Place) -> Made:
        """What the first instruction that reads a value says of itself."""
        one = self._module.instructions[place[0]]
        schedule = self._schedule
        readers = (
            r for ident, _ in places(schedule, place) for r in schedule.readers.get(ident, ())
        )
        for reader in sorted(set(readers), key=lambda r: schedule.at[r.id]):
            index = (0,) if reader.shape.parts else ()
            found = self._own(reader, index)
            if found.line is not None:
                return Made(found.op_name, found.line, read=True)
        return Made(one.op_name, None)

    def _followed(self, place: Place) -> Iterator[Made]:
        """What is known at a place, then at what it is copied from or is handed on from."""
        left, seen, copied, derived = [place], set(), False, False
        while left:
            ident, index = at = left.pop()
            if at in seen:
                continue
            seen.add(at)
            one = self._module.instructions[ident]
            if one.opcode == "parameter" and one.computation == self._module.entry.id:
                yield Made(one.op_name, None, one.parameter, copied, derived)
                continue
            found = self._own(one, index)
            yield Made(found.op_name, found.line, found.parameter, copied or found.copied, derived)
            copied = copied or one.opcode in _SAME or one.opcode == "fusion"
            before = list(self._before(one, index))
            if not before and one.opcode not in _MAKING_NOTHING:
                before = self._only_array(one)
                derived = derived or bool(before)
            # The last one is looked at first.
            left += reversed(before)

    def _own(self, one: Instruction, index: tuple[int, ...]) -> Made:
        """What an instruction says of itself, or of what is fused in it."""
        if one.opcode in ("tuple", "get-tuple-element", "parameter", "while", "conditional"):
            return NOWHERE
        if one.opcode == "fusion":
            return self._fused(one, index)
        if one.opcode == "dynamic-update-slice":
            row = self.of((one.operands[1], ()))
            if row.is_known:
                return row
        return Made(one.op_name, self.line(one))

    def _fused(self, fusion: Instruction, index: tuple[int, ...]) -> Made:
        """The result of a fusion: of a row that is put into a stack, what made the row."""
        inside, module = self._module.computations[fusion.called[0]], self._module
        root = module.instructions[inside.root]
        if root.opcode == "tuple" and index:
            root = module.instructions[root.operands[index[0]]]
        at, put = root, False
        while at.operands and (at.opcode in _SAME or at.opcode == "dynamic-update-slice"):
            put = put or at.opcode == "dynamic-update-slice"
            if self.line(at) and not put:
                break
            at = module.instructions[at.operands[at.opcode == "dynamic-update-slice"]]
        if put and at.opcode == "parameter":
            row = self.of((fusion.operands[at.parameter], ()))
            if row.is_known:
                return Made(row.op_name, row.line, row.parameter)
        for one in (at, root, fusion):
            if self.line(one):
                return Made(one.op_name, self.line(one))
        made = (module.instructions[i] for i in reversed(inside.instructions))
        known = (one for one in made if one.opcode not in _MAKING_NOTHING and self.line(one))
        return next((Made(one.op_name, self.line(one)) for one in known), NOWHERE)

    def _before(self, one: Instruction, index: tuple[int, ...]) -> Iterator[Place]:
        """Where a value comes from that an instruction only moves or hands on."""
        opcode = one.opcode
        if opcode == "get-tuple-element":
            yield one.operands[0], (one.tuple_index, *index)
        elif opcode == "tuple" and index:
            yield one.operands[index[0]], index[1:]
        elif opcode == "while" and index:
            yield self._module.computations[body_of(self._module, one)].root, index
            yield one.operands[0], index
        elif opcode == "call":
            yield self._module.computations[one.called[0]].root, index
        elif opcode == "conditional":
            yield from ((self._module.computations[c].root, index) for c in one.called)
        elif opcode == "parameter":
            yield from self._given(one, index)
        elif opcode in _SAME and one.operands:
            yield one.operands[0], ()
        elif opcode == "fusion" and self.only_moves(one):
            yield from ((operand, ()) for operand in one.operands)

    def _given(self, parameter: Instruction, index: tuple[int, ...]) -> Iterator[Place]:
        """What a parameter of a loop's body, or of what is called, stands for."""
        caller = self._schedule.callers.get(parameter.computation)
        if caller is not None and caller.opcode == "while":
            # What the turn before made; in the first turn, and where none makes it, what the loop
            # starts with.
            yield self._module.computations[body_of(self._module, caller)].root, index
            yield caller.operands[0], index
        elif caller is not None and caller.opcode != "conditional":
            yield caller.operands[parameter.parameter], index

    def _only_array(self, one: Instruction) -> list[Place]:
        """The operand of an instruction where all others are single numbers."""
        operands = (self._module.instructions[i] for i in dict.fromkeys(one.operands))
        arrays = [o for o in operands if o.shape.dims and o.opcode != "constant"]
        return [(arrays[0].id, ())] if len(arrays) == 1 else []

    def only_moves(self, one: Instruction) -> bool:
        """Whether an instruction, or all that is fused in it, makes no numbers but moves some."""
        if one.opcode != "fusion":
            return one.opcode in _MAKING_NOTHING
        inside = self._module.computations[one.called[0]].instructions
        return all(self._module.instructions[i].opcode in _MAKING_NOTHING for i in inside)


@functools.lru_cache(maxsize=1024)
def _is_users(file: str) -> bool:
    return _compat.is_user_file(file) and not file.startswith(_OURS)
