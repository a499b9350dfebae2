"""Write out one straight line of operations with its recomputations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxmem.planner.facts import BUFFERS, Facts
from jaxmem.planner.putoff import PutOff
from jaxmem.program.ir import Atom, Block, Op, Value

# Late buffers that are looked at for the youngest one.
MOST_YOUNG = 16


class StillKept(frozenset[str]):
    """What is kept at a turn inside a late part: of what was made before that part, what stays.

    Everything made since is kept. Such turns are where nested recomputation drops again what it
    made again.
    """

    __slots__ = ()


Turns = Sequence[tuple[int, frozenset[str] | None]]
"""Positions of turns and the names kept across each; ``None`` marks a place and drops nothing."""


class Level:
    """Writes out one line; loops inside it are already written out.

    Attributes:
        dropped: the values dropped at the turns that were passed.
        gone: those of them that were not made again yet.
        again: the latest copy of each that was; ``stale`` those made before the last turn.
        fresh: values kept across a turn that nothing late has read yet.
        late: what stands behind a barrier for a value that went through one.
        touched: everything above; an operation that reads none of it stays as it is.
        arrived: what came back from host memory; recomputations that read it wait as well.
    """

    def __init__(
        self, facts: Facts, turns: Turns, *, barriers: bool, host: bool, settle: bool = False
    ):
        self.facts, self.ops, self.made = facts, facts.ops, facts.made
        self.barriers, self.host, self.settle = barriers, host, settle
        self.turns: list[tuple[int, int, list[Value]]] = []
        since = 0
        for turn, kept in turns:
            since = since if isinstance(kept, StillKept) else turn
            self.turns.append((turn, since, self._dropped_at(since, kept)))
        self.leaving = {v for _, _, values in self.turns for v in values}
        self.turn = self.looked = 0
        self.dropped: set[Value] = set()
        self.gone: set[Value] = set()
        self.again: dict[Value, Value] = {}
        self.stale: set[Value] = set()
        self.fresh: set[Value] = set()
        self.late: dict[Value, Value] = {}
        self.touched: set[Value] = set()
        self.inputs = frozenset(facts.block.inputs)
        self.numbers = itertools.count(1)
        self.behind: set[Value] = set()
        self.emitted: list[Op] = []
        self.noted = 0
        self.arrived: set[Value] = set()
        self.young: list[Value] = []
        self.pending: list[Value] = []
        self.put_off = PutOff(facts, self.dropped)

    def _dropped_at(self, turn: int, kept: frozenset[str] | None) -> list[Value]:
        """The values made before ``turn`` that are not kept across it."""
        if kept is None:
            return []
        before = itertools.takewhile(lambda item: item[2] < turn, self.facts.droppable)
        return [value for name, value, _ in before if name not in kept]

    def run(self) -> tuple[Block, int]:
        """The written-out block, and the position of its first late operation."""
        end = len(self.ops)
        first_turn = min(self.turns[0][0], end) if self.turns else end
        self._early(first_turn)
        cut = len(self.emitted)
        self.noted = first_turn
        turns = {turn: (since, values) for turn, since, values in self.turns}
        for index in range(first_turn, end):
            if index in turns:
                self._pass(*turns[index])
            self._emit_late(index, self.ops[index])
        block = self.facts.block
        carried = block.outputs[: self.facts.carried]
        rest = [self._now(v) if isinstance(v, Value) else v for v in block.outputs[len(carried) :]]
        outputs = (*carried, *rest)
        return Block(block.path, block.inputs, tuple(self.emitted), outputs), cut

    def _early(self, first_turn: int) -> None:
        """What comes before the first turn."""
        self.emitted.extend(self.ops[:first_turn])

    def _pass(self, turn: int, dropped: Sequence[Value]) -> None:
        """A turn: what it drops is gone from here on, what it keeps is fresh.

        A turn inside a late part drops copies of what was made before that part; what was made in
        it stays late. The copies it keeps are stale: what is made of them once more must not be
        merged with what was made of them before.
        """
        inside, self.turn, self.looked = turn == self.turn, turn, 0
        self.dropped.update(dropped)
        self.gone.update(dropped)
        for value in dropped:
            self.again.pop(value, None)
        self.stale = set(self.again.values())
        self.behind.clear()
        self.put_off.pass_turn(turn)
        if self.barriers and not inside:
            before = itertools.takewhile(lambda item: item[2] < turn, self.facts.droppable)
            self.fresh.update([v for _, v, _ in before])
            self.fresh.difference_update(self.dropped, self.late)
        self.fresh.difference_update(self.dropped)
        self.touched.update(self.dropped, self.fresh)

    def _emit_late(self, index: int, op: Op) -> None:
        if index >= self.looked:
            self._before_kernel(index, op)
        if op.loop is not None and self.barriers:
            self._before_loop(index, op)
        if not self.touched.isdisjoint(op.values):
            kept = [v for v in op.values if v in self.fresh]
            if kept:
                self._hold_back(kept, index, op)
            if any(v in self.again or v in self.late for v in op.values):
                inputs = [self._now(v) if isinstance(v, Value) else v for v in op.inputs]
                op = Op(op.eqn, inputs, op.outputs, op.loop, origin=op.origin)
        self.emitted.append(op)

    def _before_kernel(self, index: int, op: Op) -> None:
        """Make again what the next kernel needs, before anything that is fused into it.

        In the middle of a kernel the barrier could only wait for what is fused, which XLA would
        then write out: a softmax's gradient in float32, for the sake of its probabilities. What
        begins with the transposition of a product waits for that (`_as_read`).
        """
        if op.name == "transpose" and self.gone.isdisjoint(op.values):
            return
        self.looked = self.facts.kernel_end[index] + 1
        kernel = self.ops[index : self.looked]
        missing = dict.fromkeys([v for o in kernel for v in o.values if v in self.gone])
        if missing:
            self._rebuild(list(missing), index, op)

    def _before_loop(self, index: int, loop: Op) -> None:
        """Have a loop wait for what was made before it from more than is left.

        XLA starts a loop as soon as it can, and what it puts off until after the loop keeps its
        operands alive in it. The backward loop of a GPT's layers came before the weight gradient
        of its logits, which needs their gradient, and before the loss that is returned, which
        needs the logits: 1.5 GiB each.
        """
        waited = self.put_off.before_loop(index)
        # Its body makes numbers itself.
        given = [v for v in loop.values if v not in self.facts.numbers]
        reads = [v for v in given if self.made.get(v, -1) >= self.turn]
        if ordered := self._of_loop_before(index):
            waited += ordered
            reads = reads or self._only_read(loop, given)
        if not waited or not reads:
            return
        self.put_off.waited_for(waited)
        ready = [self._as_read(v, index) for v in waited]
        first = min(reads, key=lambda v: v.nbytes)
        self._barrier(loop, [], list(dict.fromkeys([*ready, first])), "jaxmem.before")

    def _results_before(self, index: int) -> list[Value]:
        """Early results that a barrier before ``index`` has to wait for, on a GPU."""
        if self.host:
            return []
        found = self.put_off.results_before(index)
        self.put_off.waited_for(found)
        return found

    def _only_read(self, loop: Op, given: Sequence[Value]) -> Sequence[Value]:
        """What a loop is ``given`` and does not carry, if there is such.

        XLA copies an argument that a loop carries, and would do so in front of the barrier.
        """
        traced = loop.origin
        assert traced.loop is not None
        first = traced.loop.num_consts
        carried = set(traced.inputs[first : first + traced.loop.num_carry])
        found = [v for v in given if v not in self.dropped]
        return [v for v in found if v not in carried] or found

    def _of_loop_before(self, index: int) -> list[Value]:
        """Something that the nearest late loop before ``index`` left, where nothing orders the two.

        Of the loops of two gradients in one step, XLA ran those first that it could, and held what
        each keeps for its backward pass: 862 MiB, and 668 in the order of the program. A result of
        it, or what was made of one, such as the weights that are returned.
        """
        gone, until, roots = self.dropped | self.leaving, self.facts.read_until, self.facts.roots
        for last in range(index - 1, self.turn - 1, -1):
            if self.ops[last].loop is None:
                continue
            after = dict.fromkeys(self.ops[last].outputs)
            for op in self.ops[last + 1 : index]:
                if any(v in after for v in op.values):
                    after.update(dict.fromkeys(op.outputs))
            if any(v in after for v in self.ops[index].values):
                return []
            left = [v for v in after if v not in gone and until.get(v, -1) > index]
            if found := [v for v in left if roots[v] == (v,)]:
                return [min(found, key=lambda v: v.nbytes)]
        return []

    def _now(self, value: Value) -> Value:
        """What stands for ``value`` from here on: itself, its latest copy, or behind a barrier."""
        now = self.again.get(value, value)
        return self.late.get(now, now)

    def _note(self, index: int) -> None:
        """Remember the late results made before ``index`` that barriers may wait for."""
        for position in range(self.noted, index):
            made = [v for v in self.ops[position].outputs if v not in self.leaving]
            self.pending += made
            if self.facts.kinds[position] in BUFFERS:
                self.young += made
        self.noted = index

    def _hold_back(self, kept: Sequence[Value], index: int, use: Op) -> None:
        """Put what was kept behind a barrier before a late operation first reads it as it is.

        Otherwise what XLA makes of it twice, such as the padding that a convolution needs in both
        passes, is made once and stays alive from the first time to the second.
        """
        waited = self._trigger(index, use)
        if sum([v.nbytes for v in waited]) > sum([v.nbytes for v in kept]):
            waited = [v for v in waited if v in self.young]
        waited = [*waited, *self._results_before(index)]
        now = {v: self.late.get(v, v) for v in kept}
        behind = self._barrier(use, list(now.values()), waited, "jaxmem.late")
        self._stands_for({v: behind[now[v]] for v in kept})

    def _rebuild(self, missing: Sequence[Value], index: int, use: Op) -> None:
        positions = self._positions(missing)
        # A slash would start a new name in the name stack, and the compiled program is searched.
        place = self.facts.block.path.replace("/", "_") or "step"
        tag = f"jaxmem.recompute.{place}.{next(self.numbers)}"
        stand_in = self._protect(positions, index, use, tag) if self.barriers else {}
        for position in positions:
            op = self.ops[position]
            inputs: list[Atom] = []
            for atom in op.inputs:
                now = self._now(atom) if isinstance(atom, Value) else atom
                inputs.append(stand_in.get(now, now) if isinstance(now, Value) else now)
            results = tuple([v.like() for v in op.outputs])
            if any(a in self.behind for a in inputs if isinstance(a, Value)):
                self.behind.update(results)
            self.emitted.append(Op(op.eqn, inputs, results, op.loop, tag, origin=op.origin))
            for value, copy in zip(op.outputs, results, strict=True):
                if value in self.dropped:
                    self.gone.discard(value)
                    self.again[value] = copy

    def _positions(self, missing: Sequence[Value]) -> list[int]:
        """Positions of all operations that must run again to have ``missing``, in order."""
        positions: set[int] = set()
        stack = list(missing)
        while stack:
            position = self.made[stack.pop()]
            if position in positions:
                continue
            positions.add(position)
            stack.extend([v for v in self.ops[position].values if v in self.gone])
        return sorted(positions)

    def _protect(
        self, positions: Sequence[int], index: int, use: Op, tag: str
    ) -> dict[Value, Value]:
        """Emit the barrier that keeps XLA from merging the copies with the originals.

        Every copy must depend on a barrier, but for those made of nothing, such as an iota, which
        have no operand to hold back. Activations always go through it; an argument only where
        nothing else of an operation does.
        """
        held: dict[Value, None] = {}
        here: set[Value] = set()
        protected: set[Value] = set()
        for position in positions:
            op = self.ops[position]
            own = []
            safe = False
            for value in op.values:
                if value in here:
                    safe = safe or value in protected
                    continue
                now = self._now(value)
                own.append(now)
                kept = now is value or now is self.late.get(value) or now in self.arrived
                kept = kept or self.again.get(value) in self.stale
                if kept and now not in self.inputs and value not in self.facts.numbers:
                    held[now] = None
                safe = safe or now in held or now in self.behind
            if not safe:
                held.update(dict.fromkeys(own))
            here.update(op.outputs)
            if safe or own:
                protected.update(op.outputs)
        if not held:
            return {}
        waited = dict.fromkeys(self._finished(index, self._made_again(positions)))
        if self.host or not waited:
            waited.update(dict.fromkeys(self._trigger(index, use)))
        waited.update(dict.fromkeys(self._results_before(index)))
        behind = self._barrier(use, list(held), list(waited), tag)
        return {v: behind[v] for v in held}

    def _made_again(self, positions: Sequence[int]) -> int:
        """Bytes of the buffers that a recomputation makes, or of all its values to settle more."""
        copies = [v for p in positions for v in self.ops[p].outputs]
        if self.settle:
            return sum([v.nbytes for v in copies])
        return sum([v.nbytes for v in copies if self.facts.roots[v] == (v,)])

    def _barrier(
        self, use: Op, held: Sequence[Value], waited: Sequence[Value], tag: str
    ) -> dict[Value, Value]:
        """Emit a barrier; what it holds, and what it waits for, by what stands for them now.

        Whatever reads a value that was waited for reads the barrier's result from now on: XLA
        drops operands of a barrier whose results nobody reads, and with them the order.
        """
        operands = list(dict.fromkeys([*held, *(self.late.get(v, v) for v in waited)]))
        results = [v.like() for v in operands]
        behind = dict(zip(operands, results, strict=True))
        self.behind.update(results)
        self.emitted.append(Op(use.eqn, operands, results, None, tag, barrier=True))
        self._stands_for({v: behind[self.late.get(v, v)] for v in waited})
        return behind

    def _stands_for(self, behind: dict[Value, Value]) -> None:
        """From here on the values of ``behind`` are read instead of its keys."""
        self.late.update(behind)
        self.fresh.difference_update(behind)
        self.touched.update(behind)

    def _finished(self, index: int, made_again: int) -> list[Value]:
        """What was made since the last barrier and is read again only after this recomputation.

        Left alone, XLA puts off making it, and what it is made from stays alive: every weight
        gradient of an MLP was computed at the very end of the step, and the gradient of a U-Net's
        skip connection was cut out of three times its bytes only there. The barrier waits for it,
        so that the order of the schedule is the order that is run. What is larger than all that
        this recomputation makes is left for one that makes more.
        """
        self._note(index)
        waiting, self.pending = self.pending, []
        found = []
        for value in waiting:
            if self._settled(value, index, made_again):
                found.append(self._as_read(value, index))
            elif value.nbytes > made_again and self.facts.read_until.get(value, -1) >= index:
                self.pending.append(value)
        return list(dict.fromkeys(found))

    def _as_read(self, value: Value, index: int) -> Value:
        """``value``, or its transposition where that was the last to read it before ``index``.

        A barrier fixes the layout of what it waits for: behind one that waits for a product, its
        transposition would have to be carried out.
        """
        while self.facts.read_until.get(value, -1) < index:
            read_by = self.ops[self.facts.read_until[value]]
            if read_by.name != "transpose":
                return value
            value = read_by.outputs[0]
        return value

    def _settled(self, value: Value, index: int, made_again: int) -> bool:
        """Whether ``value`` is a buffer, or takes the place of buffers that are done with.

        Nothing element-wise is written out for the sake of buffers smaller than itself: the index
        of a cross entropy is no reason to write out the gradient of its logits, and half-precision
        probabilities none for their gradient in float32.

        XLA:CPU makes more of element-wise results that it need not settle (conv net: 24 MiB, and
        16 without them); XLA:GPU makes less (15 MiB, and 12 with them).
        """
        op, facts = self.ops[self.made[value]], self.facts
        if facts.kinds[self.made[value]] in BUFFERS:
            return facts.needed_until.get(value, -1) >= index
        if self.host or value.nbytes > made_again or value in facts.numbers:
            return False
        if facts.read_until.get(value, -1) < index:
            return False
        late = [v for v in op.values if self.made.get(v, -1) >= self.turn]
        done_with = all(facts.read_until[v] < index for v in late)
        return done_with and sum([v.nbytes for v in late]) >= value.nbytes

    def _before_broadcast(self, value: Value) -> Value:
        """The late value that ``value`` is a larger, element-wise function of; itself if none."""
        while True:
            position = self.made[value]
            late = [v for v in self.ops[position].values if self.made.get(v, -1) >= self.turn]
            if self.facts.kinds[position] in BUFFERS or not late:
                return value
            if sum([v.nbytes for v in late]) >= value.nbytes:
                return value
            value = max(late, key=lambda v: (self.facts.depth[v], self.made[v]))

    def _trigger(self, index: int, use: Op) -> list[Value]:
        """A late value to wait for, which ``use`` or an operation after it reads.

        The youngest buffer if there is one, for a value that is fused with its readers would have
        to be written out; otherwise the youngest late operand.
        """
        self._note(index)
        read_until, depth = self.facts.read_until, self.facts.depth
        young = dict.fromkeys([self._as_read(v, index) for v in self.young if v in read_until])
        self.young = [v for v in young if read_until.get(v, -1) >= index][-MOST_YOUNG:]
        late = self.young or [
            self._before_broadcast(v) for v in use.values if self.made.get(v, -1) >= self.turn
        ]
        youngest = max(late, key=lambda v: (depth[v], self.made[v]), default=None)
        return [] if youngest is None else [youngest]
