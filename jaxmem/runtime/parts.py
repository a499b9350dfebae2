"""Compile the parts of a step that is cut, equal ones once, and see what memory they take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmem.program.cut import Cut
from jaxmem.program.ir import Atom, Value, in_host_memory
from jaxmem.program.parts import Part
from jaxmem.rewrite.chunked import as_loop
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.joined import as_joined
from jaxmem.rewrite.standin import compilable
from jaxmem.runtime.spread import Spread
from jaxmem.targets.compiling import Compiled, CompiledMemory, compile_for
from jaxmem.targets.options import going_along, going_by_rows, overlapping
from jaxmem.targets.target import Target


def compile_parts(
    parts: Sequence[Part],
    target: Target | None,
    options: Mapping[str, str] | None = None,
    spread: Spread | None = None,
) -> list[Compiled]:
    """Each part compiled for a target, or for this machine; parts that do the same share one.

    ``spread``: where arrays are, of a step over several devices.
    """
    known: dict[Hashable, Compiled] = {}
    found = []
    for part in parts:
        form, read, wanted = form_of(part), [], []
        if spread is not None:
            read = spread.read(part.reads, part.block.inputs)
            wanted = [spread.of(name) for name in part.names]
            form = form, tuple(read), tuple(wanted)
        if form not in known:
            known[form] = (
                _compiled(part, target, options or {})
                if spread is None
                else _compiled_over_devices(part, target, options or {}, read, wanted)
            )
        if spread is not None:
            spread.made(part.names, part.block.outputs, known[form])
        found.append(known[form])
    return found


def _compiled_over_devices(
    part: Part,
    target: Target | None,
    options: Mapping[str, str],
    read: Sequence[Any],
    wanted: Sequence[Any],
) -> Compiled:
    """A part as one program over all devices, whose copies are not in it."""
    avals = [
        jax.ShapeDtypeStruct(
            v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False), sharding=s
        )
        for v, s in zip(part.block.inputs, read, strict=True)
    ]
    return compile_for(
        target,
        as_function(compilable(part.block, target)),
        avals,
        donate=part.donated,
        out_shardings=[*wanted],
        options=options,
    )


def _compiled(part: Part, target: Target | None, options: Mapping[str, str]) -> Compiled:
    # Of a layout over a mesh JAX takes the memory into the type of the argument.
    alone = part.chunks is not None or bool(part.waiting)
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("device",))
    host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    device = host.with_memory_kind("device")
    # Donation asks for the memory only where everything says where it is.
    there = {*part.waiting, *(part.chunks.rows.leaves if part.chunks else ())}
    places = {v: host if v in there else device for v in part.block.inputs} if alone else {}
    avals = [
        jax.ShapeDtypeStruct(
            v.aval.shape,
            v.aval.dtype,
            weak_type=getattr(v.aval, "weak_type", False),
            sharding=places.get(v),
        )
        for v in part.block.inputs
    ]
    if part.chunks is None:
        run = as_function(compilable(part.block, target))
        if part.waiting:
            # Replayed as one command buffer the loops of 16 layers took 57.7 ms on an H200, as
            # long as computing and copying one after the other.
            options = {**options, **overlapping(target or Target.local(measure=False))}
        return compile_for(target, run, avals, donate=part.donated, options=options)
    here = target or Target.local(measure=False)
    return compile_for(
        target,
        as_joined(part) if part.along else as_loop(part.chunks),
        avals,
        donate=part.donated,
        out_shardings=[
            in_host_memory(None) if v in part.hosted else SingleDeviceSharding(mesh.devices[0])
            for v in part.block.outputs
        ],
        options={**options, **going_along(here)} if part.along else going_by_rows(here),
    )


def form_of(part: Part) -> Hashable:
    """Equal for parts that do the same to arrays of the same shapes."""
    if part.along:
        return id(part)
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
            (op.barrier, op.transfer, id(op.loop) if op.loop and op.loop.rewritten else 0),
            tuple(read(atom) for atom in op.inputs),
            tuple(named(v) for v in op.outputs),
        )
        for op in block.ops
    )
    inside = part.chunks
    by_rows = inside and (
        inside.count,
        tuple(numbers[v] for v in inside.rows.leaves),
        tuple((numbers[v], numbers[leaf]) for v, leaf in inside.homes.items()),
    )
    return inputs, ops, tuple(read(atom) for atom in block.outputs), part.donated, by_rows


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
        freed = sum(inputs[n].nbytes for n in gone if part.reads[n] not in part.leaves)
        alive += memory.output_bytes - leave - freed
    return found
