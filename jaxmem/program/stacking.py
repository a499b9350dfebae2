"""What loops stack into, where XLA makes it before they start."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp

from jaxmem.program.ir import Op, Value, kind_of_array
from jaxmem.program.loops import is_written_out
from jaxmem.program.making import is_typed


def shared_zeros(ops: Sequence[Op]) -> dict[tuple, list[int]]:
    """The kinds of arrays that several loops of ``ops`` stack, with the positions of these loops.

    A scan stacks into zeros. XLA:GPU finds that those of one shape and dtype are the same, makes
    them once, and a copy for each loop; before jax 0.12 all copies in one kernel. That reads
    nothing, and is the first to run.
    """
    loops: dict[tuple, list[int]] = {}
    for index, op in enumerate(ops):
        for kind in dict.fromkeys(map(kind_of_array, stacks_of(op))):
            loops.setdefault(kind, []).append(index)
    return {kind: found for kind, found in loops.items() if len(found) > 1}


def made_first(ops: Sequence[Op]) -> Collection[Value]:
    """The stacks whose zeros are there from the first of ``ops`` on."""
    shared = shared_zeros(ops)
    if not shared:
        return ()
    return [v for op in ops for v in stacks_of(op) if kind_of_array(v) in shared]


def stacks_of(op: Op) -> Sequence[Value]:
    """What a loop stacks into zeros that may not be its own; none of what XLA writes out."""
    loop = op.loop
    if loop is None or loop.pieces or loop.apart or is_written_out(loop):
        return ()
    twice = stacked_twice(op)
    return [v for v in op.outputs[loop.num_carry :] if v.nbytes and v not in twice]


def stacked_twice(op: Op) -> dict[Value, Value]:
    """The stacks of a loop with the same rows as one before them, which they are for XLA:GPU.

    An RNN that returns what it carries stacks it, and as a residual once more (jax before 0.11).
    """
    loop = op.loop
    if loop is None or loop.pieces:
        return {}
    first: dict[Value, Value] = {}
    found: dict[Value, Value] = {}
    stacks = zip(loop.body.outputs[loop.num_carry :], op.outputs[loop.num_carry :], strict=True)
    for row, stack in stacks:
        if isinstance(row, Value) and first.setdefault(row, stack) is not stack:
            found[stack] = first[row]
    return found


def may_stack_apart(op: Op) -> bool:
    """Whether a loop can be given arrays of its own to stack into.

    Not keys, which are no plain arrays, nor what is in host memory or has a type that says how it
    lies on a mesh (axes of the type Explicit).
    """
    loop = op.loop
    if loop is None or loop.pieces or loop.ahead or loop.unroll != 1:
        return False
    return all(_is_plain(v) for v in op.outputs[loop.num_carry :])


def _is_plain(value: Value) -> bool:
    keys = jnp.issubdtype(value.aval.dtype, jax.dtypes.extended)
    return not (keys or value.host or is_typed(value))
