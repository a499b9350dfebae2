"""How what the pieces of a cut step hand on is split over several devices.

A step as one program ties a gradient to the state that it updates, and the compiler splits it like
that. A piece that only makes the gradient knows nothing of the state: left alone it comes out whole
on each device, after an all-reduce where a reduce-scatter was enough. So it is told.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.program.ir import Atom, Hosting, Op, Program, Value
from jaxmem.program.parts import Part
from jaxmem.program.primitives import Kind, kind_of

Layouts = dict[Value, NamedSharding]
_Step = Callable[[NamedSharding], NamedSharding]
# What gives its operand as it is.
_UNCHANGED = frozenset("name copy copy_p optimization_barrier reduce_precision".split())


def layouts_of(
    program: Program, hosting: Hosting, lent: Mapping[Value, Value], parts: Sequence[Part]
) -> Layouts:
    """The layouts, on devices, of what is known before anything is compiled; none on one device.

    What element-wise work of updates combines is split alike: as the leaf or the result among it
    of which a device has least.

    Args:
        program: the step.
        hosting: what of it waits in host memory.
        lent: for inputs that are lent to the gradients the leaf.
        parts: the updates.
    """
    if not program.sharded:
        return {}
    known = {v: layout for v, layout in _given(program, hosting) if layout is not None}
    known.update((v, known[leaf]) for v, leaf in lent.items() if leaf in known)
    found = _spread([op for part in parts for op in part.block.ops], known)
    for value, layout in found.items():
        count(value, layout)
    return found


def count_inputs(program: Program) -> None:
    """Let the inputs of a step over several devices count so."""
    for value, layout in zip(program.block.inputs, program.layouts(), strict=True):
        if program.sharded and isinstance(layout, NamedSharding):
            count(value, layout)


def count(value: Value, layout: NamedSharding) -> None:
    """Let a value count with what each device has of it."""
    if not value.host and hasattr(value.aval, "dtype"):
        value.nbytes = _part_bytes(value, layout)


def _part_bytes(value: Value, layout: NamedSharding) -> int:
    return math.prod(layout.shard_shape(value.aval.shape)) * value.aval.dtype.itemsize


def _given(program: Program, hosting: Hosting) -> Iterator[tuple[Value, NamedSharding | None]]:
    """The results and inputs of a step, and the layouts that it gives them; inputs come last."""
    inputs = program.layouts()
    results = program.out_shardings() or [None] * len(program.block.outputs)
    for n, (atom, layout) in enumerate(zip(program.block.outputs, results, strict=True)):
        if isinstance(atom, Value):
            yield atom, _named(inputs[program.places[n]] if n in hosting.results else layout)
    for value, layout in zip(program.block.inputs, inputs, strict=True):
        yield value, _named(layout)


def _named(layout: object) -> NamedSharding | None:
    return layout if isinstance(layout, NamedSharding) else None


def _spread(ops: Sequence[Op], known: Mapping[Value, NamedSharding]) -> Layouts:
    """The layouts that are known, and those that follow, from the smallest parts on."""
    ways: dict[Value, list[tuple[Value, _Step]]] = {}
    for op in ops:
        for here, there, step in _ways(op):
            ways.setdefault(here, []).append((there, step))
    found = dict(known)
    waiting = [(_part_bytes(v, layout), n, v) for n, (v, layout) in enumerate(known.items())]
    heapq.heapify(waiting)
    numbers = iter(range(len(waiting), 2**62))
    while waiting:
        _, _, value = heapq.heappop(waiting)
        for there, step in ways.get(value, ()):
            if there not in found:
                found[there] = layout = step(found[value])
                heapq.heappush(waiting, (_part_bytes(there, layout), next(numbers), there))
    return found


def _ways(op: Op) -> Iterator[tuple[Value, Value, _Step]]:
    """Which values of an operation are split as which others, and how it permutes that."""
    if op.name == "transpose":
        (operand,), (result,) = op.inputs, op.outputs
        order = tuple(op.eqn.params["permutation"])
        if isinstance(operand, Value):
            yield operand, result, _permuting(order)
            yield result, operand, _permuting(tuple(map(order.index, range(len(order)))))
        return
    if op.loop is not None or not (kind_of(op) is Kind.FUSED or op.name in _UNCHANGED):
        return
    for first in op.outputs:
        alike = [v for v in op.values if _shape(v) == _shape(first) and _shape(v)]
        if op.name in _UNCHANGED and len(op.outputs) > 1:
            pairs = zip(op.inputs, op.outputs, strict=True)
            alike = [v for v, out in pairs if out is first and isinstance(v, Value)]
        for v in alike:
            yield v, first, _as_it_is
            yield first, v, _as_it_is


def _shape(atom: Atom) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _as_it_is(layout: NamedSharding) -> NamedSharding:
    return layout


def _permuting(order: Sequence[int]) -> _Step:
    def permuted(layout: NamedSharding) -> NamedSharding:
        spec = [*layout.spec, *[None] * (len(order) - len(layout.spec))]
        return NamedSharding(layout.mesh, PartitionSpec(*(spec[n] for n in order)))

    return permuted
