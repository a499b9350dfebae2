"""Compile the parts of a step that is cut, equal ones once, and see what memory they take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jaxmem.program.cut import Cut
from jaxmem.program.ir import Atom, Value
from jaxmem.program.parts import Part
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.standin import compilable
from jaxmem.targets.compiling import Compiled, CompiledMemory, compile_for
from jaxmem.targets.target import Target


def compile_parts(
    parts: Sequence[Part], target: Target | None, options: Mapping[str, str] | None = None
) -> list[Compiled]:
    """Each part compiled for a target, or for this machine; parts that do the same share one."""
    known: dict[Hashable, Compiled] = {}
    found = []
    for part in parts:
        form = form_of(part)
        if form not in known:
            known[form] = compile_for(
                target,
                as_function(compilable(part.block, target)),
                [
                    jax.ShapeDtypeStruct(
                        v.aval.shape,
                        v.aval.dtype,
                        weak_type=getattr(v.aval, "weak_type", False),
                    )
                    for v in part.block.inputs
                ],
                donate=part.donated,
                options=options,
            )
        found.append(known[form])
    return found


def form_of(part: Part) -> Hashable:
    """Equal for parts that do the same to arrays of the same shapes."""
    block = part.block
    numbers: dict[Value, int] = {}

    def named(value: Value) -> tuple[Any, ...]:
        numbers[value] = len(numbers)
        aval = value.aval
        return aval.shape, aval.dtype, getattr(aval, "weak_type", False)

    def read(atom: Atom) -> Hashable:
        if isinstance(atom, Value):
            return numbers[atom]
        literal = np.asarray(atom.val)
        return str(atom.aval), literal.dtype.str, literal.tobytes()

    inputs = tuple(named(v) for v in block.inputs)
    ops = tuple(
        (
            op.eqn.primitive,
            tuple(sorted((name, _text(param)) for name, param in op.eqn.params.items())),
            repr(op.eqn.ctx),
            tuple(read(atom) for atom in op.inputs),
            tuple(named(v) for v in op.outputs),
        )
        for op in block.ops
    )
    return inputs, ops, tuple(read(atom) for atom in block.outputs), part.donated


def _text(param: Any) -> str:
    """A parameter as text that differs where the parameter does."""
    items = param if isinstance(param, tuple | list) else (param,)
    held = [id(c) for item in items if isinstance(item, jex.ClosedJaxpr) for c in item.consts]
    arrays = [item.tobytes().hex() for item in items if isinstance(item, np.ndarray)]
    return f"{param} {held} {arrays}"


@dataclass(frozen=True)
class Need:
    """Device memory of an update.

    Attributes:
        beside_bytes: everything but what is copied for updates.
        way_bytes: what is copied for this one, until its last copy back has ended.
    """

    beside_bytes: int
    way_bytes: int

    @property
    def least_bytes(self) -> int:
        """What the update takes with no other under way."""
        return self.beside_bytes + self.way_bytes


def needs(cut: Cut, first: CompiledMemory, parts: Sequence[CompiledMemory]) -> list[Need]:
    """Device memory of each part, while it runs.

    Args:
        cut: the step.
        first: what its first part takes; its arguments are all that are on the device.
        parts: what the others take.
    """
    alive = first.argument_bytes + first.output_bytes - first.alias_bytes + cut.returned_bytes
    stay = cut.stay
    arguments = set(cut.program.block.inputs)
    found = []
    for part, memory in zip(cut.parts, parts, strict=True):
        inputs = part.block.inputs
        new = memory.output_bytes - memory.alias_bytes
        # What an update gives is copied back; what a stage gives stays on the device.
        back = part.moves and not part.stage
        leave = sum(v.nbytes for v in part.sent if v not in stay)
        # A result may be sent from the buffer of an input that was not fetched, such as a gradient.
        on_way = max(part.fetched_bytes + new * back, leave * back)
        found.append(Need(alive + memory.temp_bytes + new * (not back), on_way))
        # What the caller has stays as it is, unless it is written over.
        gone = {n for n in part.over if n in part.donated or part.reads[n] not in arguments}
        freed = sum(inputs[n].nbytes for n in gone if part.reads[n] not in part.fetched)
        alive += memory.output_bytes - leave - freed
    return found
