"""The pieces of a step that is cut, in the order they run, and what each may write over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jaxmem.program.ir import Atom, Block, Value, kind_of_array


@dataclass(frozen=True, eq=False)
class Part:
    """One piece of a step that is cut.

    Attributes:
        block: what it does.
        reads: its inputs, and ``names`` its outputs, as the other pieces call them.
        fetched: those of its inputs that wait in host memory.
        sent: those of its outputs that go there.
        over: positions of inputs that nobody reads afterwards.
        donated: those of them whose buffers outputs take.
        stage: whether it is a stage of what computes gradients.
    """

    block: Block
    reads: tuple[Value, ...]
    names: tuple[Atom, ...]
    fetched: tuple[Value, ...] = ()
    sent: tuple[Value, ...] = ()
    over: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    stage: bool = False

    @property
    def fetched_bytes(self) -> int:
        """Bytes that come from the host."""
        return sum(v.nbytes for v in self.fetched)

    @property
    def sent_bytes(self) -> int:
        """Bytes that go to the host."""
        return sum(v.nbytes for v in self.sent)

    @property
    def moves(self) -> bool:
        """Whether anything is copied for it."""
        return bool(self.fetched or self.sent)


def lined_up(
    parts: Sequence[Part], kept: Collection[Value], lasting: Collection[Value]
) -> tuple[Part, ...]:
    """The parts with what they may write over: what nobody reads after them.

    Args:
        parts: in order.
        kept: results that stay on the device.
        lasting: arguments and constants that are the caller's own.
    """
    last = {v: n for n, part in enumerate(parts) for v in part.reads}
    found = []
    for n, part in enumerate(parts):
        over = tuple(
            position
            for position, v in enumerate(part.reads)
            if v in part.fetched or (last[v] == n and v not in kept and v not in lasting)
        )
        donated = _taken(part.block.inputs, over, part.block.outputs)
        found.append(replace(part, over=over, donated=donated))
    return tuple(found)


def _taken(
    inputs: Sequence[Value], over: Sequence[int], outputs: Sequence[Atom]
) -> tuple[int, ...]:
    """Those inputs whose buffers outputs of the same shape and dtype can take."""
    free = Counter(kind_of_array(v) for v in outputs)
    taken = []
    for position in over:
        kind = kind_of_array(inputs[position])
        if free[kind]:
            free[kind] -= 1
            taken.append(position)
    return tuple(taken)
