"""Run the forward scan of a pair again, segment by segment, while its backward scan runs.

The forward scan keeps only what is carried at the start of each of ``count`` segments. The
backward scan goes through the segments from the last to the first: it runs the segment's forward
iterations again, stacking what the plan keeps across each iteration, then the segment's backward
iterations. For ``length`` iterations that is ``count`` carries and ``length / count`` iterations
of residuals instead of ``length``, for one more forward pass (Chen et al. 2016); the same again
inside each segment is one more forward pass for each level (Griewank & Walther 2000).

Nothing is reshaped: every loop reads rows of the whole arrays that the user's scan was given, and
writes rows of the whole arrays it returns, at an index that is handed on. So a count need not
divide the length: the iterations that are left over are a piece of their own after the last
segment, and no weight is copied to cut them off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxmem.planner.pairs import Halves
from jaxmem.program.ir import Atom, Block, Loop, Op, Value
from jaxmem.program.making import empty, index_number, index_value


def split_in_segments(halves: Halves, counts: Sequence[int]) -> tuple[Op, Op]:
    """The two scans of a pair, to be run in segments.

    Both are single operations until the line they are in is written out; then their pieces take
    their place.
    """
    first, loop = halves.first, halves.loop
    ahead = _ahead(halves)
    again = _again(halves, ahead.index)
    line: list[Op] = []
    state = ahead.start(line, loop.length - 1 if loop.reverse else 0)
    size, rest = divmod(loop.length, counts[0])
    state, starts = _run_segments(ahead, line, counts[0], size, state, again.state)
    ends: list[Value] = []
    if rest:
        saved = dict(zip(ahead.state, state, strict=True))
        ends = [saved[v] for v in again.state]  # pyright: ignore[reportAssignmentType]
        state, _ = _run(ahead, line, rest, state)
    kept = [*starts, *ends]
    inputs = (*ahead.constants, *ahead.carry)
    pieces = Block(loop.body.path, inputs, tuple(line), (*state[1:], *kept))
    outer = [
        Value(v.aval, f"{halves.pair.joint.path}.start{n}", layout=v.layout)
        for n, v in enumerate(kept)
    ]
    escaping = [first.outputs[k] for k in halves.pair.escaping]
    results = [*first.outputs[: loop.num_carry], *escaping, *outer]
    forward = _in_pieces(first, [*ahead.operands, *_carried(first)], results, pieces)
    return forward, _backward(halves, again, counts, outer)


def _backward(halves: Halves, again: _Half, counts: Sequence[int], kept: Sequence[Value]) -> Op:
    second, loop = halves.second, halves.back
    stacked = [v for v in halves.crossing if not (halves.is_const(v) or halves.is_slice(v))]
    back = _back(halves, again)
    line: list[Op] = []
    given = [v.like() for v in kept]
    starts, ends = given[: len(again.state)], given[len(again.state) :]
    state = back.start(line, 0 if halves.loop.reverse else loop.length - 1)
    place = halves.pair.joint.path.replace("/", "_")
    passes = _Passes(again, back, stacked, f"jaxmem.recompute.{place}.segments")
    state = passes.back_through(line, loop.length, counts, starts, ends, state)
    inputs = (*back.constants, *back.carry, *given)
    pieces = Block(loop.body.path, inputs, tuple(line), tuple(state[1:]))
    operands = [*back.operands, *_carried(second), *kept]
    return _in_pieces(second, operands, second.outputs, pieces)


def _carried(op: Op) -> Sequence[Atom]:
    assert op.loop is not None
    return op.inputs[op.loop.num_consts :][: op.loop.num_carry]


def _in_pieces(op: Op, inputs: Sequence[Atom], outputs: Sequence[Value], pieces: Block) -> Op:
    assert op.loop is not None
    loop = replace(op.loop, pieces=pieces, rewritten=True)
    return Op(op.eqn, tuple(inputs), tuple(outputs), loop, origin=op.origin)


@dataclass(frozen=True, eq=False)
class _Half:
    """The iterations of one scan, to be run a few at a time.

    Attributes:
        op: the scan.
        constants: what every iteration is given: constants, and whole arrays to take rows of.
        operands: what stands for them outside.
        rows: the row of an iteration, and the array it is taken of.
        index: which row; it goes ``down`` or up.
        carry: what an iteration is handed.
        buffers: stacked results so far.
        ops: what an iteration does.
        handed: what it hands on, one for each of ``carry``.
        written: what it writes into each of ``buffers``.
        tag: name of the recomputation, "" for the user's own iterations.
    """

    op: Op
    constants: tuple[Value, ...]
    operands: tuple[Atom, ...]
    rows: tuple[tuple[Value, Value], ...]
    index: Value
    down: bool
    carry: tuple[Value, ...]
    buffers: tuple[Value, ...]
    ops: tuple[Op, ...]
    handed: tuple[Atom, ...]
    written: tuple[Atom, ...]
    tag: str = ""

    @property
    def path(self) -> str:
        """Where the scan is."""
        assert self.op.loop is not None
        return self.op.loop.body.path

    def loop(self, body: Block, length: int, *, reverse: bool) -> Loop:
        """A loop that hands this state on."""
        num_consts, num_carry = len(self.constants), len(self.state)
        filled = len(self.buffers)
        return Loop(body, num_consts, num_carry, length, reverse, 1, rewritten=True, filled=filled)

    @property
    def state(self) -> tuple[Value, ...]:
        """What goes from iteration to iteration."""
        return (self.index, *self.carry, *self.buffers)

    def start(self, line: list[Op], index: int) -> list[Atom]:
        """The state before the first iteration, the carry as it is given."""
        arrays = [v.like() for v in self.buffers]
        line.extend(empty(array, self.op.eqn) for array in arrays)
        return [index_number(index), *self.carry, *arrays]

    def tagged(self, tag: str) -> _Half:
        """The same iterations, named as a recomputation."""
        return replace(self, ops=_tagged(self.ops, tag), tag=tag)


def _ahead(halves: Halves) -> _Half:
    """The forward scan as it runs first: all it hands on, and the results others read."""
    first, loop = halves.first, halves.loop
    num_carry = loop.num_carry
    ops, read = _needed(halves.early, halves.first_outputs)
    return _Half(
        **_given(halves, read),
        index=index_value(),
        carry=loop.body.inputs[loop.num_consts :][:num_carry],
        buffers=tuple(first.outputs[k].like() for k in halves.pair.escaping),
        ops=ops,
        handed=halves.first_outputs[:num_carry],
        written=halves.first_outputs[num_carry:],
    )


def _again(halves: Halves, index: Value) -> _Half:
    """The forward scan as it runs again: only what the backward iterations read in the end."""
    loop = halves.loop
    carry = loop.body.inputs[loop.num_consts :][: loop.num_carry]
    handed = halves.first_outputs[: loop.num_carry]
    ops, read = _needed(halves.early, halves.crossing, carry, handed)
    live = [k for k, v in enumerate(carry) if v in read]
    return _Half(
        **_given(halves, read),
        index=index,
        carry=tuple(carry[k] for k in live),
        buffers=(),
        ops=ops,
        handed=tuple(handed[k] for k in live),
        written=(),
    )


def _given(halves: Halves, read: set[Value]) -> dict:
    """What forward iterations are given, of which ``read`` is read."""
    first, formals = halves.first, halves.loop.body.inputs
    consts = [v for v in formals if v in read and halves.is_const(v)]
    sliced = [v for v in formals if v in read and halves.is_slice(v)]
    wholes = [_whole_of(v, halves.loop.length) for v in sliced]
    return {
        "op": first,
        "constants": (*consts, *wholes),
        "operands": tuple(first.inputs[halves.given[v]] for v in (*consts, *sliced)),
        "rows": tuple(zip(sliced, wholes, strict=True)),
        "down": halves.loop.reverse,
    }


def _back(halves: Halves, again: _Half) -> _Half:
    """The backward scan; it is given what ``again`` is given too."""
    second, loop = halves.second, halves.back
    own = [(v, p) for p, v in enumerate(loop.body.inputs) if p not in halves.pair.linked]
    consts, carry = own[: loop.num_consts], own[loop.num_consts :][: loop.num_carry]
    sliced = own[loop.num_consts + loop.num_carry :]
    wholes = [_whole_of(v, loop.length) for v, _ in sliced]
    operands = [second.inputs[p] for _, p in (*consts, *sliced)]
    crossing = [(row, whole) for row, whole in again.rows if row in halves.crossing]
    return _Half(
        op=second,
        constants=(*(v for v, _ in consts), *wholes, *again.constants),
        operands=(*operands, *again.operands),
        rows=(*zip([v for v, _ in sliced], wholes, strict=True), *crossing),
        index=index_value(),
        down=loop.reverse,
        carry=tuple(v for v, _ in carry),
        buffers=tuple(v.like() for v in second.outputs[loop.num_carry :]),
        ops=halves.late,
        handed=halves.second_outputs[: loop.num_carry],
        written=halves.second_outputs[loop.num_carry :],
    )


def _whole_of(row: Value, length: int) -> Value:
    return row.stack(length)


def _needed(
    ops: Sequence[Op],
    wanted: Iterable[Atom],
    carry: Sequence[Value] = (),
    handed: Sequence[Atom] = (),
) -> tuple[tuple[Op, ...], set[Value]]:
    """The operations that make ``wanted``, in this or in a later iteration, and all they read."""
    read = {v for v in wanted if isinstance(v, Value)}
    while True:
        kept = []
        for op in reversed(ops):
            if not read.isdisjoint(op.outputs):
                kept.append(op)
                read.update(op.values)
        passed = zip(carry, handed, strict=True)
        more = {new for old, new in passed if old in read and isinstance(new, Value)}
        if more <= read:
            return tuple(reversed(kept)), read
        read |= more


def _tagged(ops: Iterable[Op], tag: str) -> tuple[Op, ...]:
    """``ops``, and those of the loops among them, named as a recomputation."""
    named = []
    for op in ops:
        loop = op.loop
        if loop is not None:
            body = replace(loop.body, ops=_tagged(loop.body.ops, tag))
            loop = replace(loop, body=body, rewritten=True)
        named.append(Op(op.eqn, op.inputs, op.outputs, loop, tag, op.barrier, op.origin))
    return tuple(named)


@dataclass(frozen=True, eq=False)
class _Passes:
    """The passes forward and backward of which a segmented backward scan is made.

    Attributes:
        again: the forward iterations; ``back`` the backward ones.
        stacked: what an iteration of ``again`` keeps for its iteration of ``back``.
        tag: how the names of these recomputations start.
    """

    again: _Half
    back: _Half
    stacked: Sequence[Value]
    tag: str

    def there_and_back(
        self, line: list[Op], length: int, counts: Sequence[int], state: Sequence[Atom], depth: int
    ) -> list[Atom]:
        """``length`` iterations forward from what ``again`` is handed, and all the way back."""
        again = self.again.tagged(f"{self.tag}{depth}")
        if not counts:
            _, stacks = _run(again, line, length, again.state, stacked=self.stacked)
            return self._back(line, length, state, stacks)
        size = length // counts[0]
        ends, starts = _run_segments(again, line, counts[0], size, again.state, again.state)
        return self.back_through(line, length, counts, starts, ends, state, depth)

    def back_through(
        self,
        line: list[Op],
        length: int,
        counts: Sequence[int],
        starts: Sequence[Value],
        ends: Sequence[Atom],
        state: Sequence[Atom],
        depth: int = 0,
    ) -> list[Atom]:
        """Back through all segments, and first through what is left over after the last."""
        size, rest = divmod(length, counts[0])
        if rest:
            again = self.again.tagged(f"{self.tag}{depth}.rest")
            _, stacks = _run(again, line, rest, ends, stacked=self.stacked)
            state = self._back(line, rest, state, stacks)
        back = self.back
        inner: list[Op] = []
        handed = self.there_and_back(inner, size, counts[1:], back.state, depth + 1)
        inputs = (*back.constants, *back.state, *self.again.state)
        body = Block(back.path, inputs, tuple(inner), tuple(handed))
        loop = back.loop(body, counts[0], reverse=True)
        operands = (*back.constants, *state, *starts)
        results = [v.like() for v in back.state]
        line.append(Op(back.op.eqn, operands, results, loop, origin=back.op))
        return [*results]

    def _back(
        self, line: list[Op], length: int, state: Sequence[Atom], stacks: Sequence[Value]
    ) -> list[Atom]:
        return _run(self.back, line, length, state, slices=(self.stacked, stacks))[0]


def _run_segments(
    half: _Half,
    line: list[Op],
    count: int,
    size: int,
    state: Sequence[Atom],
    kept: Sequence[Value],
) -> tuple[list[Atom], list[Value]]:
    """``count`` times ``size`` iterations: the state after them, and ``kept`` before each time."""
    inner: list[Op] = []
    handed, _ = _run(half, inner, size, half.state)
    inputs = (*half.constants, *half.state)
    body = Block(half.path, inputs, tuple(inner), (*handed, *kept))
    loop = half.loop(body, count, reverse=False)
    results = [v.like() for v in half.state]
    starts = [_whole_of(v, count) for v in kept]
    operands = (*half.constants, *state)
    line.append(Op(half.op.eqn, operands, (*results, *starts), loop, half.tag, origin=half.op))
    return [*results], starts


def _run(
    half: _Half,
    line: list[Op],
    length: int,
    state: Sequence[Atom],
    *,
    stacked: Sequence[Value] = (),
    slices: tuple[Sequence[Value], Sequence[Value]] | None = None,
) -> tuple[list[Atom], list[Value]]:
    """``length`` iterations: the state after them, and ``stacked`` of each.

    ``slices`` are what each iteration is given of stacks made before, read from their end.
    """
    given, stacks = slices or ((), ())
    rows, wholes = [row for row, _ in half.rows], [whole for _, whole in half.rows]
    consts = [v for v in half.constants if v not in wholes]
    traced = half.op.loop
    assert traced is not None
    block = Block(
        half.path,
        (*consts, *half.state, *given, *rows),
        half.ops,
        (half.index, *half.handed, *half.written, *stacked),
    )
    loop = replace(
        half.loop(block, length, reverse=slices is not None),
        num_consts=len(consts),
        unroll=min(traced.unroll, length),
        rows=len(rows),
        step=-1 if half.down else 1,
    )
    results = [v.like() for v in half.state]
    kept = [_whole_of(v, length) for v in stacked]
    operands = (*consts, *state, *stacks, *wholes)
    line.append(Op(half.op.eqn, operands, (*results, *kept), loop, half.tag, origin=half.op))
    return [*results], kept
