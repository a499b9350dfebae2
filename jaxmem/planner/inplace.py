"""When buffers of a line die, and which results are written over them in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jaxmem.program.fusion import Fusion
from jaxmem.program.ir import Atom, Block, Loop, Op, Value
from jaxmem.program.primitives import Kind

# Operations XLA runs in place when the operand they update is not needed any more.
IN_PLACE = frozenset(
    [
        "dynamic_update_slice",
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter_mul",
        "scatter_min",
        "scatter_max",
        "add_any",
        "while",
        "scan",
    ]
)


@dataclass
class Kernel:
    """What is written in the place of one operation.

    Attributes:
        maker: the operation that makes the first of it.
        born: the buffers.
        in_order: whether all of it is written in the order in which operands are read.
    """

    maker: int
    born: list[Value] = field(default_factory=list)
    in_order: bool = True


def kernels_of(fusion: Fusion, kept_out: set[Value]) -> dict[int, Kernel]:
    """By position what is written there, of temporaries that are not there from the beginning."""
    kernels: dict[int, Kernel] = {}
    for index, (made, at) in enumerate(zip(fusion.made, fusion.at, strict=True)):
        if born := [v for v in made if v not in kept_out and v not in fusion.early]:
            kernel = kernels.setdefault(at, Kernel(index))
            kernel.born += born
            if kernel.maker != index and fusion.spared[index]:
                kernel.in_order = False
    return kernels


def ends_of(ops: Sequence[Op], fusion: Fusion, outputs: Sequence[Atom]) -> dict[Value, int]:
    """The last operation at which each buffer that ``ops`` make is live."""
    roots = fusion.roots
    ends: dict[Value, int] = {}
    for op, kind, made, at in zip(ops, fusion.kinds, fusion.made, fusion.at, strict=True):
        for value in made:
            ends[value] = at
        if made or kind is Kind.OPAQUE or op.barrier:
            for value in op.values:
                for root in roots[value]:
                    if root in ends:
                        ends[root] = max(ends[root], at)
    returned = [root for v in outputs if isinstance(v, Value) for root in roots[v]]
    ends.update({root: len(ops) - 1 for root in returned if root in ends})
    return ends


def dying_at(ends: Mapping[Value, int], kept_out: Collection[Value]) -> dict[int, list[Value]]:
    """The buffers that die at each operation, by their ``ends``; none of those ``kept_out``."""
    dying: dict[int, list[Value]] = {}
    for value, end in ends.items():
        if value not in kept_out:
            dying.setdefault(end, []).append(value)
    return dying


def last_read(block: Block, fusion: Fusion, inputs: Sequence[Value]) -> dict[Value, int]:
    """The last operation that reads each input; not of those that are results as they are."""
    kept = {root for v in block.outputs if isinstance(v, Value) for root in fusion.roots[v]}
    found = {v: 0 for v in inputs if v not in kept}
    for index, (op, kind, made) in enumerate(
        zip(block.ops, fusion.kinds, fusion.made, strict=True)
    ):
        if made or kind is Kind.OPAQUE or op.barrier:
            roots = (root for v in op.values for root in fusion.roots[v])
            found.update((root, index) for root in roots if root in found)
    return found


def written_over(
    op: Op, kind: Kind, born: Sequence[Value], dying: Sequence[Value], spared: Sequence[Value]
) -> dict[Value, Value]:
    """The operands that die here, each with the result of the same size that is written over it."""
    if kind is not Kind.FUSED and op.name not in IN_PLACE:
        return {}
    free = [v for v in dying if v not in born and v not in spared]
    over = {}
    for result in born:
        operand = next((v for v in free if v.nbytes == result.nbytes), None)
        if operand is not None:
            free.remove(operand)
            over[operand] = result
    return over


def carried_on(loop: Loop) -> set[Value]:
    """What a loop carries that a loop inside it carries on: it stays in one place all the time.

    Where nothing else reads what the inner one began with, nor the inner one a second time: XLA
    copies it for those.
    """
    body = loop.body
    carries = body.inputs[loop.num_consts :][: loop.num_carry]
    into = dict(zip(carries, body.outputs, strict=False))
    read = Counter(atom for op in body.ops for atom in op.inputs if isinstance(atom, Value))
    found: set[Value] = set()
    for op in body.ops:
        if op.loop is None:
            continue
        begun = op.inputs[op.loop.num_consts :][: op.loop.num_carry]
        for given, result in zip(begun, op.outputs, strict=False):
            if isinstance(given, Value) and into.get(given) is result and read[given] == 1:
                found.add(result)
    return found
