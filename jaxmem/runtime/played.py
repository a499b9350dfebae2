"""How long a compiled program waits for copies to and from the host, by its own schedule.

The compiler decides when a copy starts and what waits for it. Played through in that order, with
the rates of the target, a program tells more than the schedule on paper that it was made of: a GPT
of 1.3e9 parameters whose moments were in host memory waited 11 ms on paper and 63 on an H100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem.hlo.module import HOST_SPACE, Computation, Instruction, Module, Shape
from jaxmem.hlo.schedule import body_of
from jaxmem.hlo.work import is_name, work_of
from jaxmem.planner.links import Links
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Transfer

# Turns of a loop that are played; those after them take as long as the last one.
_MOST_TURNS = 16
_EXCHANGES = (
    "all-reduce", "all-gather", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all", "reduce-scatter",
)  # fmt: skip


@dataclass(frozen=True)
class Played:
    """What a program came to.

    Attributes:
        seconds: of one run.
        exposed_seconds: of them, in which it only waits for copies to or from the host.
    """

    seconds: float
    exposed_seconds: float


def played(module: Module, rates: Rates, computing: float | None = None) -> Played:
    """Go through a compiled and scheduled program of one device.

    Kernels run one after the other; each way of the link takes one copy after the other; what reads
    a copy waits for it. Exchanges between devices are one after the other, beside kernels where the
    compiler has them so.

    Args:
        module: the program.
        rates: of the device; of its links where the program copies anything.
        computing: seconds of all kernels and exchanges together, where that is known better than by
            counting their arithmetic and bytes; each gets its share of it.

    Raises:
        TargetError: it copies, and the rates have no host link.
        WireError: a loop without a body.
    """
    counted = _Player(module, rates, 1.0)
    counted.run(module.entry)
    if computing is None or not counted.computing:
        return counted.told()
    player = _Player(module, rates, computing / counted.computing)
    player.run(module.entry)
    return player.told()


class _Player:
    """The clock of one device.

    Attributes:
        now: when the last kernel ends, and ``waited`` how long it was waited for copies until then.
        computing: seconds of kernels and exchanges.
        links: to and from the host.
        exchanged: when the last exchange between devices ends.
        ends: when what was started beside the kernels ends, but for copies.
    """

    def __init__(self, module: Module, rates: Rates, factor: float):
        self.module, self.rates, self.factor = module, rates, factor
        self.now = self.waited = self.computing = self.exchanged = 0.0
        self.links = Links(rates)
        self.ends: dict[int, float] = {}
        self.known: dict[int, float] = {}

    def told(self) -> Played:
        return Played(self.now, self.waited)

    def run(self, computation: Computation) -> None:
        """Everything of a computation, in the order of the compiler."""
        for ident in computation.sequence:
            self._step(self.module.instructions[ident])

    def _step(self, one: Instruction) -> None:
        opcode = one.opcode
        if is_name(one):
            return
        if opcode == "while":
            self._loop(one)
        elif opcode == "call":
            self.run(self.module.computations[one.called[0]])
        elif opcode == "conditional":
            self.run(self._longest(one.called))
        elif opcode.endswith("-start"):
            self._start(one)
        elif opcode.endswith(("-done", "-update")):
            self._wait(one)
        elif (way := self._way(one)) is not None:
            self._copy(one, way, one)
            self._until_copied(one.id)
        else:
            self._compute(self._seconds(one))

    def _compute(self, seconds: float) -> None:
        self.now += seconds
        self.computing += seconds

    def _seconds(self, one: Instruction) -> float:
        """Of a kernel or an exchange."""
        if one.id not in self.known:
            rates, work = self.rates, work_of(self.module, one)
            seconds = rates.seconds(work)
            if one.opcode.startswith(_EXCHANGES) and rates.d2d_bytes_per_second:
                nbytes = _last(one.shape).nbytes
                seconds = max(seconds, nbytes / rates.d2d_bytes_per_second)
            self.known[one.id] = seconds * self.factor
        return self.known[one.id]

    def _start(self, one: Instruction) -> None:
        """What goes on beside the kernels: a copy, or an exchange."""
        inner = one
        if one.opcode == "async-start":
            inner = self.module.root(one.called[0])
        way = self._way(inner)
        if way is not None:
            self._copy(one, way, inner)
        elif inner.opcode.startswith(_EXCHANGES):
            seconds = self._seconds(inner)
            self.computing += seconds
            self.exchanged = max(self.exchanged, self.now) + seconds
            self.ends[one.id] = self.exchanged
        else:
            self._compute(self._seconds(inner))
            self.ends[one.id] = self.now

    def _wait(self, one: Instruction) -> None:
        started = one.operands[0]
        if one.opcode.endswith("-update"):
            for ends in (self.ends, self.links.ended):
                if started in ends:
                    ends[one.id] = ends[started]
        elif started in self.links.ended:
            self._until_copied(started)
        else:
            self.now = max(self.now, self.ends.get(started, 0.0))

    def _until_copied(self, started: int) -> None:
        waits = max(0.0, self.links.ended[started] - self.now)
        self.now += waits
        self.waited += waits

    def _way(self, one: Instruction) -> Transfer | None:
        """Which way an instruction copies between host and device; ``None`` for all others."""
        read = [self.module.instructions[o].shape for o in one.operands]
        there = any(shape.space == HOST_SPACE for shape in read)
        made = _last(one.shape) if one.opcode != "copy-start" else one.shape.parts[0]
        if made.space == HOST_SPACE:
            return "send"
        return "fetch" if there else None

    def _copy(self, one: Instruction, way: Transfer, inner: Instruction) -> None:
        self.links.copy(way, one.id, self._copied(inner), self.now)

    def _copied(self, inner: Instruction) -> int:
        """Bytes that pass the link."""
        if inner.opcode == "copy-start":
            return inner.shape.parts[0].nbytes
        # A slice that is written, or read: once on either side.
        return int(work_of(self.module, inner).nbytes) // 2

    def _longest(self, called: Sequence[int]) -> Computation:
        """The branch of which all kernels together take longest."""
        branches = [self.module.computations[c] for c in called]
        return max(branches, key=self._whole)

    def _whole(self, computation: Computation) -> float:
        player = _Player(self.module, self.rates, self.factor)
        player.run(computation)
        return player.now

    def _loop(self, loop: Instruction) -> None:
        body = self.module.computations[body_of(self.module, loop)]
        before = self.now, self.waited, self.computing
        for _ in range(min(loop.turns, _MOST_TURNS)):
            before = self.now, self.waited, self.computing
            self.run(body)
        # What a turn starts it waits for, so none of its copies is under way behind the last one;
        # what was asked for before the loop goes on meanwhile.
        more = max(0, loop.turns - _MOST_TURNS)
        self.now += more * (self.now - before[0])
        self.waited += more * (self.waited - before[1])
        self.computing += more * (self.computing - before[2])


def _last(shape: Shape) -> Shape:
    """The result of what returns its operands beside it."""
    return shape.parts[-1] if shape.parts else shape
