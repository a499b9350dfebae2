"""What stays the same about a line of operations whatever is kept across its turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmem.program.fusion import fuse
from jaxmem.program.ir import Block, Op, Value
from jaxmem.program.primitives import Kind, kind_of
from jaxmem.program.sinking import repeated_numbers

# What is never fused into whatever reads it.
BUFFERS = frozenset([Kind.OPAQUE, Kind.REDUCE])


def kept_name(op: Op, value: Value) -> str:
    """The name by which ``value`` stands in a kept set: its key, or its whole loop's."""
    loop = op.origin.loop
    return f"loop {loop.body.path}" if loop is not None else str(value.key)


@dataclass(frozen=True, eq=False)
class Facts:
    """What stays the same about a line of operations whatever is kept.

    Attributes:
        block: the line as traced: path, inputs, outputs.
        carried: for the joint iteration of a scan pair, how many outputs the forward scan hands to
            its next iteration: the early part gives them away before the late part starts.
        carries: what the forward scan of a pair was handed by its last iteration; the late part
            reads it stacked.
        ops: its operations; loops inside are already written out.
        kinds: the kind of each.
        made: the position at which each value is made.
        droppable: name, value and position of everything that may be made again.
        needed_until: the last operation that reads each value, itself or through what is fused
            with it.
        read_until: the last operation that reads each value itself.
        depth: how many operations must run one after the other to have each value.
        numbers: values that the compiler knows; nothing is gained by making them again.
        roots: the buffers behind each value.
        kernel_end: for each operation the next one that writes a buffer: what is between is fused.
    """

    block: Block
    carried: int
    carries: tuple[Value, ...]
    ops: tuple[Op, ...]
    kinds: tuple[Kind, ...]
    made: dict[Value, int]
    droppable: tuple[tuple[str, Value, int], ...]
    needed_until: dict[Value, int]
    read_until: dict[Value, int]
    depth: dict[Value, int]
    numbers: set[Value]
    roots: dict[Value, tuple[Value, ...]]
    kernel_end: tuple[int, ...]

    @functools.cached_property
    def readers(self) -> dict[Value, list[int]]:
        """The operations that read each value."""
        found: dict[Value, list[int]] = {}
        for index, op in enumerate(self.ops):
            for value in op.values:
                found.setdefault(value, []).append(index)
        return found

    @classmethod
    def of(
        cls,
        block: Block,
        ops: Sequence[Op],
        repeatable: Callable[[Op], bool],
        carried: int = 0,
        carries: tuple[Value, ...] = (),
    ) -> Facts:
        """The facts of ``ops``, which stand for the operations of ``block``."""
        returned = {v for v in block.outputs[carried:] if isinstance(v, Value)}
        numbers = repeated_numbers(ops)
        fixed = returned | numbers
        kinds = tuple([kind_of(op) for op in ops])
        droppable = tuple(
            (kept_name(op, value), value, index)
            for index, op in enumerate(ops)
            if repeatable(op.origin)
            for value in op.outputs
            if value not in fixed
        )
        made = {value: index for index, op in enumerate(ops) for value in op.outputs}
        fusion = fuse(block.inputs, ops, block.outputs)
        return cls(
            block=block,
            carried=carried,
            carries=carries,
            ops=tuple(ops),
            kinds=kinds,
            made=made,
            droppable=droppable,
            needed_until=_needed_until(ops, fusion.made, returned),
            read_until={v: index for index, op in enumerate(ops) for v in op.values}
            | dict.fromkeys(returned, len(ops)),
            depth=_depth(ops, numbers),
            numbers=numbers,
            roots=fusion.roots,
            kernel_end=_kernel_ends([bool(written) for written in fusion.made]),
        )


def _kernel_ends(writes: Sequence[bool]) -> tuple[int, ...]:
    """For each operation the next one that writes a buffer; itself if it does.

    >>> _kernel_ends([False, True, True, False])
    (1, 1, 2, 3)
    """
    ends = list(range(len(writes)))
    for index in range(len(writes) - 2, -1, -1):
        if not writes[index]:
            ends[index] = ends[index + 1]
    return tuple(ends)


def _depth(ops: Sequence[Op], numbers: set[Value]) -> dict[Value, int]:
    """The longest way from what is given to each value, in operations."""
    depth: dict[Value, int] = dict.fromkeys(numbers, 0)
    for op in ops:
        steps = 1 + max([depth.get(v, 0) for v in op.values], default=-1)
        for value in op.outputs:
            depth.setdefault(value, steps)
    return depth


def _needed_until(
    ops: Sequence[Op], written: Sequence[tuple[Value, ...]], returned: set[Value]
) -> dict[Value, int]:
    """The last operation that reads each value, itself or through what is fused with it."""
    until: dict[Value, int] = dict.fromkeys(returned, len(ops))
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        position = index
        if not written[index]:
            position = max((until.get(v, index) for v in op.outputs), default=index)
        for value in op.values:
            if until.get(value, -1) < position:
                until[value] = position
    return until
