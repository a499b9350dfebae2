"""Values that the compiler is told how to split.

Shardy and XLA's partitioner choose layouts one operation at a time: between two layers of a net
whose parameters are split (ZeRO-3, FSDP) half of a product may be half of its columns, and
activations are exchanged where weights would be less. Trainers write a constraint on activations
for that (``jax.lax.with_sharding_constraint``); here the values of the traced step have it, so that
what is made again has it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any

import jax
from jax.extend import core as jex
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmem.program.ir import Block, Value
from jaxmem.program.primitives import Kind, kind_of


def pin(block: Block, mesh: Mesh | AbstractMesh, axes: Set[str]) -> list[Value]:
    """Tell the compiler to split what products and kernels of ``block`` give along ``axes`` as
    their layouts say; along other axes it is free. Returns the values that are pinned now.

    What element-wise operations make follows, and is not said.
    """
    found = []
    for value in _made_by_kernels(block):
        spec = _spec(value, mesh, axes)
        if value.pinned is None and spec is not None:
            value.pinned = NamedSharding(mesh, spec)
            found.append(value)
    return found


def unpin(values: Iterable[Value]) -> None:
    """Leave it to the compiler again how values are split."""
    for value in values:
        value.pinned = None


def has_pins(block: Block) -> bool:
    """Whether anything in ``block`` is pinned, or in the loops in it."""
    return any(
        any(v.pinned is not None for v in op.outputs)
        or (op.loop is not None and has_pins(op.loop.body))
        for op in block.ops
    )


def constraint(aval: Any, sharding: Any) -> jex.JaxprEqn:
    """The equation that constrains an array of this type."""

    def constrained(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding)

    (eqn,) = jax.make_jaxpr(constrained)(aval).eqns
    return eqn


def _made_by_kernels(block: Block) -> Iterator[Value]:
    for op in block.ops:
        if op.loop is not None:
            yield from _made_by_kernels(op.loop.body)
        elif kind_of(op) is Kind.OPAQUE and op.name != "sharding_constraint":
            yield from op.outputs


def _spec(value: Value, mesh: Mesh | AbstractMesh, axes: Set[str]) -> PartitionSpec | None:
    """Where a value is split along ``axes``; ``None`` where it is not, not evenly, or over another
    mesh."""
    if value.layout is None:
        return None
    if any(n in axes and mesh.shape.get(n) != size for n, size in value.layout.all_axes):
        return None
    names = [tuple(n for n, _ in own if n in axes) for own in value.layout.axes]
    pairs = zip(value.aval.shape, value.layout.parts, strict=True)
    if not any(names) or any(size % parts for size, parts in pairs):
        return None
    return PartitionSpec(*(own or PartitionSpec.UNCONSTRAINED for own in names))
