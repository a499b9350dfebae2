"""What XLA makes of several operations together: kernels of more than one result, and their order.

Element-wise results of the same buffers, all of one size, are written by one kernel (multi-output
fusion), and so is one that reads another which is read by something that fuses with nothing: the
three slices of an array that a convolution of volumes reads are 9 GiB in a 3D U-Net, with what
they are slices of 12. What frees more than it takes does not wait for what stands between: the
list scheduler starts it when it can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxmem.program.gates import gates
from jaxmem.program.ir import Op, Value
from jaxmem.program.primitives import Kind


@dataclass(frozen=True)
class Kernels:
    """The kernels of a straight line, before XLA puts them together.

    Attributes:
        ops: the operations, and ``kinds`` of each.
        reads: the buffers that each operation reads.
        made: the buffers that each operation makes.
        gates: for each operation the last barrier that what it reads went through; -1 for none.
            What waits behind different barriers is not in one kernel.
        place: the operation that makes each buffer.
        beside: buffers that are written beside the first that is made of them, in one kernel.
    """

    ops: Sequence[Op]
    kinds: Sequence[Kind]
    reads: Sequence[frozenset[Value]]
    made: Sequence[tuple[Value, ...]]
    gates: Sequence[int]
    place: Mapping[Value, int]
    beside: Collection[Value] = ()

    @classmethod
    def of(
        cls,
        ops: Sequence[Op],
        kinds: Sequence[Kind],
        roots: Mapping[Value, tuple[Value, ...]],
        made: Sequence[tuple[Value, ...]],
        beside: Collection[Value] = (),
    ) -> Kernels:
        """Those of operations whose values have these buffers behind them."""
        reads = [frozenset([r for v in op.values for r in roots[v]]) for op in ops]
        place = {value: index for index, values in enumerate(made) for value in values}
        return cls(ops, kinds, reads, made, gates(ops, kinds), place, beside)

    def runs_at(self, kept: Collection[Value]) -> tuple[int, ...]:
        """The operation in whose place the kernel of each operation runs.

        Args:
            kept: buffers that outlive the line.
        """
        at = self._with_others()
        leads = {n for index, n in enumerate(at) if n != index}
        last, taken = self._last_reads(), set[int]()
        for index in range(len(at)):
            if at[index] == index and index not in leads and self._is_light(index):
                freed = [r for r in self.reads[index] if last[r] == index and r in self.place]
                more = sum([r.nbytes for r in freed if r not in kept])
                if more > sum([v.nbytes for v in self.made[index]]):
                    at[index] = self._as_early(index, at, taken)
                    taken.add(at[index])
        return tuple(at)

    def in_tuples(
        self, at: Sequence[int], passed: Mapping[Op, Collection[Value]]
    ) -> frozenset[Value]:
        """The buffers that their kernels give as parts of a tuple.

        Nothing is written over them: what reads them reads an element of the tuple, and XLA's
        buffer assignment looks for what makes it among the operands. (A convolution gives one with
        its workspace, which is seen without looking closely.)

        Args:
            at: the operation in whose place the kernel of each operation runs.
            passed: for reductions, the buffers that a kernel they are part of reads or makes.
        """
        results: dict[int, list[Value]] = {}
        for index, values in enumerate(self.made):
            if self._is_light(index):
                results.setdefault(at[index], []).extend(values)
        found = {v for values in results.values() if len(values) > 1 for v in values}
        summed = {v for buffers in passed.values() for v in buffers if v in self.place}
        found.update(v for v in summed if self._is_light(self.place[v]))
        return frozenset(found)

    def reduced_twice(self, passed: Mapping[Op, Collection[Value]]) -> frozenset[int]:
        """Element-wise operations whose kernels have several reductions of their results in them.

        One of them orders such a kernel. It writes over nothing that the others read.

        Args:
            passed: as for :meth:`in_tuples`.
        """
        counts: dict[int, int] = {}
        for buffers in passed.values():
            for index in {self.place[v] for v in buffers if v in self.place}:
                counts[index] = counts.get(index, 0) + self._is_light(index)
        return frozenset([index for index, count in counts.items() if count > 1])

    def _is_light(self, index: int) -> bool:
        """Whether an operation is element-wise and writes something."""
        return index >= 0 and self.kinds[index] is Kind.FUSED and bool(self.made[index])

    def _with_others(self) -> list[int]:
        """The first operation of the kernel that each one is part of."""
        at = list(range(len(self.ops)))
        first: dict[tuple, int] = {}
        needed = self._needed()
        for index, gate in enumerate(self.gates):
            if not self._is_light(index) or len(self.made[index]) != 1 or not self.reads[index]:
                continue
            size = self.made[index][0].aval.size
            read = self._read_beside(index, (size, gate), at, first)
            source = next(iter(read))
            maker = self.place.get(source, -1) if len(read) == 1 else -1
            alike = source in needed and source.aval.size == size
            if alike and self._is_light(maker) and maker >= gate:
                at[index] = at[maker]
            else:
                at[index] = at[first.setdefault((read, size, gate), index)]
        return at

    def _read_beside(
        self, index: int, kind: tuple, at: Sequence[int], first: Mapping[tuple, int]
    ) -> frozenset[Value]:
        """What an operation reads, without what is written beside its result by a kernel so far."""
        reads = self.reads[index]
        found = reads.intersection(self.beside) if self.beside else frozenset[Value]()
        if not found:
            return reads
        others = reads.difference(found).union(*[self.reads[self.place[v]] for v in found])
        lead = first.get((others, *kind))
        makers = {at[self.place[v]] for v in found}
        return others if lead is not None and makers == {at[lead]} else reads

    def _needed(self) -> set[Value]:
        """The buffers that something reads which nothing is fused with."""
        return {
            root
            for kind, reads in zip(self.kinds, self.reads, strict=True)
            if kind is Kind.OPAQUE
            for root in reads
        }

    def _last_reads(self) -> dict[Value, int]:
        last: dict[Value, int] = {}
        for index, (op, kind) in enumerate(zip(self.ops, self.kinds, strict=True)):
            if self.made[index] or kind is Kind.OPAQUE or op.barrier:
                last.update(dict.fromkeys(self.reads[index], index))
        return last

    def _as_early(self, index: int, at: Sequence[int], taken: Collection[int]) -> int:
        """The first operation behind all that one reads in whose place nothing else runs."""
        made = [at[self.place[r]] for r in self.reads[index] if r in self.place]
        ready = max([self.gates[index], *made])
        places = (n for n in range(ready + 1, index) if n not in taken and self._is_idle(n))
        return next(places, index)

    def _is_idle(self, index: int) -> bool:
        return not self.made[index] and self.kinds[index] is not Kind.OPAQUE
