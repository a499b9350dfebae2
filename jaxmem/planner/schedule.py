"""The schedule a plan stands for: the program with its recomputations written out.

A plan names, for each turn of each block, the values that are kept across it. A turn is where a
forward pass ends and its backward pass begins. Everything else that was made before the turn is
made again just before its first use after it, from kept values, behind an optimization barrier
tied to an operand of that use that was born after the turn. Without the barrier XLA merges the
copies with the originals and undoes the plan (FACTS section 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_not

from jaxmem.planner.level import Facts, Level, StillKept, Turns
from jaxmem.planner.pairs import split_pair
from jaxmem.program.ir import Block, Op
from jaxmem.program.loops import Nest, Pair
from jaxmem.program.primitives import may_repeat

Turn = tuple[str, int]
"""A block's path, and the position in its operations where the late part starts."""

Keep = Mapping[Turn, frozenset[str]]
"""For each turn that is planned, the keys of the values kept across it."""

__all__ = ["Keep", "Scheduler", "StillKept", "Turn"]


@dataclass
class Scheduler:
    """Writes out schedules of one program; remembers the parts that did not change.

    Attributes:
        nest: the program.
        host: written out for XLA:CPU, which orders operations differently from XLA:GPU.
    """

    nest: Nest
    host: bool = False
    _facts: dict[str, Facts] = field(default_factory=dict)
    _repeatable: dict[Op, bool] = field(default_factory=dict)
    _memo: dict[tuple[str, frozenset], object] = field(default_factory=dict)

    def schedule(self, keep: Keep) -> Block:
        """The whole step with the recomputations of ``keep`` in it."""
        return self._block(self.nest, keep)

    def repeatable(self, op: Op) -> bool:
        """Whether ``op`` may be executed again."""
        known = self._repeatable.get(op)
        if known is None:
            known = self._repeatable[op] = may_repeat(op)
        return known

    def _touched(self, nest: Nest, keep: Keep) -> frozenset:
        path = nest.block.path
        return frozenset(
            item for item in keep.items() if item[0][0] == path or _inside(item[0][0], path)
        )

    def _block(self, nest: Nest, keep: Keep) -> Block:
        touched = self._touched(nest, keep)
        if not touched:
            return nest.block
        memo_key = (nest.block.path, touched)
        if memo_key not in self._memo:
            ops = self._with_loops(nest, keep)
            block, _ = self._level(nest.block, ops, _turns(nest.block, keep), barriers=True)
            if nest is self.nest:
                return block
            self._memo[memo_key] = block
        return self._memo[memo_key]  # type: ignore[return-value]

    def _level(
        self, block: Block, ops: Sequence[Op], turns: Turns, *, barriers: bool, carried: int = 0
    ) -> tuple[Block, int]:
        """One line written out; what is known about the same operations is used again."""
        facts = self._facts.get(block.path)
        if facts is None or len(facts.ops) != len(ops) or any(map(is_not, facts.ops, ops)):
            facts = self._facts[block.path] = Facts.of(block, ops, self.repeatable, carried)
        return Level(facts, turns, barriers=barriers, host=self.host).run()

    def _with_loops(self, nest: Nest, keep: Keep) -> list[Op]:
        ops = list(nest.block.ops)
        for pair, inner in nest.pairs:
            touched = self._touched(inner, keep)
            if touched:
                memo_key = (inner.block.path, touched)
                if memo_key not in self._memo:
                    self._memo[memo_key] = self._pair(nest, pair, inner, keep)
                ops[pair.forward], ops[pair.backward] = self._memo[memo_key]  # type: ignore
        for index, inner in nest.loops:
            body = self._block(inner, keep)
            op = ops[index]
            if op.loop is not None and body is not inner.block:
                loop = replace(op.loop, body=body, rewritten=True)
                ops[index] = Op(op.eqn, op.inputs, op.outputs, loop)
        return ops

    def _pair(self, nest: Nest, pair: Pair, inner: Nest, keep: Keep) -> tuple[Op, Op]:
        """The two scans of a pair, with what is not kept made again in the backward body."""
        ops = self._with_loops(inner, keep)
        turns = _turns(inner.block, keep) or [(pair.cut, None)]
        forward = nest.block.ops[pair.forward].loop
        assert forward is not None
        joint, cut = self._level(inner.block, ops, turns, barriers=False, carried=forward.num_carry)
        return split_pair(nest.block, pair, joint, cut)


def _inside(path: str, outer: str) -> bool:
    return outer == "" or path.startswith(outer + "/")


def _turns(block: Block, keep: Keep) -> Turns:
    return sorted((turn, kept) for (path, turn), kept in keep.items() if path == block.path)
