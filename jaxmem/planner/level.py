"""Write out one straight line of operations with its recomputations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmem.program.fusion import repeated_numbers
from jaxmem.program.ir import Atom, Block, Op, Value
from jaxmem.program.primitives import Kind, kind_of

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
        ops: its operations; loops inside are already written out.
        made: the position at which each value is made.
        droppable: name, value and position of everything that may be made again.
        needed_until: the last operation that reads each value, itself or through what is fused
            with it.
        numbers: values that the compiler knows; nothing is gained by making them again.
    """

    block: Block
    ops: tuple[Op, ...]
    made: dict[Value, int]
    droppable: tuple[tuple[str, Value, int], ...]
    needed_until: dict[Value, int]
    numbers: set[Value]

    @classmethod
    def of(cls, block: Block, ops: Sequence[Op], repeatable: Callable[[Op], bool]) -> Facts:
        """The facts of ``ops``, which stand for the operations of ``block``."""
        returned = {v for v in block.outputs if isinstance(v, Value)}
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
        return cls(block, tuple(ops), made, droppable, _needed_until(ops, returned), numbers)


class Level:
    """Writes out one line; loops inside it are already written out."""

    def __init__(self, facts: Facts, turns: Turns, *, barriers: bool, ordered: bool):
        self.facts, self.ops, self.made = facts, facts.ops, facts.made
        self.turns, self.barriers, self.ordered = turns, barriers, ordered
        self.drops = self._drops()
        self.again: dict[tuple[Value, int], Value] = {}
        self.inputs = frozenset(facts.block.inputs)
        self.numbers = itertools.count(1)
        self.behind: set[Value] = set()
        self.emitted: list[Op] = []
        self.latest: Value | None = None
        self.pending: list[Value] = []

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
        outputs = tuple(self._now(v, end) if isinstance(v, Value) else v for v in block.outputs)
        return Block(block.path, block.inputs, tuple(self.emitted), outputs), first_turn

    def _emit_late(self, index: int, op: Op) -> None:
        drops = self.drops
        touched = [v for v in op.values if v in drops]
        if touched:
            missing = [v for v in touched if self._missing(v, index)]
            if missing:
                self._rebuild(missing, index, op)
            inputs = tuple(self._now(v, index) if isinstance(v, Value) else v for v in op.inputs)
            op = Op(op.eqn, inputs, op.outputs, op.loop, origin=op.origin)
        self.emitted.append(op)
        if op.outputs:
            self.latest = op.outputs[0]
        if self.barriers and self.ordered and kind_of(op) in (Kind.OPAQUE, Kind.REDUCE):
            self.pending.extend(v for v in op.outputs if v not in drops)

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
        return self.again[value, age] if age else value

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
                if now is value and now not in self.inputs and now not in self.facts.numbers:
                    held[now] = None
                safe = safe or now in held or now in self.behind
            if not safe:
                held.update(dict.fromkeys(own))
            here.update(op.outputs)
            if safe or own:
                protected.update(op.outputs)
        if not held:
            return {}
        trigger = self._trigger(index, use)
        waited = dict.fromkeys([trigger] if trigger is not None else [])
        if self.ordered:
            waited.update(dict.fromkeys(self._finished(index)))
        operands = [*held, *(v for v in waited if v not in held)]
        results = [v.like() for v in operands]
        self.behind.update(results)
        self.emitted.append(Op(use.eqn, operands, results, None, tag, barrier=True))
        return dict(zip(held, results, strict=False))

    def _finished(self, index: int) -> list[Value]:
        """Late results that are needed again only after this recomputation, such as gradients.

        Left alone, XLA:CPU puts off making them, and what they are made from stays alive: every
        weight gradient of an MLP was computed at the very end of the step. The barrier waits for
        them, so that the order of the schedule is the order that is run.
        """
        until = self.facts.needed_until
        finished = [v for v in self.pending if until.get(v, -1) >= index]
        self.pending = []
        return finished

    def _trigger(self, index: int, use: Op) -> Value | None:
        """The value whose birth lets the recomputation start: the youngest late operand."""
        turn = max(t for t, _ in self.turns if t <= index)
        late = [v for v in use.values if self.made.get(v, -1) >= turn]
        return max(late, key=lambda v: self.made[v]) if late else self.latest


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
