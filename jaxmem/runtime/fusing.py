"""What the compiler fused, and what it still writes to memory between kernels that could be one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxmem.hlo.module import Instruction
from jaxmem.hlo.origins import MOVING
from jaxmem.hlo.schedule import Place, Schedule, places
from jaxmem.planner.fusions import Fusion, FusionReport, Unfused
from jaxmem.planner.report import Buffer

# HLO instructions that work element by element.
_ELEMENTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp clz compare complex convert cosine divide erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic map maximum minimum "
    "multiply negate not or popcnt power real reduce-precision remainder round-nearest-afz "
    "round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign "
    "sine sqrt stochastic-convert subtract tan tanh xor".split()
)
_REDUCING = _ELEMENTWISE | {"reduce"}
_NO_KERNEL = frozenset(
    "parameter tuple get-tuple-element constant bitcast while call conditional after-all "
    "opt-barrier partition-id replica-id".split()
)
_FREE = MOVING | {"parameter", "constant", "iota", "tuple", "get-tuple-element"}
_HANDING_ON = frozenset(["tuple", "get-tuple-element", "bitcast", "opt-barrier"])


class _Told(Protocol):
    @property
    def source(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def primitive(self) -> str: ...
    @property
    def is_backward(self) -> bool: ...


Describe = Callable[[Place], _Told]


def fusion_report(
    schedule: Schedule,
    describe: Describe,
    buffers: Sequence[Buffer],
    peak_index: int,
    *,
    function: str,
    target: str,
) -> FusionReport:
    """What the compiler fused of a program.

    Args:
        schedule: the program.
        describe: names of where a value comes from.
        buffers: those of its report, for what is live at ``peak_index``.
        function: name of the step; ``target`` of the hardware.
    """
    reading = _Fusing(schedule, describe, {b.instruction: b for b in buffers if b.instruction})
    kernels = [i for i in schedule.order if i.opcode not in _NO_KERNEL and reading.runs_alone(i)]
    fusions = [reading.fusion(i) for i in kernels if i.opcode == "fusion"]
    unfused = [u for i in kernels for u in reading.unfused(i, peak_index)]
    return FusionReport(
        function=function or schedule.module.name.removeprefix("jit_"),
        target=target,
        kernels=len(kernels),
        fusions=tuple(
            sorted(
                (f for f in fusions if f.operations > 1),
                key=lambda f: (-f.saved_bytes * f.times, f.name),
            )
        ),
        unfused=tuple(sorted(unfused, key=lambda u: (-u.traffic_bytes, u.name))),
    )


@dataclass(frozen=True, eq=False)
class _Fusing:
    schedule: Schedule
    describe: Describe
    buffers: dict[str, Buffer]
    _work: dict[int, frozenset[str]] = field(default_factory=dict)

    def runs_alone(self, one: Instruction) -> bool:
        """Whether it is a kernel: what a reduction or a sort applies is a part of one."""
        caller = self.schedule.callers.get(one.computation)
        module = self.schedule.module
        if caller is None:
            return one.computation == module.entry.id
        return caller.opcode in ("while", "call", "conditional", "async-start")

    def inside(self, one: Instruction) -> list[Instruction]:
        """The instructions of a kernel."""
        if one.opcode != "fusion":
            return [one]
        module = self.schedule.module
        return [module.instructions[i] for i in module.computations[one.called[0]].instructions]

    def times(self, one: Instruction) -> int:
        """How often it runs per step."""
        return self.schedule.turns.get(one.computation, 1)

    def fusion(self, one: Instruction) -> Fusion:
        """A row of the report."""
        module = self.schedule.module
        inside = self.inside(one)
        made = [i for i in inside if i.opcode not in _FREE]
        root = module.root(one.called[0])
        written = {root.id, *root.operands} if root.opcode == "tuple" else {root.id}
        told = self.describe((one.id, (0,) if root.opcode == "tuple" else ()))
        names = (i.op_name.rpartition("/")[2] or i.opcode for i in made)
        operands = (module.instructions[i] for i in dict.fromkeys(one.operands))
        return Fusion(
            name=one.name,
            kind=one.fusion_kind.removeprefix("k").lower(),
            operations=len(made),
            primitives=tuple(dict.fromkeys(names)),
            read_bytes=sum(i.shape.nbytes for i in operands),
            written_bytes=one.shape.nbytes,
            saved_bytes=sum(i.shape.nbytes for i in made if i.id not in written),
            times=self.times(one),
            source=told.source,
            module=told.module,
            phase="backward" if told.is_backward else "forward",
        )

    def is_light(self, one: Instruction, reducing: bool) -> bool:
        """Whether a kernel is element-wise work, or, if that will do, a reduction of it."""
        if one.id not in self._work:
            self._work[one.id] = frozenset(i.opcode for i in self.inside(one)) - _FREE
        work = self._work[one.id]
        return bool(work) and work <= (_REDUCING if reducing else _ELEMENTWISE)

    def unfused(self, one: Instruction, peak_index: int) -> Iterator[Unfused]:
        """What a kernel writes only for others that could be one with it."""
        if not self.is_light(one, reducing=False):
            return
        parts = one.shape.parts
        for index in [(n,) for n in range(len(parts))] if parts else [()]:
            readers = self._readers((one.id, index))
            if not readers or not all(self.is_light(r, reducing=True) for r in readers):
                continue
            told, buffer = self.describe((one.id, index)), self.buffers.get(one.name)
            shape = one.shape.at(index)
            at = [self.describe((r.id, (0,) if r.shape.parts else ())) for r in readers]
            named = [a.source or r.name for a, r in zip(at, readers, strict=True)]
            yield Unfused(
                name=one.name,
                nbytes=shape.nbytes,
                times=self.times(one),
                reads=len(readers),
                category=buffer.category if buffer else "temporary",
                primitive=told.primitive,
                source=told.source,
                module=told.module,
                readers=tuple(dict.fromkeys(named)),
                shape=shape.dims,
                dtype=shape.dtype,
                at_peak=bool(buffer and buffer.start <= peak_index <= buffer.end),
            )

    def _readers(self, made: Place) -> list[Instruction]:
        """The kernels that read a value; none where it leaves its computation."""
        schedule = self.schedule
        found: dict[int, Instruction] = {}
        home = schedule.module.instructions[made[0]].computation
        for ident, _ in places(schedule, made):
            here = schedule.module.instructions[ident]
            if here.computation != home or schedule.module.computations[home].root == ident:
                return []
            for reader in schedule.readers.get(ident, ()):
                if reader.opcode not in _HANDING_ON:
                    found[reader.id] = reader
        return list(found.values())
