"""What XLA puts off in a line of operations, because nothing after it waits for it.

Its schedulers start what much depends on, and leave results that only the caller reads for the end.
What those are made of is kept alive until then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from jaxmem.planner.facts import BUFFERS, Facts
from jaxmem.program.ir import Value


class PutOff:
    """Buffers and results of a line that were made and that no barrier waited for yet.

    Args:
        facts: of the line.
        dropped: what is gone; the line adds to it at its turns.

    Attributes:
        turn: the last turn that was passed.
        unsettled: what may be put off, of what was made before ``settled``.
    """

    def __init__(self, facts: Facts, dropped: Collection[Value]):
        self.facts, self.dropped = facts, dropped
        self.results = frozenset(v for v in facts.block.outputs if isinstance(v, Value))
        self.turn = self.settled = 0
        self.unsettled: list[Value] = []
        self._known: dict[Value, float] = {}

    def pass_turn(self, turn: int) -> None:
        """From here on what is dropped is another."""
        self.turn = turn
        self._known.clear()

    def before_loop(self, index: int) -> list[Value]:
        """What frees more than it takes, if it is there before the loop at ``index``."""
        self._note(index)
        return [v for v in self.unsettled if self._frees_from(v) < index]

    def results_before(self, index: int) -> list[Value]:
        """Results of the early part that free what the kernel at ``index`` is the last to read.

        A loss that XLA put off until after the gradient of its logits kept these alive beside it:
        of a GPT whose state was split over four GPUs 1.5 of 11.8 GiB.
        """
        self._note(index)
        end = self.facts.kernel_end[index]
        early = [v for v in self.unsettled if v in self.results and self._is_early(v)]
        return [v for v in early if self._frees_from(v) <= end]

    def waited_for(self, values: Collection[Value]) -> None:
        """A barrier waits for these."""
        self.unsettled = [v for v in self.unsettled if v not in values]

    def _is_early(self, value: Value) -> bool:
        return self.facts.made[value] < self.turn

    def _note(self, index: int) -> None:
        facts = self.facts
        for position in range(self.settled, index):
            if (op := facts.ops[position]).loop is None:
                buffers = facts.kinds[position] in BUFFERS
                self.unsettled += [v for v in op.outputs if buffers or v in self.results]
        self.settled = max(self.settled, index)
        found = [v for v in self.unsettled if v not in self.dropped]
        self.unsettled = [v for v in found if facts.needed_until.get(v, -1) >= index]

    def _frees_from(self, value: Value) -> float:
        """The operation after which ``value`` takes less than what is kept alive for it.

        What is there for this value alone is put off with it, as the sum of a loss is, and then
        what that is made of is kept alive. A large result made of next to nothing had to be there
        while a loop ran that could have had its place, and one over a donated argument that is read
        later had a copy made of that: 476 MiB and not 282.
        """
        if value not in self._known:
            held = sorted(self._held_for(value))
            totals = itertools.accumulate([nbytes for _, nbytes in held])
            froms = (u for (u, _), t in zip(held, totals, strict=True) if t > value.nbytes)
            self._known[value] = next(froms, math.inf)
        return self._known[value]

    def _held_for(self, value: Value) -> list[tuple[int, int]]:
        """Of each buffer that is kept alive for ``value``: until when it is anyway, and bytes."""
        facts, seen, stack = self.facts, {value}, [(value, -1)]
        held: list[tuple[int, int]] = []
        while stack:
            reader, since = stack.pop()
            position = facts.made[reader]
            roots = [r for v in facts.ops[position].values for r in facts.roots[v]]
            for root in dict.fromkeys([r for r in roots if r in facts.made and r not in seen]):
                seen.add(root)
                gone = self._is_early(reader) and root in self.dropped
                until = since if gone else max(since, facts.needed_until.get(root, -1))
                if facts.ops[facts.made[root]].loop is None and self._only_for(root, position):
                    stack.append((root, until))
                else:
                    held.append((until, root.nbytes))
        return held

    def _only_for(self, root: Value, position: int) -> bool:
        """Whether a buffer is read by one operation, itself or through what is fused with it."""
        facts, stack = self.facts, [root]
        while stack:
            for reader in facts.readers.get(stack.pop(), ()):
                made = facts.ops[reader].outputs
                if reader != position and any(facts.roots[v] == (v,) for v in made):
                    return False
                stack += made if reader != position else ()
        return True
