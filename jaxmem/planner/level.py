"""Write out one straight line of operations with its recomputations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmem.program.fusion import repeated_numbers
from jaxmem.program.ir import Atom, Block, Op, Value
from jaxmem.program.primitives import Kind, kind_of

# Late buffers that are looked at for the youngest one.
_MOST_YOUNG = 16

Turns = Sequence[tuple[int, frozenset[str] | None]]
"""Positions of turns and the names kept across each; ``None`` marks a place and drops nothing."""


def kept_name(op: Op, value: Value) -> str:
    """The name by which ``value`` stands in a kept set: its key, or its whole loop's."""
    loop = op.origin.loop
    return f"loop {loop.body.path}" if loop is not None else str(value.key)


@dataclass(frozen=True, eq=False)
class Facts:
    """What stays the same about a line of operations whatever is kept.

    Attributes:
        block: the line as traced: path, inputs, outputs.
        carried: for the joint iteration of a scan pair, how many outputs the forward scan hands to
            its next iteration: the early part gives them away before the late part starts.
        ops: its operations; loops inside are already written out.
        made: the position at which each value is made.
        droppable: name, value and position of everything that may be made again.
        needed_until: the last operation that reads each value, itself or through what is fused
            with it.
        read_until: the last operation that reads each value itself.
        depth: how many operations must run one after the other to have each value.
        numbers: values that the compiler knows; nothing is gained by making them again.
        droppable_values: the values in ``droppable``.
    """

    block: Block
    carried: int
    ops: tuple[Op, ...]
    made: dict[Value, int]
    droppable: tuple[tuple[str, Value, int], ...]
    needed_until: dict[Value, int]
    read_until: dict[Value, int]
    depth: dict[Value, int]
    numbers: set[Value]
    droppable_values: frozenset[Value]

    @classmethod
    def of(
        cls, block: Block, ops: Sequence[Op], repeatable: Callable[[Op], bool], carried: int = 0
    ) -> Facts:
        """The facts of ``ops``, which stand for the operations of ``block``."""
        returned = {v for v in block.outputs[carried:] if isinstance(v, Value)}
        numbers = repeated_numbers(ops)
        fixed = returned | numbers
        droppable = tuple(
            (kept_name(op, value), value, index)
            for index, op in enumerate(ops)
            if repeatable(op.origin)
            for value in op.outputs
            if value not in fixed
        )
        made = {value: index for index, op in enumerate(ops) for value in op.outputs}
        return cls(
            block=block,
            carried=carried,
            ops=tuple(ops),
            made=made,
            droppable=droppable,
            needed_until=_needed_until(ops, returned),
            read_until={v: index for index, op in enumerate(ops) for v in op.values}
            | dict.fromkeys(returned, len(ops)),
            depth=_depth(ops, numbers),
            numbers=numbers,
            droppable_values=frozenset(v for _, v, _ in droppable),
        )


class Level:
    """Writes out one line; loops inside it are already written out."""

    def __init__(self, facts: Facts, turns: Turns, *, barriers: bool, host: bool):
        self.facts, self.ops, self.made = facts, facts.ops, facts.made
        self.turns, self.barriers, self.host = turns, barriers, host
        self.drops = self._drops()
        self.again: dict[tuple[Value, int], Value] = {}
        self.inputs = frozenset(facts.block.inputs)
        self.numbers = itertools.count(1)
        self.behind: set[Value] = set()
        self.emitted: list[Op] = []
        self.young: list[Value] = []
        self.pending: list[Value] = []
        self.late: dict[Value, Value] = {}

    def _drops(self) -> dict[Value, tuple[int, ...]]:
        """For each value that is dropped at all, the turns across which it is not kept."""
        drops: dict[Value, tuple[int, ...]] = {}
        for turn, kept in self.turns:
            if kept is None:
                continue
            for name, value, index in self.facts.droppable:
                if index < turn and name not in kept:
                    drops[value] = (*drops.get(value, ()), turn)
        return drops

    def run(self) -> tuple[Block, int]:
        """The written-out block, and the position of its first late operation."""
        end = len(self.ops)
        first_turn = min(self.turns[0][0], end) if self.turns else end
        self.emitted.extend(self.ops[:first_turn])
        for index in range(first_turn, end):
            self._emit_late(index, self.ops[index])
        block = self.facts.block
        carried = block.outputs[: self.facts.carried]
        rest = [
            self._now(v, end) if isinstance(v, Value) else v for v in block.outputs[len(carried) :]
        ]
        outputs = (*carried, *rest)
        return Block(block.path, block.inputs, tuple(self.emitted), outputs), first_turn

    def _emit_late(self, index: int, op: Op) -> None:
        drops = self.drops
        missing = [v for v in op.values if v in drops and self._missing(v, index)]
        if missing:
            self._rebuild(missing, index, op)
        if self.barriers:
            self._hold_back(index, op)
        late = self.late
        if any(v in drops or v in late for v in op.values):
            inputs = [self._now(v, index) if isinstance(v, Value) else v for v in op.inputs]
            op = Op(op.eqn, inputs, op.outputs, op.loop, origin=op.origin)
        self.emitted.append(op)
        if self.barriers:
            self._note(op)

    def _note(self, op: Op) -> None:
        """Remember the results of a late operation that barriers may wait for."""
        made = [v for v in op.outputs if v not in self.drops]
        self.pending.extend(made)
        if kind_of(op) in (Kind.OPAQUE, Kind.REDUCE):
            self.young.extend(made)

    def _age(self, value: Value, index: int) -> int:
        """How many turns ``value`` was dropped at before position ``index``."""
        dropped = self.drops.get(value)
        return 0 if dropped is None else sum([t <= index for t in dropped])

    def _missing(self, value: Value, index: int) -> bool:
        age = self._age(value, index)
        return age > 0 and (value, age) not in self.again

    def _now(self, value: Value, index: int) -> Value:
        """What stands for ``value`` at position ``index``: itself or its latest copy."""
        age = self._age(value, index)
        now = self.again[value, age] if age else value
        return self.late.get(now, now)

    def _hold_back(self, index: int, use: Op) -> None:
        """Put what was kept behind a barrier before a late operation first reads it as it is.

        Otherwise what XLA makes of it twice, such as the padding that a convolution needs in both
        passes, is made once and stays alive from the first time to the second.
        """
        droppable = self.facts.droppable_values
        turn = self._turn(index)
        kept = [
            v
            for v in use.values
            if v in droppable
            and self.made[v] < turn
            and v not in self.late
            and not self._age(v, index)
        ]
        if kept:
            waited = self._trigger(index, use)
            if sum([v.nbytes for v in waited]) > sum([v.nbytes for v in kept]):
                waited = [v for v in waited if v in self.young]
            behind = self._barrier(use, kept, waited, "jaxmem.late")
            self.late.update((v, behind[v]) for v in kept)

    def _rebuild(self, missing: Sequence[Value], index: int, use: Op) -> None:
        positions = self._positions(missing, index)
        # A slash would start a new name in the name stack, and the compiled program is searched.
        place = self.facts.block.path.replace("/", "_") or "step"
        tag = f"jaxmem.recompute.{place}.{next(self.numbers)}"
        stand_in = self._protect(positions, index, use, tag) if self.barriers else {}
        for position in positions:
            op = self.ops[position]
            inputs: list[Atom] = []
            for atom in op.inputs:
                now = self._now(atom, index) if isinstance(atom, Value) else atom
                inputs.append(stand_in.get(now, now) if isinstance(now, Value) else now)
            results = tuple([v.like() for v in op.outputs])
            if any(a in self.behind for a in inputs if isinstance(a, Value)):
                self.behind.update(results)
            self.emitted.append(Op(op.eqn, inputs, results, op.loop, tag, origin=op.origin))
            for value, copy in zip(op.outputs, results, strict=True):
                age = self._age(value, index)
                if age:
                    self.again[value, age] = copy

    def _positions(self, missing: Sequence[Value], index: int) -> list[int]:
        """Positions of all operations that must run again to have ``missing``, in order."""
        positions: set[int] = set()
        stack = list(missing)
        while stack:
            position = self.made[stack.pop()]
            if position in positions:
                continue
            positions.add(position)
            stack.extend([v for v in self.ops[position].values if self._missing(v, index)])
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
                now = self._now(value, index)
                own.append(now)
                kept = now is value or now is self.late.get(value)
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
        made_again = sum([v.nbytes for p in positions for v in self.ops[p].outputs])
        waited = dict.fromkeys(self._finished(index, made_again))
        if self.host or not waited:
            waited.update(dict.fromkeys(self._trigger(index, use)))
        behind = self._barrier(use, list(held), list(waited), tag)
        return {v: behind[v] for v in held}

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
        for value in waited:
            self.late[value] = behind[self.late.get(value, value)]
        return behind

    def _finished(self, index: int, made_again: int) -> list[Value]:
        """What was made since the last barrier and is read again only after this recomputation.

        Left alone, XLA puts off making it, and what it is made from stays alive: every weight
        gradient of an MLP was computed at the very end of the step, and the gradient of a U-Net's
        skip connection was cut out of three times its bytes only there. The barrier waits for it,
        so that the order of the schedule is the order that is run.
        """
        waiting, self.pending = self.pending, []
        return [v for v in waiting if self._settled(v, index, made_again)]

    def _settled(self, value: Value, index: int, made_again: int) -> bool:
        """Whether ``value`` is a buffer, or takes the place of buffers that are done with.

        Nothing element-wise is written out for the sake of a recomputation smaller than itself:
        the index of a cross entropy is no reason to write out the gradient of its logits.

        XLA:CPU makes more of element-wise results that it need not settle (conv net: 24 MiB, and
        16 without them); XLA:GPU makes less (15 MiB, and 12 with them).
        """
        op, facts = self.ops[self.made[value]], self.facts
        if kind_of(op) in (Kind.OPAQUE, Kind.REDUCE):
            return facts.needed_until.get(value, -1) >= index
        if self.host or value.nbytes > made_again or value in facts.numbers:
            return False
        if facts.read_until.get(value, -1) < index:
            return False
        turn = self._turn(index)
        late = [v for v in op.values if self.made.get(v, -1) >= turn]
        done_with = all(facts.read_until[v] < index for v in late)
        return done_with and sum([v.nbytes for v in late]) >= value.nbytes

    def _turn(self, index: int) -> int:
        return max(t for t, _ in self.turns if t <= index)

    def _before_broadcast(self, value: Value, turn: int) -> Value:
        """The late value that ``value`` is a larger, element-wise function of; itself if none."""
        while True:
            op = self.ops[self.made[value]]
            late = [v for v in op.values if self.made.get(v, -1) >= turn]
            if kind_of(op) not in (Kind.ALIAS, Kind.FUSED) or not late:
                return value
            if sum([v.nbytes for v in late]) >= value.nbytes:
                return value
            value = max(late, key=lambda v: (self.facts.depth[v], self.made[v]))

    def _trigger(self, index: int, use: Op) -> list[Value]:
        """A late value to wait for, which ``use`` or an operation after it reads.

        The youngest buffer if there is one, for a value that is fused with its readers would have
        to be written out; otherwise the youngest late operand.
        """
        read_until, depth = self.facts.read_until, self.facts.depth
        self.young = [v for v in self.young if read_until.get(v, -1) >= index][-_MOST_YOUNG:]
        turn = self._turn(index)
        late = self.young or [
            self._before_broadcast(v, turn) for v in use.values if self.made.get(v, -1) >= turn
        ]
        youngest = max(late, key=lambda v: (depth[v], self.made[v]), default=None)
        return [] if youngest is None else [youngest]


def _depth(ops: Sequence[Op], numbers: set[Value]) -> dict[Value, int]:
    """The longest way from what is given to each value, in operations."""
    depth: dict[Value, int] = dict.fromkeys(numbers, 0)
    for op in ops:
        steps = 1 + max([depth.get(v, 0) for v in op.values], default=-1)
        for value in op.outputs:
            depth.setdefault(value, steps)
    return depth


def _needed_until(ops: Sequence[Op], returned: set[Value]) -> dict[Value, int]:
    """The last operation that reads each value, itself or through what is fused with it."""
    until: dict[Value, int] = dict.fromkeys(returned, len(ops))
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        position = index
        if kind_of(op) in (Kind.ALIAS, Kind.FUSED):
            position = max((until.get(v, index) for v in op.outputs), default=index)
        for value in op.values:
            if until.get(value, -1) < position:
                until[value] = position
    return until
