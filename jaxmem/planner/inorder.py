"""Make what a backward iteration only hands out before the iteration needs the most bytes.

The gradient of a layer's weights is read by nothing else in the iteration, so XLA:GPU makes it when
it likes: in a scanned transformer after the attention's gradient, and keeps the two activations
that it is made of until then. A simulation makes it where it is written. Where putting it off
would take more than the iteration takes at most, it is tied, behind a barrier, to what the next
kernel reads; where there is room it is not, as kernels before and after a barrier are not one.

Only kernels of their own are tied, products and convolutions as a rule: not the sums that are the
gradients of biases and scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxmem.planner.simulate import Simulator
from jaxmem.program.fusion import Fusion
from jaxmem.program.ir import Atom, Block, Op, Value, has_transfers
from jaxmem.program.primitives import Kind

# Whose barriers these are; nothing is computed again behind them.
TAG = "jaxmem.inorder"


def in_order(scan: Op, simulator: Simulator) -> Op:
    """``scan`` with barriers in its body, where putting off what is handed out takes more bytes.

    One that copies to or from host memory stays as it is: copies run beside other work, which
    would wait for them behind a barrier.
    """
    loop = scan.loop
    assert loop is not None
    if has_transfers(loop.body):
        return scan
    iteration = simulator.iteration(loop)
    line = _Line.of(loop.body, iteration.fusion)
    ties = list(_ties(line, iteration.timeline))
    if not ties:
        return scan
    tied = replace(loop, body=_tied(line, ties), rewritten=True)
    if simulator.iteration(tied).temp_bytes > iteration.temp_bytes:
        return scan
    return scan.with_loop(tied)


def pieces_in_order(scan: Op, simulator: Simulator) -> Op:
    """A backward scan in segments as :func:`in_order` has it; what is made again stays as it is."""

    def inside(op: Op) -> Op:
        loop = op.loop
        if loop is None or op.recompute:
            return op
        if any(inner.loop is not None for inner in loop.body.ops):
            body = replace(loop.body, ops=tuple(map(inside, loop.body.ops)))
            return op.with_loop(replace(loop, body=body))
        return in_order(op, simulator)

    loop = scan.loop
    assert loop is not None and loop.pieces is not None
    pieces = replace(loop.pieces, ops=tuple(map(inside, loop.pieces.ops)))
    return scan.with_loop(replace(loop, pieces=pieces))


def is_tied(block: Block) -> bool:
    """Whether a loop in ``block`` has ties in its iterations."""
    bodies = [op.loop.body for op in block.ops if op.loop is not None]
    here = any(op.recompute == TAG for body in bodies for op in body.ops)
    return here or any(map(is_tied, bodies))


@dataclass(frozen=True)
class _Line:
    """A body, and what of it no other kernel needs.

    Attributes:
        body: the body.
        kinds: of its operations.
        born: the buffers that are made in it.
        kernels: the kernels that can be put off, with the buffers that they read.
        handed_out: these kernels, and what is computed of their results.
        last: where each buffer is read last by what cannot be put off.
        readers: where each value is read.
        stays: buffers that are there to the end.
    """

    body: Block
    kinds: tuple[Kind, ...]
    born: Collection[Value]
    kernels: Mapping[int, Collection[Value]]
    handed_out: frozenset[int]
    last: Mapping[Value, int]
    readers: Mapping[Value, Sequence[int]]
    stays: Collection[Value]

    @classmethod
    def of(cls, body: Block, fusion: Fusion) -> _Line:
        """What is known of ``body``."""
        roots = fusion.roots
        off = _kernels(body, fusion.kinds)
        handed_out, made = set(off), {v for index in off for v in body.ops[index].outputs}
        readers: dict[Value, list[int]] = {}
        last: dict[Value, int] = {}
        for index, op in enumerate(body.ops):
            for value in op.values:
                readers.setdefault(value, []).append(index)
            if index not in off and not made.isdisjoint(op.values):
                handed_out.add(index)
                made.update(op.outputs)
            elif index not in off:
                last.update({root: index for v in op.values for root in roots[v]})
        read = {i: {root for v in body.ops[i].values for root in roots[v]} for i in off}
        returned = (v for v in body.outputs if isinstance(v, Value))
        stays = {*body.inputs, *(root for v in returned for root in roots[v])}
        born = {v for made in fusion.made for v in made}
        return cls(body, fusion.kinds, born, read, frozenset(handed_out), last, readers, stays)

    def more_bytes(self, waiting: Sequence[int], index: int) -> int:
        """What is there at ``index`` if kernels that are ``waiting`` have not run yet."""
        read = {root for kernel in waiting for root in self.kernels[kernel]}
        kept = [r for r in read if r not in self.stays and self.last.get(r, -1) < index]
        unmade = [v for kernel in waiting for v in self.body.ops[kernel].outputs if v in self.born]
        return sum([v.nbytes for v in kept]) - sum([v.nbytes for v in unmade])

    def end(self, value: Value, place: int) -> Value:
        """What is made of ``value`` before ``place`` in its place, and read from there on."""
        while value not in self.body.outputs:
            readers = self.readers.get(value, ())
            if len(readers) != 1 or readers[0] >= place:
                break
            (index,) = readers
            results = self.body.ops[index].outputs
            small = len(results) == 1 and results[0].nbytes <= value.nbytes
            if not small or self.kinds[index] not in (Kind.FUSED, Kind.ALIAS):
                break
            (value,) = results
        return value


def _kernels(body: Block, kinds: Sequence[Kind]) -> set[int]:
    """The kernels of which no other needs a result."""
    needed: set[Value] = set()
    found: set[int] = set()
    for index in range(len(body.ops) - 1, -1, -1):
        op = body.ops[index]
        wanted = not needed.isdisjoint(op.outputs)
        if kinds[index] is Kind.OPAQUE and not wanted and _may_wait(op):
            found.add(index)
        if wanted or kinds[index] is Kind.OPAQUE:
            needed.update(op.values)
    return found


def _may_wait(op: Op) -> bool:
    plain = op.loop is None and not op.eqn.effects and not op.barrier
    return plain and bool(op.outputs) and all(v.nbytes for v in op.outputs)


@dataclass(frozen=True)
class _Tie:
    """Before the operation at ``place``, ``value`` that it reads waits for ``kernels``."""

    place: int
    value: Value
    kernels: Sequence[int]


def _ties(line: _Line, timeline: Sequence[int]) -> Iterator[_Tie]:
    """The ties that keep ``line`` within the most bytes of ``timeline``, as late as they may be."""
    most = max(timeline, default=0)
    waiting: list[int] = []
    tie: _Tie | None = None
    for index, op in enumerate(line.body.ops):
        if index in line.handed_out:
            waiting += [index] if index in line.kernels else []
            continue
        if waiting and line.kinds[index] is Kind.OPAQUE:
            read = [v for v in op.values if v in line.born]
            if read:
                tie = _Tie(index, max(read, key=lambda v: v.nbytes), tuple(waiting))
        if tie is not None and timeline[index] + line.more_bytes(waiting, index) > most:
            yield tie
            waiting = waiting[len(tie.kernels) :]
            tie = None


def _tied(line: _Line, ties: Sequence[_Tie]) -> Block:
    """The body with barriers. What is computed of what is tied is computed behind them."""
    body = line.body
    at = {tie.place: tie for tie in ties}
    late: dict[Value, Value] = {}
    behind: dict[int, list[int]] = {}
    tied: dict[int, list[Value]] = {}
    moved: set[int] = set()
    for tie in ties:
        results = [v for kernel in tie.kernels for v in body.ops[kernel].outputs]
        ends = dict.fromkeys(line.end(v, tie.place) for v in results)
        tied[tie.place] = [v for v in ends if v in body.outputs or line.readers.get(v)]
        marks = set(tied[tie.place])
        behind[tie.place] = []
        for index in range(tie.place):
            if index in line.handed_out - moved and not marks.isdisjoint(body.ops[index].values):
                behind[tie.place].append(index)
                marks.update(body.ops[index].outputs)
        moved.update(behind[tie.place])

    def now(atom: Atom) -> Atom:
        return late.get(atom, atom) if isinstance(atom, Value) else atom

    def read_late(op: Op) -> Op:
        if late.keys().isdisjoint(op.values):
            return op
        inputs = [now(atom) for atom in op.inputs]
        return Op(op.eqn, inputs, op.outputs, op.loop, op.recompute, op.barrier, op.origin)

    ops: list[Op] = []
    for index, op in enumerate(body.ops):
        if tie := at.get(index):
            held = [tie.value, *tied[index]]
            results = [v.like() for v in held]
            ops.append(Op(op.eqn, [now(v) for v in held], results, None, TAG, barrier=True))
            late.update(zip(held, results, strict=True))
            ops += [read_late(body.ops[n]) for n in behind[index]]
        if index not in moved:
            ops.append(read_late(op))
    return Block(body.path, body.inputs, tuple(ops), tuple(map(now, body.outputs)))
