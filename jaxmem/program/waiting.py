"""Which values of a step need argument leaves that wait in host memory, and which leaves meet."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from jaxmem.errors import CutError
from jaxmem.program.ir import Op, Program, Value
from jaxmem.program.primitives import may_repeat

# Leaves that meet only in values of no more bytes each are updated one by one all the same.
SMALL_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Need:
    """What a value needs of the leaves that wait.

    Attributes:
        leaf: the leaf it needs, or the one that stands for several that are updated together;
            ``None`` for what leaves were joined to.
        wave: how many joints are before it, one after the other.
    """

    leaf: Value | None
    wave: int


class Waiting:
    """The values that need leaves in host memory.

    Two leaves that meet in an operation are updated together, unless what meets is small: a norm
    of all updates is joined from numbers that each leaf gives.

    Args:
        program: the step.
        hosted: the inputs that wait, and their paths.
        totals: small values that are joints even where they need one leaf only.

    Raises:
        CutError: an effect, or an operation that talks to other devices, needs one of them.
    """

    def __init__(
        self, program: Program, hosted: dict[Value, str], totals: Set[Value] = frozenset()
    ):
        self.program, self.hosted, self.totals = program, hosted, totals
        self._parent: dict[Value, Value] = {leaf: leaf for leaf in hosted}
        self._needs: dict[Value, Need] = {}
        while self._meets():
            pass

    def __contains__(self, value: object) -> bool:
        return value in self._needs

    def __getitem__(self, value: Value) -> Need:
        return self._needs[value]

    def is_joint(self, value: Value) -> bool:
        """Whether leaves were joined to ``value``, and nothing else needs them in it."""
        return value in self._needs and self._needs[value].leaf is None

    def is_given(self, value: Value) -> bool:
        """Whether ``value`` is of one leaf, and no leaf itself."""
        return value in self._needs and value not in self.hosted and not self.is_joint(value)

    def _find(self, leaf: Value) -> Value:
        while self._parent[leaf] is not leaf:
            leaf = self._parent[leaf]
        return leaf

    def _meets(self) -> bool:
        """Go through the step; whether leaves were found to be updated together.

        What was said before of values in which such leaves met may be wrong then, and only in that
        they are joints no more: so whatever is found to be updated together stays so, and the next
        time through says the rest.
        """
        needs = self._needs = {leaf: Need(self._find(leaf), 0) for leaf in self.hosted}
        found_together = False
        for op in self.program.block.ops:
            read = [v for v in op.values if v in needs]
            if not read:
                continue
            self._check(op, read)
            given = [v for v in read if needs[v].leaf is not None]
            known = (leaf for v in given if (leaf := needs[v].leaf) is not None)
            leaves = list(dict.fromkeys(map(self._find, known)))
            large = any(v.nbytes > SMALL_BYTES for v in (*given, *op.outputs))
            if len(leaves) > 1 and any(v.nbytes > SMALL_BYTES for v in given):
                self._parent.update(dict.fromkeys(leaves[1:], leaves[0]))
                leaves, found_together = leaves[:1], True
            total = bool(given) and not self.totals.isdisjoint(op.outputs)
            if len(leaves) > 1 or total or (given and len(given) < len(read) and not large):
                # Small values of leaves are joined, to each other or to what was joined before.
                wave = max(needs[v].wave + (needs[v].leaf is not None) for v in read)
                found = Need(None, wave)
            else:
                found = Need(leaves[0] if leaves else None, max(needs[v].wave for v in read))
            needs.update(dict.fromkeys(op.outputs, found))
        return found_together

    def _check(self, op: Op, read: list[Value]) -> None:
        if not may_repeat(op):
            leaf = next((n.leaf for v in read if (n := self._needs[v]).leaf is not None), None)
            path = "leaves" if leaf is None else self.hosted[leaf]
            raise CutError(
                f"{self.program.name} cannot keep {path} in host memory: {op.name} in its update "
                "has an effect or talks to other devices, and would run apart from the rest. Leave "
                "that leaf out of host=."
            )
