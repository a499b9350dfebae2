"""Let stacks of gradients wait in host memory where all of them decide about each update.

Clipping by the global norm needs every gradient before the first leaf may be updated, so no update
goes along with the loop that makes its gradients, and their stack takes as much of the device as
the parameters. But that norm needs each gradient only once, in a sum. So a buffer in host memory,
which the step keeps for itself from call to call, becomes one more leaf, and its update is to be
the stack: row by row in the loop, with that row's part of each sum beside it. What is updated
after the loop reads the buffer in the place of the stack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.program.ir import Atom, Leaf, Op, Program, Value, kind_of_array
from jaxmem.program.loops import goes_by_turns
from jaxmem.program.primitives import Kind, kind_of, may_repeat
from jaxmem.program.waiting import SMALL_BYTES

# Sums over all rows that are sums of sums over one.
_SUMS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())


@dataclass(frozen=True, eq=False)
class Kept:
    """A step with stacks of gradients that wait in host memory.

    Attributes:
        program: the step, with a buffer for each of them as its last arguments and results.
        buffers: the numbers of these arguments.
        later: for what updates read in the place of a stack the result that holds it.
        totals: values that every row of a stack is needed for, and that are small.
    """

    program: Program
    buffers: tuple[int, ...] = ()
    later: Mapping[Value, Value] = field(default_factory=dict)
    totals: frozenset[Value] = frozenset()


def keep(program: Program, hosted: Iterable[Value], fewest_bytes: int) -> Kept:
    """A step of which the stacks that all updates wait for may wait in host memory.

    Args:
        program: the step; what computes its gradients reads none of ``hosted``.
        hosted: its inputs that wait in host memory.
        fewest_bytes: of a stack that is worth a buffer.

    Returns:
        The same program where there is no such stack.
    """
    finder = _Finder(program, set(hosted))
    stacks = [v for v in finder.stacks(fewest_bytes) if finder.is_summed(v)]
    if not stacks:
        return Kept(program)
    return _rewritten(program, stacks, finder.followed(stacks))


@dataclass(frozen=True, eq=False)
class _Followed:
    """Where stacks go.

    Attributes:
        between: what is made of them in rows, before anything that waits.
        sums: what sums all of their rows up.
    """

    between: Sequence[Op]
    sums: Sequence[Op]


class _Finder:
    def __init__(self, program: Program, hosted: set[Value]):
        self.block = program.block
        self.waiting = hosted
        for op in self.block.ops:
            if self.waiting.intersection(op.values):
                self.waiting.update(op.outputs)

    def stacks(self, fewest_bytes: int) -> list[Value]:
        """What loops stack up, of so many bytes, and nothing returns as it is."""
        loops = (op for op in self.block.ops if op.loop is not None and goes_by_turns(op))
        made = [v for op in loops if op.loop for v in op.outputs[op.loop.num_carry :]]
        returned = {v for v in self.block.outputs if isinstance(v, Value)}
        return [
            v
            for v in made
            if v.nbytes >= fewest_bytes
            and v not in self.waiting
            and v not in returned
            and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        ]

    def is_summed(self, stack: Value) -> bool:
        """Whether a stack goes into sums and updates, and into no other work before those."""
        found = self.followed([stack])
        light = all(may_repeat(op) and kind_of(op) is not Kind.OPAQUE for op in found.between)
        return bool(found.sums) and light

    def followed(self, stacks: Sequence[Value]) -> _Followed:
        lengths = {v: v.aval.shape[0] for v in stacks}
        between: list[Op] = []
        sums: list[Op] = []
        for op in self.block.ops:
            read = [lengths[v] for v in op.values if v in lengths]
            if not read or self.waiting.intersection(op.values):
                continue
            if _is_sum(op, read[0]):
                sums.append(op)
            else:
                between.append(op)
                lengths.update(dict.fromkeys(op.outputs, read[0]))
        return _Followed(between, sums)


def _is_sum(op: Op, length: int) -> bool:
    """Whether ``op`` sums all rows up to something small, as are the sums of each row."""
    if op.eqn.primitive.name not in _SUMS or len(op.inputs) != 1:
        return False
    (shape, _), axes = kind_of_array(op.inputs[0]), op.eqn.params["axes"]
    small = length * op.outputs[0].nbytes <= SMALL_BYTES
    return small and 0 in axes and shape[:1] == (length,)


def _rewritten(program: Program, stacks: Sequence[Value], found: _Followed) -> Kept:
    block = program.block
    buffers = {v: Value(v.aval, f"{v.key}.buffer", layout=v.layout) for v in stacks}
    held = {v: Value(v.aval, f"{v.key}.held", layout=v.layout) for v in stacks}
    later = {v: Value(v.aval, f"{v.key}.later", layout=v.layout) for v in stacks}
    summed = _needed([op.inputs[0] for op in found.sums], found.between)
    # What goes into a sum is made of what is held, row by row; all else of what comes back.
    now: dict[Value, Value] = dict(held)
    again: dict[Op, Op] = {}
    for op in found.between:
        if op in summed:
            made = {v: v.like() for v in op.outputs}
            now.update(made)
            again[op] = Op(op.eqn, _each(op.inputs, now), [*made.values()], op.loop)
    sums = set(found.sums)
    ops: list[Op] = []
    for op in block.ops:
        if op in again:
            ops.append(again[op])
        if op in sums:
            ops += _in_two(op, _each(op.inputs, now))
        elif later.keys() & set(op.values):
            ops.append(Op(op.eqn, _each(op.inputs, later), op.outputs, op.loop))
        else:
            ops.append(op)
        for v in op.outputs:
            if v in held:
                ops.append(_held(v, buffers[v], held[v]))
    outputs = (*block.outputs, *held.values())
    ops = _of_use(ops, outputs, set(found.between))
    count, layouts = len(program.arguments), program.layouts()[len(program.consts) :]
    return Kept(
        replace(
            program,
            block=replace(
                block, inputs=(*block.inputs, *buffers.values()), ops=tuple(ops), outputs=outputs
            ),
            arguments=(*program.arguments, *_leaves(len(stacks))),
            results=(*program.results, *_leaves(len(stacks))),
            shardings=(*layouts, *[_on_device(layouts)] * len(stacks)),
        ),
        tuple(range(count, count + len(stacks))),
        {later[v]: held[v] for v in stacks},
        frozenset(v for op in found.sums for v in op.outputs),
    )


def _leaves(count: int) -> list[Leaf]:
    """Arguments, or results, that no path of the caller's can be taken for."""
    return [Leaf(f"[{n}].<gradients kept in host memory>[{n}]", donated=True) for n in range(count)]


def _on_device(layouts: Sequence[Any]) -> Any:
    given = next((layout for layout in layouts if layout is not None), None)
    return None if given is None else given.with_memory_kind("device")


def _each(atoms: Sequence[Atom], now: Mapping[Value, Value]) -> list[Atom]:
    return [now.get(a, a) if isinstance(a, Value) else a for a in atoms]


def _held(stack: Value, buffer: Value, held: Value) -> Op:
    """The stack in the place of the buffer; a choice that is made already copies nothing."""
    types = [jax.ShapeDtypeStruct(stack.aval.shape, stack.aval.dtype)] * 2
    (eqn,) = jax.make_jaxpr(lambda new, old: lax.select_n(False, new, old))(*types).eqns
    return Op(eqn, [eqn.invars[0], stack, buffer], [held])


def _in_two(op: Op, inputs: Sequence[Atom]) -> list[Op]:
    """A sum over all rows as sums over each row, and the sum of those."""
    axes = tuple(n for n in op.eqn.params["axes"] if n != 0)
    whole = op.outputs[0].aval
    rows = Value(whole.update(shape=(kind_of_array(inputs[0])[0][0], *whole.shape)))
    own = op.eqn.replace(params={**op.eqn.params, "axes": axes})
    rest = op.eqn.replace(params={**op.eqn.params, "axes": (0,)})
    return [Op(own, inputs, [rows]), Op(rest, [rows], op.outputs)]


def _needed(wanted: Iterable[Atom], ops: Sequence[Op]) -> set[Op]:
    """Those of the operations that ``wanted`` is made of."""
    values, found = set(wanted), set[Op]()
    for op in reversed(ops):
        if values.intersection(op.outputs):
            found.add(op)
            values.update(op.values)
    return found


def _of_use(ops: Sequence[Op], outputs: Collection[Atom], doubtful: Collection[Op]) -> list[Op]:
    """The operations without those of the doubtful ones that nothing reads any more."""
    made = {v for op in doubtful for v in op.outputs}
    values, found = set(outputs), list[Op]()
    for op in reversed(ops):
        if made.issuperset(op.outputs) and not values.intersection(op.outputs):
            continue
        found.append(op)
        values.update(op.values)
    return found[::-1]
