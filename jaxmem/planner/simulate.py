"""Execute a written-out schedule on paper: live bytes at every operation, and seconds.

The only judge of bytes before the compiler. It knows nothing of how a schedule was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxmem.program.cost import Rates, op_seconds
from jaxmem.program.fusion import Fusion, fuse
from jaxmem.program.ir import Atom, Block, Loop, Op, Value
from jaxmem.program.primitives import Kind
from jaxmem.program.trace import opened

# Operations XLA runs in place when the operand they update is not needed any more.
IN_PLACE = frozenset(
    [
        "dynamic_update_slice",
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter_mul",
        "scatter_min",
        "scatter_max",
        "add_any",
        "while",
        "scan",
    ]
)


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
        seconds: predicted time.
        made: the buffers that each operation writes.
        ends: the last operation at which each of them is live; what is written over in place is
            not counted at the operation that does so.
        results: those that are results of the step.
    """

    temp_bytes: int
    peak_index: int
    timeline: tuple[int, ...]
    seconds: float
    made: tuple[tuple[Value, ...], ...]
    ends: dict[Value, int]
    results: set[Value]

    @property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Every temporary buffer."""
        return tuple(
            Lifetime(value, start, self.ends[value])
            for start, made in enumerate(self.made)
            for value in made
            if value not in self.results
        )


@dataclass
class Simulator:
    """Simulates blocks of one program on one device; remembers loop bodies it has seen."""

    rates: Rates
    _bodies: dict[int, tuple[Block, Simulation]] = field(default_factory=dict)
    _inner: dict[Op, int] = field(default_factory=dict)
    _seconds: dict[Op, float] = field(default_factory=dict)

    def step(self, block: Block) -> Simulation:
        """Simulate the whole step: its results have buffers of their own."""
        held = {v for v in block.outputs if isinstance(v, Value)}
        return self._run(block.inputs, block.ops, block.outputs, held)

    def iteration(self, loop: Loop) -> Simulation:
        """Simulate one iteration of a loop; rows of an array that it fills are written out."""
        return self.body(loop.body, loop.num_carry - loop.filled)

    def body(self, block: Block, num_carry: int) -> Simulation:
        """Simulate one iteration of a loop: new carries are temporary, slices are written out."""
        known = self._bodies.get(id(block))
        if known is None:
            demanded = block.outputs[:num_carry]
            known = (
                block,
                self._run(block.inputs, block.ops, demanded, set(), block.outputs[num_carry:]),
            )
            self._bodies[id(block)] = known
        return known[1]

    def _run(
        self,
        inputs: Sequence[Value],
        ops: Sequence[Op],
        outputs: Sequence[Atom],
        held: set[Value],
        written: Sequence[Atom] = (),
    ) -> Simulation:
        fusion = fuse(inputs, ops, outputs)
        roots, kinds = fusion.roots, fusion.kinds
        ends = _ends(ops, fusion, (*outputs, *written))
        kept_out = {root for value in held for root in roots[value]}
        dying: dict[int, list[Value]] = {}
        for value, end in ends.items():
            if value not in kept_out:
                dying.setdefault(end, []).append(value)
        live, seconds, timeline = 0, 0.0, []
        replaced: dict[Value, int] = {}
        for index, (op, kind, made) in enumerate(zip(ops, kinds, fusion.made, strict=True)):
            dead = dying.get(index)
            now = live
            if made:
                born = [v for v in made if v not in kept_out]
                live += sum([v.nbytes for v in born])
                now = live
                if dead and born:
                    over = _written_over(op, kind, born, dead)
                    now -= sum([v.nbytes for v in over])
                    replaced.update(dict.fromkeys(over, index))
                seconds += self.seconds(op, kind, roots)
            if kind is Kind.OPAQUE:
                now += self.working_bytes(op)
            timeline.append(now)
            if dead:
                live -= sum([v.nbytes for v in dead])
        peak = max(timeline, default=0)
        at = timeline.index(peak) if timeline else 0
        ends.update({value: index - 1 for value, index in replaced.items()})
        return Simulation(peak, at, tuple(timeline), seconds, fusion.made, ends, kept_out)

    def working_bytes(self, op: Op) -> int:
        """Bytes that live only inside ``op``: a loop's iteration, a call's temporaries."""
        known = self._inner.get(op.origin) if op.loop is None else None
        if known is None:
            inner = self.inside(op)
            known = inner[1].temp_bytes if inner else 0
            if op.loop is None:
                self._inner[op.origin] = known
        return known

    def inside(self, op: Op) -> tuple[Block, Simulation] | None:
        """The block inside ``op`` that needs the most bytes: a loop's body, one of its calls."""
        if op.loop is not None:
            return op.loop.body, self.iteration(op.loop)
        blocks = () if op.barrier else opened(op.eqn)
        simulated = [(block, self.body(block, len(block.outputs))) for block in blocks]
        return max(simulated, key=lambda pair: pair[1].temp_bytes, default=None)

    def seconds(self, op: Op, kind: Kind, roots: dict) -> float:
        """Predicted time of one operation that makes a buffer."""
        if op.loop is not None:
            return op.loop.length * self.iteration(op.loop).seconds
        if kind is Kind.OPAQUE:
            known = self._seconds.get(op.origin)
            if known is None:
                known = self._seconds[op.origin] = op_seconds(op.origin, self.rates)
            return known
        read = {root for v in op.values for root in roots[v]}
        moved = sum(v.nbytes for v in read) + sum(v.nbytes for v in op.outputs)
        return moved / self.rates.bytes_per_second


def _ends(ops: Sequence[Op], fusion: Fusion, outputs: Sequence[Atom]) -> dict[Value, int]:
    """The last operation at which each buffer that ``ops`` make is live."""
    roots = fusion.roots
    ends: dict[Value, int] = {}
    for index, (op, kind, made) in enumerate(zip(ops, fusion.kinds, fusion.made, strict=True)):
        for value in made:
            ends[value] = index
        if made or kind is Kind.OPAQUE or op.barrier:
            for value in op.values:
                for root in roots[value]:
                    if root in ends:
                        ends[root] = index
    returned = [root for v in outputs if isinstance(v, Value) for root in roots[v]]
    ends.update({root: len(ops) - 1 for root in returned if root in ends})
    return ends


def _written_over(op: Op, kind: Kind, born: Sequence[Value], dying: Sequence[Value]) -> list[Value]:
    """The operands that die here and that results of the same size are written over."""
    if kind is not Kind.FUSED and op.name not in IN_PLACE:
        return []
    free = [v for v in dying if v not in born]
    over = []
    for result in born:
        operand = next((v for v in free if v.nbytes == result.nbytes), None)
        if operand is not None:
            free.remove(operand)
            over.append(operand)
    return over
