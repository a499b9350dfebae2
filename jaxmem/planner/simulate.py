"""Execute a written-out schedule on paper: live bytes at every operation, and seconds.

The only judge of bytes before the compiler. It knows nothing of how a schedule was found.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxmem.planner.inplace import carried_on, dying_at, ends_of, kernels_of, written_over
from jaxmem.planner.links import Links
from jaxmem.planner.workspace import Workspace
from jaxmem.program.cost import Rates, exchange_seconds, op_seconds
from jaxmem.program.exchange import exchange
from jaxmem.program.fusion import Fusion, fuse
from jaxmem.program.ir import Atom, Block, Loop, Op, Value
from jaxmem.program.primitives import Kind
from jaxmem.program.trace import opened


@dataclass(frozen=True)
class Lifetime:
    """A buffer: from the operation that makes it to the last one that reads it."""

    value: Value
    start: int
    end: int


@dataclass(frozen=True)
class Simulation:
    """What one straight line of operations needs besides its inputs.

    Attributes:
        temp_bytes: the most temporary bytes live at once; results of the step are not temporary.
        peak_index: the operation at which that happens.
        timeline: temporary bytes live while each operation runs.
        seconds: predicted time: of what is computed, and of what waits for a transfer.
        fusion: what is a buffer, and which operation makes it where.
        ends: the last operation at which each of them is live; what is written over in place is
            not counted at the operation that does so.
        results: those that are results of the step.
        host_bytes: the most temporary bytes in host memory at once.
        over: by what is written over in place the result that is written there.
    """

    temp_bytes: int
    peak_index: int
    timeline: tuple[int, ...]
    seconds: float
    fusion: Fusion
    ends: dict[Value, int]
    results: set[Value]
    host_bytes: int = 0
    over: Mapping[Value, Value] = field(default_factory=dict)

    @property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Every temporary buffer."""
        return tuple(
            Lifetime(value, 0 if value in self.fusion.early else start, self.ends[value])
            for start, made in zip(self.fusion.at, self.fusion.made, strict=True)
            for value in made
            if value not in self.results
        )

    def makers(self, ops: Sequence[Op]) -> dict[Value, Op]:
        """The operation of ``ops``, which were simulated, that makes each buffer."""
        return {v: op for op, made in zip(ops, self.fusion.made, strict=True) for v in made}


@dataclass(frozen=True)
class _Within:
    """What is special to a line inside an operation: a loop's iteration, or what is called.

    Attributes:
        written: results that are rows of an array, which is not of the line.
        rows: inputs that are such rows.
    """

    written: Sequence[Atom] = ()
    rows: frozenset[Value] = frozenset()


@dataclass
class Simulator:
    """Simulates blocks of one program on one device; remembers loop bodies it has seen.

    Attributes:
        rates: of the device.
        workspaces: of operations of the program as written, where they are known.
    """

    rates: Rates
    workspaces: Mapping[Op, Workspace] = field(default_factory=dict)
    _bodies: dict[int, tuple[Block, Simulation]] = field(default_factory=dict)
    _rows: dict[int, tuple[Block, float]] = field(default_factory=dict)
    _inner: dict[Op, int] = field(default_factory=dict)
    _seconds: dict[Op, float] = field(default_factory=dict)
    _opaque: dict[tuple[Op, int], float] = field(default_factory=dict)

    def fused(self, block: Block, ops: Sequence[Op]) -> Fusion:
        """What is a buffer of ``ops`` that stand for a block's own, before they are written out.

        What a simulation went by is in it.
        """
        return self._fuse(block.inputs, ops, block.outputs)

    def _fuse(
        self,
        inputs: Sequence[Value],
        ops: Sequence[Op],
        outputs: Sequence[Atom],
        closely: bool = False,
        weighed: bool = False,
    ) -> Fusion:
        rates = self.rates
        return fuse(
            inputs,
            ops,
            outputs,
            barriers_keep=rates.barriers_keep,
            stacks_at_once=rates.stacks_at_once,
            tuples=rates.together,
            closely=closely and rates.together,
            weighing=rates.weighing if weighed else None,
        )

    def step(self, block: Block) -> Simulation:
        """Simulate the whole step: its results have buffers of their own."""
        held = {v for v in block.outputs if isinstance(v, Value) and not v.host}
        return self._run(block.inputs, block.ops, block.outputs, held, closely=True)

    def iteration(self, loop: Loop) -> Simulation:
        """Simulate one iteration of a loop; rows of an array that it fills are written out.

        New carries are temporary, but those that a loop inside it carries on.
        """
        body = loop.body
        known = self._bodies.get(id(body))
        if known is None:
            carried = loop.num_carry - loop.filled
            rows = frozenset(body.inputs[loop.num_consts + loop.num_carry :])
            within = _Within(body.outputs[carried:], rows)
            held = carried_on(loop)
            found = self._run(body.inputs, body.ops, body.outputs[:carried], held, within)
            known = self._bodies[id(body)] = (body, found)
        return known[1]

    def _called(self, block: Block) -> Simulation:
        """Simulate what an operation calls: its results are temporary."""
        known = self._bodies.get(id(block))
        if known is None:
            found = self._run(block.inputs, block.ops, block.outputs, set(), _Within())
            known = self._bodies[id(block)] = (block, found)
        return known[1]

    def _run(
        self,
        inputs: Sequence[Value],
        ops: Sequence[Op],
        outputs: Sequence[Atom],
        held: set[Value],
        within: _Within | None = None,
        closely: bool = False,
    ) -> Simulation:
        written, rows = (within.written, within.rows) if within else ((), frozenset[Value]())
        fusion = self._fuse(inputs, ops, outputs, closely, weighed=True)
        roots, kinds = fusion.roots, fusion.kinds
        ends = ends_of(ops, fusion, (*outputs, *written))
        kept_out = {root for value in held for root in roots[value]}
        dying = dying_at(ends, kept_out)
        seconds, timeline = 0.0, []
        live = _bytes_of(v for v in fusion.early if v not in kept_out)
        replaced: dict[Value, int] = {}
        shared: dict[Value, Value] = {}
        kernels = kernels_of(fusion, kept_out)
        for index, (op, kind, made) in enumerate(zip(ops, kinds, fusion.made, strict=True)):
            dead = dying.get(index)
            now = live
            if made:
                seconds += self.seconds(op, kind, fusion)
            if kernel := kernels.get(index):
                live += sum([v.nbytes for v in kernel.born])
                now = live
                if dead and kernel.in_order:
                    by = kernel.maker
                    over = written_over(ops[by], kinds[by], kernel.born, dead, fusion.spared[by])
                    now -= sum([v.nbytes for v in over])
                    replaced.update(dict.fromkeys(over, index))
                    shared.update(over)
            if kind is Kind.OPAQUE:
                now += self.working_bytes(op)
                if (room := self.workspaces.get(op.origin)) is not None:
                    there = [v for v in made if v not in kept_out]
                    read = rows.intersection(r for v in op.values for r in roots[v])
                    now += _beside(room, there, dead or (), read)
            timeline.append(now)
            if dead:
                live -= sum([v.nbytes for v in dead])
        peak = max(timeline, default=0)
        at = timeline.index(peak) if timeline else 0
        ends.update({value: index - 1 for value, index in replaced.items()})
        host_bytes = 0
        if any(op.transfer or op.loop is not None for op in ops):
            seconds = self._with_transfers(ops, fusion, seconds, within is not None)
            host_bytes = self._host_bytes(ops, (*outputs, *written))
        return Simulation(
            peak, at, tuple(timeline), seconds, fusion, ends, kept_out, host_bytes, shared
        )

    def seconds_of(
        self, inputs: Sequence[Value], ops: Sequence[Op], outputs: Sequence[Atom]
    ) -> list[float]:
        """Predicted time of each operation of a line; transfers take none of the line's own."""
        fusion = self._fuse(inputs, ops, outputs)
        return [
            self.seconds(op, kind, fusion) if made else 0.0
            for op, kind, made in zip(ops, fusion.kinds, fusion.made, strict=True)
        ]

    def _with_transfers(
        self, ops: Sequence[Op], fusion: Fusion, computing: float, repeated: bool
    ) -> float:
        """Predicted time of a line whose computations alone take ``computing``.

        In a straight line each transfer starts when it is written out and its link is free, and
        what needs it waits; :class:`Links` says how long it takes. The iterations of a loop follow
        each other without a pause, so that the slowest of computing and the two links decides.
        """
        if not any(op.transfer for op in ops):
            return computing
        if repeated:
            sent = sum(self._link_seconds(op) for op in ops if op.transfer == "send")
            fetched = sum(self._link_seconds(op) for op in ops if op.transfer == "fetch")
            return max(computing, sent, fetched)
        now, links = 0.0, Links(self.rates)
        for op, kind, made in zip(ops, fusion.kinds, fusion.made, strict=True):
            if op.transfer:
                (result,) = op.outputs
                earliest = max([now, *(links.ended.get(v, 0.0) for v in op.values)])
                links.copy(op.transfer, result, result.part_bytes, earliest)
                continue
            waited = (links.ended[v] for v in _waited(op, made, fusion) if v in links.ended)
            now = max([now, *waited])
            now += self.seconds(op, kind, fusion) if made else 0.0
        return max(now, *links.free.values())

    def _link_seconds(self, op: Op) -> float:
        """Time that a transfer occupies its link."""
        return self.rates.link_seconds(op.transfer, op.outputs[0].part_bytes)

    def _host_bytes(self, ops: Sequence[Op], outputs: Sequence[Atom]) -> int:
        """The most bytes in host memory at once; what is given or returned there is not counted."""
        behind: dict[Value, Value] = {}
        start: dict[Value, int] = {}
        end: dict[Value, int] = {}
        inside = [0] * len(ops)
        for index, op in enumerate(ops):
            if op.loop is not None:
                inside[index] = self.iteration(op.loop).host_bytes
            for value in op.values:
                if value.host:
                    end[behind.get(value, value)] = index
            for place, result in enumerate(op.outputs):
                if result.host and op.barrier:
                    source = op.inputs[place]
                    assert isinstance(source, Value)
                    behind[result] = behind.get(source, source)
                elif result.host:
                    start[result] = end[result] = index
        returned = {behind.get(v, v) for v in outputs if isinstance(v, Value)}
        change = [0] * (len(ops) + 1)
        for value in start.keys() - returned:
            change[start[value]] += value.host_bytes
            change[end[value] + 1] -= value.host_bytes
        live = itertools.accumulate(change)
        return max((a + b for a, b in zip(live, inside, strict=False)), default=0)

    def working_bytes(self, op: Op) -> int:
        """Bytes that live only inside ``op``: a loop's iteration, a call's temporaries."""
        if op.transfer:
            return 0
        known = self._inner.get(op.origin) if op.loop is None else None
        if known is None:
            inner = self.inside(op)
            known = inner[1].temp_bytes if inner else 0
            if op.loop is None:
                parts = exchange(op.origin)
                known = int(known * parts.share) + parts.working_bytes
                self._inner[op.origin] = known
        return known

    def inside(self, op: Op) -> tuple[Block, Simulation] | None:
        """The block inside ``op`` that needs the most bytes: a loop's body, one of its calls."""
        if op.loop is not None:
            return op.loop.body, self.iteration(op.loop)
        blocks = () if op.barrier or op.transfer else opened(op.eqn)
        simulated = [(block, self._called(block)) for block in blocks]
        return max(simulated, key=lambda pair: pair[1].temp_bytes, default=None)

    def _stacking(self, loop: Loop) -> float:
        """Seconds an iteration takes to write its rows into stacks, and to take out those it reads.

        A row of what is element-wise is written where it is computed, and read where it is used;
        anything else is copied: of a scanned GPT's residuals that is a fifth of the step.
        """
        known = self._rows.get(id(loop.body))
        if known is None:
            body, first = loop.body, loop.num_consts + loop.num_carry
            slices = {v for v in body.inputs[first:] if v.nbytes}
            carried = loop.num_carry - loop.filled
            fusion = self._fuse(body.inputs, body.ops, body.outputs[:carried])
            written = [v for v in body.outputs[carried:] if isinstance(v, Value) and v.nbytes]
            moved = sum(v.nbytes + sum(r.nbytes for r in fusion.roots[v]) for v in written)
            copied: dict[Value, None] = {}
            for op, kind in zip(body.ops, fusion.kinds, strict=True):
                if kind is Kind.OPAQUE:
                    read = [r for v in op.values for r in fusion.roots[v] if r in slices]
                    copied.update(dict.fromkeys(read))
            moved += 2 * sum(v.nbytes for v in copied)
            known = (body, moved / self.rates.bytes_per_second)
            self._rows[id(body)] = known
        return known[1]

    def seconds(self, op: Op, kind: Kind, fusion: Fusion) -> float:
        """Predicted time of one operation that makes a buffer; a transfer computes nothing."""
        if op.transfer:
            return 0.0
        if op.loop is not None:
            return op.loop.length * (self.iteration(op.loop).seconds + self._stacking(op.loop))
        if kind is Kind.OPAQUE:
            fewer = fusion.fewer_bytes(op)
            known = self._opaque.get((op.origin, fewer))
            if known is None:
                known = op_seconds(op.origin, self.rates, fewer_bytes=fewer)
                self._opaque[op.origin, fewer] = known
            return known
        return fusion.moved_bytes(op) / self.rates.bytes_per_second + self._exchanging(op.origin)

    def _exchanging(self, op: Op) -> float:
        """What devices exchange for an operation that is fused, or fused into."""
        known = self._seconds.get(op)
        if known is None:
            known = self._seconds[op] = exchange_seconds(op, self.rates)
        return known


def _bytes_of(values: Iterable[Value]) -> int:
    return sum([v.nbytes for v in values])


def _waited(op: Op, made: Sequence[Value], fusion: Fusion) -> Iterable[Value]:
    """What ``op`` waits for when it runs: what it reads; a barrier only for copies to the host."""
    if op.barrier:
        return [v for v in op.values if v.host]
    return {root for v in op.values for root in fusion.roots[v]} if made else ()


def _beside(
    workspace: Workspace, made: Sequence[Value], dead: Sequence[Value], rows: Collection[Value]
) -> int:
    """Bytes of an operation's workspace over what is there while it runs.

    Beside the parts of a product that is split are the ``rows`` that it reads, which XLA takes out
    of what a loop goes through. Of other products these are not counted: their number at any time
    is up to XLA's order, and a transformer came to 4% too much with all.
    """
    beside = workspace.beside(_bytes_of(made), _bytes_of(dead))
    return beside + (_bytes_of(rows) if workspace.parts_bytes else 0)
