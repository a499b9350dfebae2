"""The pieces of a step that is cut, in the order they run, and what each may write over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.program.ir import Atom, Block, Program, Value, fetched_in, kind_of_array
from jaxmem.program.rowwise import Chunks


@dataclass(frozen=True, eq=False)
class Part:
    """One piece of a step that is cut.

    Attributes:
        block: what it does.
        reads: its inputs, and ``names`` its outputs, as the other pieces call them.
        fetched: those of its inputs that wait in host memory and are copied for it.
        sent: those of its outputs that are copied there.
        chunks: how it takes its leaves from host memory by itself and writes them back, if it does.
        waiting: those of its inputs of which its loops fetch rows by themselves.
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
    chunks: Chunks | None = None
    waiting: tuple[Value, ...] = ()

    @property
    def leaves(self) -> tuple[Value, ...]:
        """Those of its inputs that wait in host memory."""
        own = self.chunks.rows.leaves if self.chunks else ()
        return (*own, *self.fetched, *self.waiting)

    @property
    def hosted(self) -> tuple[Value, ...]:
        """Those of its outputs that it leaves in host memory itself."""
        return tuple(self.chunks.homes) if self.chunks else ()

    @property
    def along(self) -> bool:
        """Whether it is a loop with updates that go along with it."""
        return self.chunks is not None and self.chunks.beside is not None

    @property
    def fetched_bytes(self) -> int:
        """Bytes that are copied to the device for it."""
        return sum(v.nbytes for v in self.fetched)

    @property
    def sent_bytes(self) -> int:
        """Bytes of it that are copied to the host."""
        return sum(v.nbytes for v in self.sent)

    @property
    def moves(self) -> bool:
        """Whether anything is copied for it."""
        return bool(self.fetched or self.sent)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes that come from the host, and that go there, whoever copies them."""
        inside = self.chunks
        more = (inside.fetched_bytes, inside.sent_bytes) if inside else (0, 0)
        looped = self.waiting or self.along
        rows = sum(fetched_in(op) for op in self.block.ops) if looped else 0
        if inside and inside.beside:
            # A row that the loop and the update read comes once.
            both = set(inside.rows.leaves) - inside.rows.unread
            rows -= sum(v.nbytes for v, leaf in inside.beside.called.items() if leaf in both)
        return self.fetched_bytes + more[0] + rows, self.sent_bytes + more[1]


def lined_up(
    parts: Sequence[Part],
    kept: Collection[Value],
    lasting: Collection[Value],
    layouts: Mapping[Value, Any] | None = None,
) -> tuple[Part, ...]:
    """The parts with what they may write over: what nobody reads after them.

    Args:
        parts: in order.
        kept: results that stay on the device.
        lasting: arguments and constants that are the caller's own.
        layouts: over several devices, how values are split as far as that is known: a buffer is
            of use to what is split alike.
    """
    layouts = layouts or {}
    last = {v: n for n, part in enumerate(parts) for v in part.reads}
    found = []
    for n, part in enumerate(parts):
        stays = {*part.leaves} - {*part.fetched}
        over = tuple(
            position
            for position, v in enumerate(part.reads)
            if v in part.fetched
            or (last[v] == n and v not in kept and v not in lasting and v not in stays)
        )
        named = zip(part.names, part.block.outputs, strict=True)
        here = [(v, layout_of(layouts, name)) for name, v in named if v not in part.hosted]
        given = [
            (v, layouts.get(name)) for name, v in zip(part.reads, part.block.inputs, strict=True)
        ]
        donated = _taken(given, over, here)
        if part.chunks is None:
            found.append(replace(part, over=over, donated=donated))
            continue
        chunks = replace(part.chunks, over=tuple(part.block.inputs[p] for p in donated))
        replaced = [p for p, v in enumerate(part.reads) if v in chunks.homes.values()]
        where = tuple(sorted({*donated, *replaced}))
        found.append(replace(part, over=over, donated=where, chunks=chunks))
    return tuple(found)


def _taken(
    inputs: Sequence[tuple[Value, Any]], over: Sequence[int], outputs: Sequence[tuple[Atom, Any]]
) -> tuple[int, ...]:
    """Those inputs whose buffers outputs of the same shape, dtype and layout can take."""
    free = Counter((kind_of_array(v), layout) for v, layout in outputs)
    taken = []
    for position in over:
        value, layout = inputs[position]
        kind = kind_of_array(value), layout
        if free[kind]:
            free[kind] -= 1
            taken.append(position)
    return tuple(taken)


def layout_of(layouts: Mapping[Value, Any], atom: Atom) -> Any:
    """The layout of what is given as a result; ``None`` where it is not known."""
    return layouts.get(atom) if isinstance(atom, Value) else None


def state_among(program: Program, numbers: Sequence[int]) -> frozenset[int] | None:
    """Which of some arguments of a step are state, counted among these alone."""
    if program.state is None:
        return None
    return frozenset(n for n, number in enumerate(numbers) if number in program.state)


def lasting(program: Program) -> frozenset[Value]:
    """The inputs of a step that stay the caller's own."""
    donated = set(program.donated)
    return frozenset(v for n, v in enumerate(program.block.inputs) if n not in donated)


def donating(first: Program, later: Collection[Value]) -> Program:
    """A first part that donates what is its to give: what it has a place for, read by none later.

    Args:
        first: the part, with arguments marked that the step may give away.
        later: what the other parts read.
    """
    consts = len(first.consts)
    inputs = first.block.inputs[consts:]
    free = replace(
        first,
        arguments=tuple(
            replace(leaf, donated=leaf.donated and v not in later)
            for leaf, v in zip(first.arguments, inputs, strict=True)
        ),
    )
    taken = set(free.places.values())
    return replace(
        free,
        arguments=tuple(
            replace(leaf, donated=consts + n in taken) for n, leaf in enumerate(free.arguments)
        ),
    )
