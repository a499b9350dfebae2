"""Argument leaves in host memory that the gradients need: parameters, fetched when they are read.

A moment of an optimizer is read by the update of its own leaf and by nothing else. A parameter is
read all through the forward and the backward pass, and by its update at the end. The two uses are
told apart here: what computes gradients reads another input, which is lent to it, and the update
reads the leaf as any other that waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.program.ir import Op, Program, Value
from jaxmem.program.loops import is_backward
from jaxmem.program.primitives import Kind, inner_jaxprs, kind_of

# A matrix product in the update of a leaf (Muon) decides about the leaf itself, its moments and its
# average; what decides about more than this is no update.
OF_ONE_LEAF = 4
_PRODUCTS = frozenset(
    "dot_general conv_general_dilated ragged_dot_general dot_product_attention_fwd_wrapper "
    "dot_product_attention_bwd_wrapper pallas_call custom_partitioning".split()
)


@dataclass(frozen=True, eq=False)
class Lent:
    """A step whose gradients read inputs of their own.

    Attributes:
        program: the step, with one more input for each leaf that is lent.
        leaves: for each of these inputs the leaf.
    """

    program: Program
    leaves: Mapping[Value, Value]


def lend(program: Program, hosted: Collection[int]) -> Lent:
    """A step in which what computes gradients, or results, reads hosted leaves as lent to it.

    Args:
        program: the step.
        hosted: numbers of the argument leaves that wait in host memory.
    """
    block, consts = program.block, len(program.consts)
    leaves = [block.inputs[consts + n] for n in sorted(hosted)]
    worked, shared = _followed(program)
    replaced = {block.inputs[n] for n in program.places.values()}
    # What no result takes the place of has no update of its own.
    only_read = {v for op in worked for v in op.values if v not in replaced}.intersection(leaves)

    def borrows(op: Op) -> set[Value]:
        return (set(leaves) if op in shared else only_read).intersection(op.values)

    taken = {op: found for op in block.ops if (found := borrows(op))}
    read = set[Value]().union(*taken.values())
    lent = {
        leaf: Value(leaf.aval, f"{leaf.key}.lent", layout=leaf.layout)
        for leaf in leaves
        if leaf in read
    }
    if not lent:
        return Lent(program, {})

    def borrowed(op: Op) -> Op:
        if op not in taken:
            return op
        inputs = [lent[a] if isinstance(a, Value) and a in taken[op] else a for a in op.inputs]
        return Op(op.eqn, inputs, op.outputs, op.loop)

    numbers = {v: n for n, v in enumerate(block.inputs)}
    layouts = program.layouts()
    return Lent(
        replace(
            program,
            block=replace(
                block,
                inputs=(*block.inputs, *lent.values()),
                ops=tuple(map(borrowed, block.ops)),
            ),
            arguments=(
                *program.arguments,
                *(replace(program.arguments[numbers[v] - consts], donated=False) for v in lent),
            ),
            shardings=(*layouts[consts:], *(_on_device(layouts[numbers[v]]) for v in lent)),
        ),
        {new: leaf for leaf, new in lent.items()},
    )


def _on_device(layout: Any) -> Any:
    """The same layout on the device, where it is fetched to; it may have been given on the host."""
    return None if layout is None else layout.with_memory_kind("device")


def _followed(program: Program) -> tuple[set[Op], set[Op]]:
    """The operations that real work follows, and those of them that are no update's own.

    Goes from the last operation to the first, with the results that each value goes into through
    anything, and those that it goes into through work. Results that take the place of no argument
    are one. A scanned net has so few leaves that the number of results says nothing: a loop that
    works on the way to a loss, before anything was transposed, is no update either, nor is one that
    JAX transposed, nor what these need.
    """
    block = program.block
    through_any: dict[Value, int] = {}
    through_work: dict[Value, int] = {}
    for n, atom in enumerate(block.outputs):
        if isinstance(atom, Value):
            bit = 2 << n if n in program.places else 1
            through_any[atom] = through_any.get(atom, 0) | bit
    worked, shared = set[Op](), set[Op]()
    late, of_gradients = _after_transposed(block.ops), set[Value]()
    for op in reversed(block.ops):
        wide = hard = 0
        for v in op.outputs:
            wide |= through_any.get(v, 0)
            hard |= through_work.get(v, 0)
        if _is_work(op):
            hard |= wide
        for v in op.values:
            through_any[v] = through_any.get(v, 0) | wide
            through_work[v] = through_work.get(v, 0) | hard
        if hard:
            worked.add(op)
        looped = op.loop is not None and _is_work(op)
        own = looped and (is_backward(op) or (op not in late and wide & 1))
        if own or not of_gradients.isdisjoint(op.outputs):
            of_gradients.update(op.values)
            shared.add(op)
        if (hard >> 1).bit_count() > OF_ONE_LEAF:
            shared.add(op)
    return worked, shared


def _after_transposed(ops: Sequence[Op]) -> set[Op]:
    """The operations that are, or depend on, what JAX transposed."""
    found, made = set[Op](), set[Value]()
    for op in ops:
        if is_backward(op) or not made.isdisjoint(op.values):
            found.add(op)
            made.update(op.outputs)
    return found


def _is_work(op: Op) -> bool:
    """Whether ``op`` does more than an update does: a branch counts by what is in it."""
    if kind_of(op) is not Kind.OPAQUE:
        return False
    inner = inner_jaxprs(op.eqn)
    return not inner or any(_has_product(jaxpr) for jaxpr in inner)


def _has_product(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _PRODUCTS or any(map(_has_product, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
