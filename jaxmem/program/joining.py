"""Let the update of a stacked leaf go along with the loop that makes its gradients.

The backward pass of a scanned net makes the gradients of one layer in each turn. Stacked up they
take as much memory as the parameters, and what they update is copied when all of them are there.
An update that goes by rows can be done in the loop: the rows of its leaves are fetched a turn
ahead, and each is written back while the next layer's gradients are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jaxmem.program.ir import Atom, Block, Op, Value
from jaxmem.program.loops import goes_by_turns
from jaxmem.program.parts import Part
from jaxmem.program.rowwise import Beside, Chunks, rows_of

# XLA writes out a loop of one turn, and then copies whole arrays.
_SHORTEST = 4


def joined(
    line: Sequence[Part], lent: Mapping[Value, Value], kept: Collection[Value]
) -> list[Part]:
    """The parts of a step in order, with updates joined to the loops that make their rows.

    Args:
        line: the parts; a loop is the last operation of a stage of its own.
        lent: for each input that is lent to the stages, the leaf it is.
        kept: results of the step that stay on the device.
    """
    parts = list(line)
    for stage in line:
        op = _loop_of(stage)
        if op is not None:
            parts = _Joiner(parts, stage, op, lent, kept).joined()
    return parts


def joinable(
    block: Block, names: Sequence[Atom], updates: Sequence[Part]
) -> dict[int, list[Value]]:
    """Loops that make rows for updates that go by rows.

    Args:
        block: what computes gradients, and ``names`` what the others call its outputs.
        updates: the others.

    Returns:
        For the position of each such loop in the block those stacked results of it.
    """
    wanted = {v for part in updates if part.chunks for v in part.reads}
    called = zip(names, block.outputs, strict=True)
    handed = {v for name, v in called if isinstance(v, Value) and name in wanted}
    found = {}
    for n, op in enumerate(block.ops):
        if op.loop is not None and _is_long(op):
            stacks = [v for v in op.outputs[op.loop.num_carry :] if v in handed]
            if stacks:
                found[n] = stacks
    return found


def _loop_of(stage: Part) -> Op | None:
    """The loop that a stage ends with, if all it gives is that loop's."""
    if not stage.stage or stage.chunks is not None or not stage.block.ops:
        return None
    op = stage.block.ops[-1]
    if not _is_long(op):
        return None
    own = set(op.outputs)
    return op if all(v in own for v in stage.block.outputs) else None


def _is_long(op: Op) -> bool:
    """Whether turns are left where the first and the last stand outside the loop."""
    return goes_by_turns(op) and op.loop is not None and op.loop.length >= _SHORTEST


class _Joiner:
    """Joins what it can to one loop.

    Attributes:
        stacks: for each name of a stacked result which of these it is.
        names: what the loop's stage gives, by the names that the other parts know.
    """

    def __init__(
        self,
        line: Sequence[Part],
        stage: Part,
        op: Op,
        lent: Mapping[Value, Value],
        kept: Collection[Value],
    ):
        assert op.loop is not None
        self.line, self.stage, self.op, self.loop = list(line), stage, op, op.loop
        self.lent, self.kept = lent, set(kept)
        stacked = {v: n for n, v in enumerate(op.outputs[self.loop.num_carry :])}
        pairs = list(zip(stage.names, stage.block.outputs, strict=True))
        self.names = {name for name, _ in pairs if isinstance(name, Value)}
        self.stacks = {
            name: stacked[v]
            for name, v in pairs
            if isinstance(name, Value) and isinstance(v, Value) and v in stacked
        }

    def joined(self) -> list[Part]:
        taken: list[Part] = []
        for part in self._followers():
            if self._merged([*taken, part]) is not None:
                taken.append(part)
        found = self._merged(taken) if taken else None
        if found is None:
            return self.line
        left = [part for part in self.line if part not in taken]
        left[left.index(self.stage)] = found
        return left

    def _followers(self) -> list[Part]:
        """The updates by rows of what the loop makes, of which all else is there before it."""
        at = self.line.index(self.stage)
        early = {v for part in self.line[:at] for v in part.names}
        late = {v for part in self.line[at + 1 :] for v in part.names if v not in early}
        found = []
        for part in self.line[at + 1 :]:
            if part.stage:
                break
            rest = {v for v in part.reads if v not in self.stacks}
            ours = len(rest) < len(part.reads)
            if part.chunks and ours and not rest & late and not rest & self.names:
                found.append(part)
        return found

    def _merged(self, taken: Sequence[Part]) -> Part | None:
        """The loop with these updates in it."""
        ops = list(dict.fromkeys(op for part in taken for op in part.block.ops))
        outputs = tuple(v for part in taken for v in part.names if isinstance(v, Value))
        inside = [part.chunks for part in taken if part.chunks]
        leaves = tuple(dict.fromkeys(v for one in inside for v in one.rows.leaves))
        homes = {v: leaf for one in inside for v, leaf in one.homes.items()}
        read = dict.fromkeys(v for part in taken for v in part.reads)
        update = Block("", tuple(read), tuple(ops), outputs)
        rows = rows_of(update, leaves, tuple(homes))
        if rows is None or rows.length != self.loop.length:
            return None
        made = {v: n for v, n in self.stacks.items() if v in read}
        early = {*rows.whole, *rows.once.inputs, *leaves, *outputs}
        if early & made.keys() or any(rows.axes.get(v) != 0 for v in made):
            return None
        called = self._called(set(leaves), set(read))
        others = [
            (name, v)
            for name, v in zip(self.stage.names, self.stage.block.outputs, strict=True)
            if name not in made or self._is_needed(name, taken)
        ]
        # JAX lets results take donated buffers in order, whichever memory they are in.
        order = {v: leaves.index(leaf) for v, leaf in homes.items()}
        mine = sorted(outputs, key=lambda v: order[v] if v in order else len(leaves))
        own = {
            v: name
            for v, name in zip(self.stage.block.inputs, self.stage.reads, strict=True)
            if v not in called
        }
        given = {v: v for v in read if v not in leaves and v not in made and v not in own}
        inputs = {**{v: v for v in leaves}, **given, **own}
        return Part(
            Block(
                "", tuple(inputs), (*self.stage.block.ops, *ops), (*mine, *(v for _, v in others))
            ),
            tuple(inputs.values()),
            (*mine, *(name for name, _ in others)),
            fetched=self.stage.fetched,
            stage=True,
            waiting=tuple(v for v in self.stage.waiting if v not in called),
            chunks=Chunks(
                replace(rows, outputs=tuple(mine)),
                1,
                homes,
                beside=Beside(self.op, self.stage.block.ops[:-1], made, called),
            ),
        )

    def _called(self, leaves: set[Value], read: set[Value]) -> dict[Value, Value]:
        """What the stage reads that the updates know, too: leaves by rows, and handed values."""
        found = {v: self.lent[v] for v in self.stage.waiting if self.lent[v] in leaves}
        for v, name in zip(self.stage.block.inputs, self.stage.reads, strict=True):
            if name is not v and name in read:
                found[v] = name
        return found

    def _is_needed(self, name: object, taken: Sequence[Part]) -> bool:
        """Whether what the loop makes is of use to others than these updates."""
        others = (part for part in self.line if part not in taken)
        return name in self.kept or any(name in part.reads for part in others)
