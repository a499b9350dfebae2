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
from jaxmem.planner.pairs import Halves, split_pair
from jaxmem.planner.passes import split_in_segments
from jaxmem.planner.segments import Segments, refusal
from jaxmem.program.ir import Block, Op
from jaxmem.program.loops import Nest, Pair
from jaxmem.program.making import in_pieces
from jaxmem.program.primitives import may_repeat

Turn = tuple[str, int]
"""A block's path, and the position in its operations where the late part starts."""

Keep = Mapping[Turn, frozenset[str]]
"""For each turn that is planned, the keys of the values kept across it."""

Decided = tuple[Keep, Segments]

_WHOLE: Segments = {}

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

    def schedule(self, keep: Keep, segments: Segments = _WHOLE) -> Block:
        """The whole step with the recomputations of ``keep`` in it, and its loops in segments.

        Args:
            keep: for each turn that is planned, the names of what is kept across it.
            segments: for the path of a scan pair's joint block the numbers of segments, outermost
                first; a pair that is not named or has none stays whole.

        Raises:
            ValueError: no such pair, or it cannot run in these segments.
        """
        segments = {path: tuple(counts) for path, counts in segments.items() if counts}
        refused = refusal(self.nest, segments)
        if refused:
            raise ValueError(refused)
        return self._block(self.nest, (keep, segments))

    def repeatable(self, op: Op) -> bool:
        """Whether ``op`` may be executed again."""
        known = self._repeatable.get(op)
        if known is None:
            known = self._repeatable[op] = may_repeat(op)
        return known

    def _touched(self, nest: Nest, decided: Decided) -> frozenset:
        """What is decided about a block and everything inside it."""
        path = nest.block.path
        keep, segments = decided
        turns = [item for item in keep.items() if _inside(item[0][0], path)]
        pairs = [item for item in segments.items() if _inside(item[0], path)]
        return frozenset([*turns, *pairs])

    def _block(self, nest: Nest, decided: Decided) -> Block:
        touched = self._touched(nest, decided)
        if not touched:
            return nest.block
        memo_key = (nest.block.path, touched)
        if memo_key not in self._memo:
            ops = self._with_loops(nest, decided)
            turns = _turns(nest.block, decided[0])
            block, _ = self._level(nest.block, ops, turns, barriers=True)
            if decided[1]:
                block = replace(block, ops=in_pieces(block.ops))
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

    def _with_loops(self, nest: Nest, decided: Decided) -> list[Op]:
        ops = list(nest.block.ops)
        for pair, inner in nest.pairs:
            touched = self._touched(inner, decided)
            if touched:
                memo_key = (inner.block.path, touched)
                if memo_key not in self._memo:
                    self._memo[memo_key] = self._pair(nest, pair, inner, decided)
                ops[pair.forward], ops[pair.backward] = self._memo[memo_key]  # type: ignore
        for index, inner in nest.loops:
            body = self._block(inner, decided)
            op = ops[index]
            if op.loop is not None and body is not inner.block:
                loop = replace(op.loop, body=body, rewritten=True)
                ops[index] = Op(op.eqn, op.inputs, op.outputs, loop)
        return ops

    def _pair(self, nest: Nest, pair: Pair, inner: Nest, decided: Decided) -> tuple[Op, Op]:
        """The two scans of a pair, with what is not kept made again in the backward body."""
        ops = self._with_loops(inner, decided)
        keep, segments = decided
        turns = _turns(inner.block, keep) or [(pair.cut, None)]
        forward = nest.block.ops[pair.forward].loop
        assert forward is not None
        joint, cut = self._level(inner.block, ops, turns, barriers=False, carried=forward.num_carry)
        halves = Halves.of(nest.block, pair, joint, cut)
        counts = segments.get(inner.block.path)
        return split_in_segments(halves, counts) if counts else split_pair(halves)


def _inside(path: str, outer: str) -> bool:
    return outer in ("", path) or path.startswith(outer + "/")


def _turns(block: Block, keep: Keep) -> Turns:
    return sorted((turn, kept) for (path, turn), kept in keep.items() if path == block.path)
