"""Which updates may go through their leaves some rows at a time, and what is done for those.

A leaf that is a stack of layers, or a large table, need not be on the device at once where each row
of what an update gives needs only that row of what it takes. That is asked from the results back
to the arguments: for each operation there is a rule that says which axis of an operand runs
along with an axis of the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jaxmem.program.ir import Atom, Block, Loop, Op, Value, kind_of_array
from jaxmem.program.primitives import may_repeat
from jaxmem.program.rowrules import AcrossRowsError, along, resized


@dataclass(frozen=True, eq=False)
class Rows:
    """An update that may go through its leaves some rows at a time.

    Attributes:
        length: how many rows there are.
        inputs: what the update takes, and ``outputs`` what it gives.
        leaves: those of its inputs that wait in host memory; their rows are along the first axis.
        axes: the axis of rows of what is taken and made in rows.
        once: what is done once, before; it gives what others need of it.
        each: what is done for every row, in order.
        taken: of what is not made there, what is taken in rows, and ``whole`` as it is.
    """

    length: int
    inputs: tuple[Value, ...]
    outputs: tuple[Atom, ...]
    leaves: tuple[Value, ...]
    axes: Mapping[Value, int]
    once: Block
    each: tuple[Op, ...]
    taken: tuple[Value, ...]
    whole: tuple[Value, ...]

    @property
    def in_rows(self) -> tuple[Value, ...]:
        """The results that are made in rows."""
        found = (v for v in self.outputs if isinstance(v, Value) and v in self.axes)
        return tuple(dict.fromkeys(found))

    @property
    def unread(self) -> frozenset[Value]:
        """Leaves that are only written: no row of a result needs what is there."""
        read = {v for op in self.each for v in _taken_by(op)}
        return frozenset(v for v in self.leaves if v not in read)

    def row_bytes(self) -> int:
        """Bytes of one row of all leaves."""
        return sum(v.nbytes for v in self.leaves) // self.length

    def block(self, count: int) -> Block:
        """What is done for ``count`` rows: of ``taken``, then ``whole``; it gives ``in_rows``."""
        known: dict[Value, Value] = {}

        def some(value: Value) -> Value:
            if value not in self.axes:
                return value
            if value not in known:
                known[value] = Value(_of_rows(value.aval, self.axes[value], count))
            return known[value]

        inputs = (*map(some, self.taken), *self.whole)
        ops = []
        for op in self.each:
            axis = self.axes[op.outputs[0]]
            eqn = op.eqn.replace(params=resized(op, axis, count))
            read: list[Atom] = [some(a) if isinstance(a, Value) else a for a in op.inputs]
            ops.append(Op(eqn, read, [some(v) for v in op.outputs]))
        return Block("", inputs, tuple(ops), tuple(map(some, self.in_rows)))


@dataclass(frozen=True, eq=False)
class Beside:
    """A loop of which each turn makes a row that an update takes: the gradients of a layer.

    Attributes:
        op: the loop, and ``before`` what is done before it.
        made: for values that the update takes by rows which stacked result of the loop each is.
        called: what the loop and ``before`` read that the update knows under another name.
    """

    op: Op
    before: tuple[Op, ...]
    made: Mapping[Value, int]
    called: Mapping[Value, Value]

    @property
    def loop(self) -> Loop:
        """How the loop goes."""
        assert self.op.loop is not None
        return self.op.loop


@dataclass(frozen=True, eq=False)
class Chunks:
    """How an update goes through its leaves.

    Attributes:
        rows: what is done for each row.
        count: how many rows are taken at a time.
        homes: for each result that goes to host memory the leaf whose place it takes.
        over: arguments on the device whose buffers results may take.
        beside: the loop that makes the rows it takes, if it goes along with one.
    """

    rows: Rows
    count: int
    homes: dict[Value, Value]
    over: tuple[Value, ...] = ()
    beside: Beside | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are fetched at a time."""
        return self.rows.row_bytes() * self.count

    @property
    def fetched_bytes(self) -> int:
        """Bytes that come from the host."""
        # An update after the loop fetches all leaves: one is read while another is written.
        left = self.rows.unread if self.beside else ()
        return sum(v.nbytes for v in self.rows.leaves if v not in left)

    @property
    def sent_bytes(self) -> int:
        """Bytes that go to the host."""
        return sum(v.nbytes for v in self.homes)

    def under(self, results: Sequence[Value], whole: Collection[Atom] = ()) -> dict[Value, Value]:
        """For results on the device the argument whose buffer is written over, row by row.

        Args:
            results: those that are made in rows.
            whole: arguments of which something else needs all rows.
        """
        rows, found = self.rows, dict[Value, Value]()
        needed = {*rows.once.inputs, *whole}
        free = [v for v in self.over if v in rows.taken and v not in needed]
        for value in results:
            for argument in free:
                same = rows.axes[argument] == rows.axes[value]
                if same and kind_of_array(argument) == kind_of_array(value):
                    found[value] = argument
                    free.remove(argument)
                    break
        return found


def _taken_by(op: Op) -> Sequence[Value]:
    """What ``op`` reads; of a choice that is made already, what is chosen."""
    which = op.inputs[0] if op.inputs else None
    if op.eqn.primitive.name == "select_n" and isinstance(which, jex.Literal):
        chosen = op.inputs[1 + int(which.val)]
        return [chosen] if isinstance(chosen, Value) else []
    return op.values


def rows_at_once(rows: Rows, nbytes: int) -> int:
    """How many rows of all leaves are about so many bytes: a divisor of all where one is near.

    Less than half of them, as there must be something to fetch ahead.
    """
    most = max(1, min(nbytes // max(1, rows.row_bytes()), rows.length // 2))
    for count in range(most, most // 2, -1):
        if rows.length % count == 0:
            return count
    return most


def rows_of(block: Block, leaves: Sequence[Value], results: Sequence[Value]) -> Rows | None:
    """How an update goes through its leaves by rows; ``None`` where a row needs others.

    Args:
        block: the update.
        leaves: those of its inputs that wait in host memory.
        results: those of its outputs that go there.
    """
    lengths = {v.aval.shape[0] if v.aval.shape else 0 for v in (*leaves, *results)}
    if len(lengths) != 1 or not block.ops:
        return None
    (length,) = lengths
    if length < 2 or any(v in block.inputs for v in results):
        return None
    try:
        return _Finder(block, leaves, results, length).found()
    except AcrossRowsError:
        return None


class _Finder:
    """Goes from the results of an update to its arguments.

    Attributes:
        axes: values that are needed in rows; ``whole`` those that are needed as they are, and
            ``read`` those of them that every row needs.
        away: values that need a leaf in host memory.
    """

    def __init__(
        self, block: Block, leaves: Sequence[Value], results: Sequence[Value], length: int
    ):
        self.block, self.leaves, self.length = block, tuple(leaves), length
        self.axes: dict[Value, int] = {}
        self.whole: dict[Value, None] = {}
        self.read: dict[Value, None] = {}
        self.away = set(leaves)
        for op in block.ops:
            if self.away.intersection(op.values):
                self.away.update(op.outputs)
        for atom in block.outputs:
            if isinstance(atom, Value):
                rows = atom in results or self._has_rows(atom)
                self._need(atom, 0 if rows else None)
        for leaf in leaves:
            self._need(leaf, 0)

    def _has_rows(self, value: Value) -> bool:
        return value in self.away and value.aval.shape[:1] == (self.length,)

    def _need(self, value: Value, axis: int | None) -> None:
        if axis is None:
            if value in self.away:
                raise AcrossRowsError
            self.whole[value] = None
        elif self.axes.setdefault(value, axis) != axis or value.aval.shape[axis] != self.length:
            raise AcrossRowsError

    def found(self) -> Rows:
        once: list[Op] = []
        each: list[Op] = []
        made: set[Value] = set()
        for op in reversed(self.block.ops):
            if not may_repeat(op):
                raise AcrossRowsError
            wanted = [v for v in op.outputs if v in self.axes and v not in self.whole]
            if wanted and self._by_rows(op, wanted):
                each.append(op)
                made.update(op.outputs)
            elif any(v in self.whole or v in self.axes for v in op.outputs):
                # It is made once, and rows are taken from it.
                for value in op.values:
                    self._need(value, None)
                once.append(op)
        if self.read.keys() & self.axes.keys():
            raise AcrossRowsError
        inputs = set(self.block.inputs)
        results = [v for v in self.block.outputs if isinstance(v, Value)]
        used = {*results, *self.leaves, *(v for op in each for v in op.values)}
        taken = [v for v in self.axes if v not in made and v in used]
        handed = dict.fromkeys([*self.read, *taken, *(v for v in results if v in self.whole)])
        return Rows(
            length=self.length,
            inputs=self.block.inputs,
            outputs=self.block.outputs,
            leaves=self.leaves,
            axes=dict(self.axes),
            once=Block(
                "",
                tuple(v for v in self.block.inputs if v in self.whole),
                tuple(reversed(once)),
                tuple(v for v in handed if v not in inputs),
            ),
            each=tuple(reversed(each)),
            taken=tuple(taken),
            whole=tuple(self.read),
        )

    def _by_rows(self, op: Op, wanted: Sequence[Value]) -> bool:
        """Ask for the operands by rows; false where it is to be made once instead."""
        apart = not self.away.intersection(op.values)
        axes = {self.axes[v] for v in wanted}
        try:
            if len(axes) != 1 or any(v in self.whole for v in op.outputs):
                raise AcrossRowsError
            (axis,) = axes
            needed = list(zip(op.inputs, along(op, axis), strict=True))
            for atom, own in needed:
                self._check(atom, own)
        except AcrossRowsError:
            if apart:
                return False
            raise
        for value in op.outputs:
            self.axes[value] = axis
        for atom, own in needed:
            if isinstance(atom, Value):
                self._need(atom, own)
                if own is None:
                    self.read[atom] = None
        return True

    def _check(self, atom: Atom, axis: int | None) -> None:
        """Raise before anything is asked for that cannot be."""
        if axis is None:
            if isinstance(atom, Value) and atom in self.away:
                raise AcrossRowsError
        elif (
            not isinstance(atom, Value)
            or atom.aval.shape[axis] != self.length
            or self.axes.get(atom, axis) != axis
        ):
            raise AcrossRowsError


def _of_rows(aval: Any, axis: int, count: int) -> Any:
    shape = list(aval.shape)
    shape[axis] = count
    return aval.update(shape=tuple(shape))
