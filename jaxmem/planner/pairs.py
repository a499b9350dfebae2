"""Cut the written-out iteration of a scan pair into its forward and backward scan again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxmem.program.ir import Atom, Block, Loop, Op, Value
from jaxmem.program.loops import Pair


def split_pair(block: Block, pair: Pair, joint: Block, cut: int) -> tuple[Op, Op]:
    """Cut the written-out joint iteration of a pair into its two scans again.

    What the late part reads of the early part becomes a stacked result of the forward scan and
    a sliced operand of the backward scan; constants and slices the forward scan was given are
    given to the backward scan too.
    """
    first, second = block.ops[pair.forward], block.ops[pair.backward]
    assert first.loop is not None and second.loop is not None
    early, late = joint.ops[:cut], joint.ops[cut:]
    num_forward = len(first.inputs)
    given = dict(zip(joint.inputs[:num_forward], range(num_forward), strict=True))
    born = {v for op in early for v in op.outputs}
    num_first = first.loop.num_carry + len(pair.escaping)
    first_outputs = joint.outputs[:num_first]
    second_outputs = joint.outputs[num_first:]
    read = dict.fromkeys(v for op in late for v in op.values)
    read.update(dict.fromkeys(v for v in second_outputs if isinstance(v, Value)))
    crossing = [v for v in read if v in born or v in given]
    stacks = _Stacks(first, pair, first_outputs, block.path)
    consts, slices = [], []
    for value in crossing:
        position = given.get(value)
        if position is None or first.loop.num_consts <= position < (
            first.loop.num_consts + first.loop.num_carry
        ):
            slices.append((value, stacks.of(value)))
        elif position < first.loop.num_consts:
            consts.append((value, first.inputs[position]))
        else:
            slices.append((value, first.inputs[position]))
    forward = _scan(
        first,
        first.loop,
        Block(first.loop.body.path, first.loop.body.inputs, early, stacks.body_outputs()),
        first.inputs,
        stacks.outputs(),
        first.loop.num_consts,
    )
    return forward, _backward(second, second.loop, pair, late, second_outputs, consts, slices)


def _backward(
    second: Op,
    loop: Loop,
    pair: Pair,
    late: Sequence[Op],
    outputs: Sequence[Atom],
    consts: Sequence[tuple[Value, Atom]],
    slices: Sequence[tuple[Value, Atom]],
) -> Op:
    own = [(v, second.inputs[p]) for p, v in enumerate(loop.body.inputs) if p not in pair.linked]
    own_consts, carry = own[: loop.num_consts], own[loop.num_consts :][: loop.num_carry]
    own_slices = own[loop.num_consts + loop.num_carry :]
    operands = [*own_consts, *consts, *carry, *own_slices, *slices]
    body = Block(loop.body.path, tuple(v for v, _ in operands), tuple(late), tuple(outputs))
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

    def __init__(self, first: Op, pair: Pair, first_outputs: Sequence[Atom], path: str):
        assert first.loop is not None
        self.num_carry = first.loop.num_carry
        self.first, self.length = first, first.loop.length
        self.prefix = f"{path}/{pair.forward}"
        self.body = list(first_outputs)
        self.outer = [*first.outputs[: self.num_carry], *(first.outputs[k] for k in pair.escaping)]
        self.known: dict[Value, Value] = {
            v: o
            for v, o in zip(self.body[self.num_carry :], self.outer[self.num_carry :], strict=True)
            if isinstance(v, Value)
        }
        self.residuals = {
            v: first.outputs[k]
            for k, v in enumerate(first.loop.body.outputs)
            if k >= self.num_carry and isinstance(v, Value)
        }

    def of(self, value: Value) -> Value:
        """The stacked form of a value of the forward body."""
        stacked = self.known.get(value)
        if stacked is None:
            stacked = self.residuals.get(value)
            if stacked is None:
                aval = value.aval.update(shape=(self.length, *value.aval.shape))
                stacked = Value(aval, f"{self.prefix}.{value.key}", host=value.host)
            self.known[value] = stacked
            self.body.append(value)
            self.outer.append(stacked)
        return stacked

    def body_outputs(self) -> tuple[Atom, ...]:
        return tuple(self.body)

    def outputs(self) -> tuple[Value, ...]:
        return tuple(self.outer)
