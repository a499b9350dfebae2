"""Forward and backward scans that belong together, as one nested program.

A scan differentiated by JAX is a forward scan with stacked residual outputs and a backward scan
that reads them, slice by slice, at the same index. Joined, one iteration of both is a straight
line in which a residual is an ordinary value; what crosses from the first part to the second is
stacked ``length`` times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.program.ir import Atom, Block, Loop, Op, Value

# Loops of fewer turns are left as they are: too short to do anything a turn ahead.
_SHORTEST = 3


@dataclass(frozen=True, eq=False)
class Pair:
    """A forward scan and the backward scan that reads its residuals.

    Attributes:
        forward: position of the forward scan in its block; ``backward`` likewise.
        joint: one iteration of both; its inputs are the forward body's, then the backward body's
            that are not residuals.
        cut: position in ``joint.ops`` where the backward body starts.
        linked: positions among the backward scan's operands that are residuals.
        escaping: positions among the forward scan's results that something else reads too.
    """

    forward: int
    backward: int
    joint: Block
    cut: int
    linked: frozenset[int]
    escaping: tuple[int, ...]

    @property
    def scans(self) -> tuple[int, int]:
        """The positions of both."""
        return self.forward, self.backward


@dataclass(frozen=True, eq=False)
class Nest:
    """A block with the loops in it: scan pairs as joint programs, other scans by their body.

    Attributes:
        block: the straight line of operations.
        cut: for the joint program of a pair where its backward part starts, else ``None``.
        pairs: scan pairs, each with the nest of its joint program.
        loops: positions of the scans that are in no pair, each with the nest of its body.
    """

    block: Block
    cut: int | None
    pairs: tuple[tuple[Pair, Nest], ...]
    loops: tuple[tuple[int, Nest], ...]

    def walk(self) -> Iterator[Nest]:
        """This nest and every one inside it."""
        yield self
        for _, inner in (*self.pairs, *self.loops):
            yield from inner.walk()


def unrolled(outer: Nest) -> dict[str, int]:
    """The paths of the blocks inside loops that run several iterations at once, and how many."""
    found: dict[str, int] = {}
    pairs = [(outer.block.ops[i].loop, inner) for p, inner in outer.pairs for i in p.scans]
    for loop, inner in (*pairs, *((outer.block.ops[n].loop, inner) for n, inner in outer.loops)):
        found |= unrolled(inner)
        if loop is not None and loop.unroll > 1:
            found |= {each.block.path: loop.unroll for each in inner.walk()}
    return found


def nest(block: Block, cut: int | None = None) -> Nest:
    """Find the scan pairs of ``block`` and, inside them, theirs."""
    pairs = tuple(_pairs(block, cut))
    paired = {index for pair in pairs for index in pair.scans}
    loops = tuple(
        (index, nest(op.loop.body))
        for index, op in enumerate(block.ops)
        if op.loop is not None and index not in paired
    )
    return Nest(block, cut, tuple((pair, nest(pair.joint, pair.cut)) for pair in pairs), loops)


def is_backward(op: Op) -> bool:
    """Whether JAX's transposition made ``op``: the backward pass of some derivative."""
    return "transpose(" in _compat.name_stack_of(op.eqn)


def is_written_out(loop: Loop) -> bool:
    """Whether nothing is left of a loop when it is compiled, as it has one turn."""
    return loop.length // max(loop.unroll, 1) < 2


def goes_by_turns(op: Op) -> bool:
    """Whether ``op`` is a loop as ``lax.scan`` runs it, so that more can be done in each turn."""
    loop = op.loop
    if loop is None or loop.step or loop.filled or loop.pieces or loop.unroll != 1:
        return False
    keys = any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in op.outputs)
    return loop.length >= _SHORTEST and not keys


def _pairs(block: Block, cut: int | None) -> Iterator[Pair]:
    made: dict[Value, int] = {}
    readers: dict[Value, set[int]] = {}
    for index, op in enumerate(block.ops):
        for value in op.outputs:
            made[value] = index
        for value in op.values:
            readers.setdefault(value, set()).add(index)
    returned = {v for v in block.outputs if isinstance(v, Value)}
    taken: set[int] = set()
    for index, op in enumerate(block.ops):
        late = is_backward(op) if cut is None else index >= cut
        if op.loop is None or not late:
            continue
        forward = _forward_of(block, index, made, cut, taken)
        if forward is not None:
            taken.update((forward, index))
            yield _joined(block, forward, index, readers, returned)


def _residuals(forward: Op, backward: Op) -> dict[int, int]:
    """Stacked results of ``forward`` that ``backward`` slices: operand position by result."""
    assert forward.loop is not None and backward.loop is not None
    first = backward.loop.num_consts + backward.loop.num_carry
    stacked = {v: k for k, v in enumerate(forward.outputs) if k >= forward.loop.num_carry}
    return {
        position: stacked[value]
        for position, value in enumerate(backward.inputs)
        if position >= first and isinstance(value, Value) and value in stacked
    }


def _forward_of(
    block: Block, backward: int, made: dict[Value, int], cut: int | None, taken: set[int]
) -> int | None:
    """The forward scan from which the scan at ``backward`` reads the most residual bytes."""
    op = block.ops[backward]
    best, best_bytes = None, 0
    for candidate in {made[v] for v in op.values if v in made}:
        other = block.ops[candidate]
        early = not is_backward(other) if cut is None else candidate < cut
        if other.loop is None or op.loop is None or not early or candidate in taken:
            continue
        if other.loop.length != op.loop.length:
            continue
        read = [op.inputs[p] for p in _residuals(other, op)]
        nbytes = sum(v.nbytes for v in read if isinstance(v, Value))
        if nbytes > best_bytes or (nbytes == best_bytes and best is not None and candidate < best):
            best, best_bytes = candidate, nbytes
    return best


def _joined(
    block: Block,
    forward: int,
    backward: int,
    readers: dict[Value, set[int]],
    returned: set[Value],
) -> Pair:
    first, second = block.ops[forward], block.ops[backward]
    assert first.loop is not None and second.loop is not None
    linked = _residuals(first, second)
    body, back = first.loop.body, second.loop.body
    given: dict[Value, Atom] = {
        back.inputs[position]: body.outputs[result] for position, result in linked.items()
    }
    escaping = tuple(
        k
        for k, value in enumerate(first.outputs)
        if k >= first.loop.num_carry
        and (
            readers.get(value, set()) - {backward}
            or value in returned
            or any(v is value for v in second.inputs[: _sliced_from(second.loop)])
        )
    )
    joint = Block(
        path=f"{block.path}/{forward}+{backward}" if block.path else f"{forward}+{backward}",
        inputs=(
            *body.inputs,
            *(v for p, v in enumerate(back.inputs) if p not in linked),
        ),
        ops=(*body.ops, *(_substituted(op, given) for op in back.ops)),
        outputs=(
            *body.outputs[: first.loop.num_carry],
            *(body.outputs[k] for k in escaping),
            *(given.get(v, v) if isinstance(v, Value) else v for v in back.outputs),
        ),
    )
    return Pair(forward, backward, joint, len(body.ops), frozenset(linked), escaping)


def _sliced_from(loop: Loop) -> int:
    return loop.num_consts + loop.num_carry


def _substituted(op: Op, given: dict[Value, Atom]) -> Op:
    if not any(v in given for v in op.values):
        return op
    inputs = tuple(given.get(v, v) if isinstance(v, Value) else v for v in op.inputs)
    return Op(op.eqn, inputs, op.outputs, op.loop, origin=op.origin)
