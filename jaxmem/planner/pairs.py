"""Cut the written-out iteration of a scan pair into its forward and backward scan again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxmem.program.ir import Atom, Block, Loop, Op, Value
from jaxmem.program.loops import Pair
from jaxmem.program.making import in_pieces
from jaxmem.program.sinking import numbers_read


@dataclass(frozen=True, eq=False)
class Halves:
    """The written-out joint iteration of a pair, cut where its late part starts.

    Attributes:
        pair: which pair, of which ``block``.
        first: the forward scan as it was; ``second`` the backward scan.
        early: operations of a forward iteration; ``late`` those of a backward iteration. What makes
            a repeated number may be in both.
        first_outputs: what a forward iteration hands on, then what it stacks for others.
        second_outputs: what a backward iteration hands on, then what it stacks.
        crossing: what the late part reads of the early part or of what that is given.
        given: where among the operands of the forward scan each input of its body stands.
    """

    block: Block
    pair: Pair
    first: Op
    second: Op
    early: tuple[Op, ...]
    late: tuple[Op, ...]
    first_outputs: tuple[Atom, ...]
    second_outputs: tuple[Atom, ...]
    crossing: tuple[Value, ...]
    given: dict[Value, int]

    @classmethod
    def of(cls, block: Block, pair: Pair, joint: Block, cut: int) -> Halves:
        """The halves of a joint iteration whose late part starts at ``cut``."""
        first, second = block.ops[pair.forward], block.ops[pair.backward]
        assert first.loop is not None and second.loop is not None
        early, late = in_pieces(joint.ops[:cut]), in_pieces(joint.ops[cut:])
        num_forward = len(first.inputs)
        given = dict(zip(joint.inputs[:num_forward], range(num_forward), strict=True))
        born = {v for op in early for v in op.outputs}
        num_first = first.loop.num_carry + len(pair.escaping)
        second_outputs = joint.outputs[num_first:]
        read = dict.fromkeys(v for op in late for v in op.values)
        read.update(dict.fromkeys(v for v in second_outputs if isinstance(v, Value)))
        again = numbers_read(early, read)
        late = (*again, *late)
        born -= {v for op in again for v in op.outputs}
        crossing = tuple(v for v in read if v in born or v in given)
        return cls(
            block,
            pair,
            first,
            second,
            early,
            late,
            joint.outputs[:num_first],
            second_outputs,
            crossing,
            given,
        )

    @property
    def loop(self) -> Loop:
        """The forward scan's loop."""
        assert self.first.loop is not None
        return self.first.loop

    @property
    def back(self) -> Loop:
        """The backward scan's loop."""
        assert self.second.loop is not None
        return self.second.loop

    def is_const(self, value: Value) -> bool:
        """Whether ``value`` is the same in all iterations of the forward scan."""
        return self.given.get(value, self.loop.num_consts) < self.loop.num_consts

    def is_slice(self, value: Value) -> bool:
        """Whether ``value`` is a slice of something that the forward scan is given."""
        return self.given.get(value, -1) >= self.loop.num_consts + self.loop.num_carry


def split_pair(halves: Halves) -> tuple[Op, Op]:
    """The two scans of a joint iteration.

    What the late part reads of the early part becomes a stacked result of the forward scan and
    a sliced operand of the backward scan; constants and slices the forward scan was given are
    given to the backward scan too.
    """
    first, loop = halves.first, halves.loop
    stacks = _Stacks(halves)
    consts, slices = [], []
    for value in halves.crossing:
        if halves.is_const(value):
            consts.append((value, first.inputs[halves.given[value]]))
        elif halves.is_slice(value):
            slices.append((value, first.inputs[halves.given[value]]))
        else:
            slices.append((value, stacks.of(value)))
    forward = _scan(
        first,
        loop,
        Block(loop.body.path, loop.body.inputs, halves.early, stacks.body_outputs()),
        first.inputs,
        stacks.outputs(),
        loop.num_consts,
    )
    return forward, _backward(halves, consts, slices)


def _backward(
    halves: Halves,
    consts: Sequence[tuple[Value, Atom]],
    slices: Sequence[tuple[Value, Atom]],
) -> Op:
    second, loop, linked = halves.second, halves.back, halves.pair.linked
    own = [(v, second.inputs[p]) for p, v in enumerate(loop.body.inputs) if p not in linked]
    own_consts, carry = own[: loop.num_consts], own[loop.num_consts :][: loop.num_carry]
    own_slices = own[loop.num_consts + loop.num_carry :]
    operands = [*own_consts, *consts, *carry, *own_slices, *slices]
    inputs = tuple(v for v, _ in operands)
    body = Block(loop.body.path, inputs, halves.late, halves.second_outputs)
    return _scan(
        second,
        loop,
        body,
        tuple(a for _, a in operands),
        second.outputs,
        len(own_consts) + len(consts),
    )


def _scan(
    op: Op, loop: Loop, body: Block, inputs: Sequence[Atom], outputs: Sequence[Value], consts: int
) -> Op:
    changed = replace(loop, body=body, num_consts=consts, rewritten=True)
    return Op(op.eqn, tuple(inputs), tuple(outputs), changed, origin=op.origin)


class _Stacks:
    """The stacked results of a forward scan: those others read, and those the plan keeps."""

    def __init__(self, halves: Halves):
        first, pair, loop = halves.first, halves.pair, halves.loop
        self.num_carry = loop.num_carry
        self.length = loop.length
        self.prefix = f"{halves.block.path}/{pair.forward}"
        self.body = list(halves.first_outputs)
        self.outer = [*first.outputs[: self.num_carry], *(first.outputs[k] for k in pair.escaping)]
        self.known: dict[Value, Value] = {
            v: o
            for v, o in zip(self.body[self.num_carry :], self.outer[self.num_carry :], strict=True)
            if isinstance(v, Value)
        }
        self.residuals = {
            v: first.outputs[k]
            for k, v in enumerate(loop.body.outputs)
            if k >= self.num_carry and isinstance(v, Value)
        }

    def of(self, value: Value) -> Value:
        """The stacked form of a value of the forward body."""
        stack = self.known.get(value)
        if stack is None:
            stack = self.residuals.get(value)
            if stack is None:
                stack = value.stack(self.length, f"{self.prefix}.{value.key}")
            self.known[value] = stack
            self.body.append(value)
            self.outer.append(stack)
        return stack

    def body_outputs(self) -> tuple[Atom, ...]:
        return tuple(self.body)

    def outputs(self) -> tuple[Value, ...]:
        return tuple(self.outer)
