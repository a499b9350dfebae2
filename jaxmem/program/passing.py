"""What a reduction need not read, because a kernel that it is part of has read or made it.

XLA:GPU makes one kernel of reductions of the same operand (a mean and a mean of squares, the two
sums of a normalisation's gradient), and one of a reduction and what makes its operand (multi-output
fusion). As written, a ResNet-152 moves 345 GB where each reads for itself, 253 so, and the kernels
that XLA compiles 257.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jaxmem.program.gates import gates
from jaxmem.program.ir import Op, Value
from jaxmem.program.primitives import Kind

# Reductions before one that are looked at: they stand beside each other.
_NEAR = 4
# What has this many elements is written by a kernel of its own: a gradient behind a ReLU that two
# sums read was one kernel with both up to 201 million elements, of 16 bits or of 32, and with none
# from 268 million on.
_TOO_MANY = 2**28


def read_in_passing(
    ops: Sequence[Op],
    kinds: Sequence[Kind],
    roots: Mapping[Value, tuple[Value, ...]],
    made: Sequence[tuple[Value, ...]],
    apart: Collection[Value] = (),
) -> dict[Op, frozenset[Value]]:
    """For reductions, the buffers that a kernel they are part of reads or makes anyway.

    Args:
        ops: a straight line of operations.
        kinds: of each.
        roots: the buffers behind each value.
        made: the buffers that each operation writes.
        apart: of these, what nothing is summed beside: convolutions make it.
    """
    found: dict[Op, frozenset[Value]] = {}
    since: dict[Value, int] = {}
    near: dict[tuple, list[tuple[int, frozenset[Value]]]] = {}
    for index, (op, kind, gate) in enumerate(zip(ops, kinds, gates(ops, kinds), strict=True)):
        if kind is Kind.REDUCE and op.values:
            reads = frozenset([root for v in op.values for root in roots[v]])
            last = max([since.get(root, -1) for root in reads], default=-1)
            shape, size = op.values[0].aval.shape, op.values[0].aval.size
            siblings = near.setdefault((shape, op.eqn.params.get("axes"), gate), [])
            shared = _with_sibling(reads, last, siblings)
            if not shared and last > gate and kinds[last] is Kind.FUSED:
                alike = [v for v in made[last] if v in reads and v.aval.size == size]
                shared = frozenset([v for v in alike if v not in apart])
            if shared:
                found[op] = shared
            siblings.append((index, reads))
            del siblings[:-_NEAR]
        since.update(dict.fromkeys(made[index], index))
    return found


def _with_sibling(
    reads: frozenset[Value], last: int, near: Sequence[tuple[int, frozenset[Value]]]
) -> frozenset[Value]:
    """The most that one sibling reads of ``reads``, of which the last was made at ``last``.

    A reduction before that cannot be part of the same kernel.
    """
    shared = [reads & others for index, others in near if last < index]
    return max(shared, key=lambda some: sum([r.nbytes for r in some]), default=frozenset())


def summed_where_made(
    passed: Mapping[Op, frozenset[Value]],
) -> dict[Op, frozenset[Value]]:
    """Of what :func:`read_in_passing` found, what may be made in the kernel that sums it."""
    return {
        op: frozenset([v for v in buffers if _elements(v) < _TOO_MANY])
        for op, buffers in passed.items()
    }


def _elements(value: Value) -> int:
    """Of what one device has of it."""
    return value.nbytes // value.aval.dtype.itemsize if value.nbytes else 0
