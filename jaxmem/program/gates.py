"""Which barrier each operation of a line waits for, through what it reads."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmem.program.ir import Op, Value
from jaxmem.program.primitives import Kind


def gates(ops: Sequence[Op], kinds: Sequence[Kind]) -> list[int]:
    """For each operation the position of the last barrier that what it reads went through.

    -1 for none. Element-wise operations are looked through, what is a kernel of its own is not.
    """
    behind: dict[Value, int] = {}
    found = []
    for index, (op, kind) in enumerate(zip(ops, kinds, strict=True)):
        gate = -1
        if behind:
            for value in op.values:
                gate = max(gate, behind.get(value, -1))
        found.append(gate)
        if op.barrier:
            behind.update(dict.fromkeys(op.outputs, index))
        elif gate >= 0 and kind in (Kind.FUSED, Kind.ALIAS):
            behind.update(dict.fromkeys(op.outputs, gate))
    return found
