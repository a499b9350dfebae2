"""MemoryReport: where the peak of a program is and what fills it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from jaxmem.errors import ReportError
from jaxmem.planner.fusions import FusionReport

Source = Literal["compiled", "predicted"]


@dataclass(frozen=True)
class Buffer:
    """One thing that occupies device memory for a while.

    Attributes:
        name: argument path, or ``primitive`` with its checkpoint name.
        nbytes: bytes on each device.
        category: ``"argument"``, ``"output"``, ``"residual"`` (made in the forward pass, used in
            the backward pass), ``"temporary"``, ``"constant"`` or, of the compiler's heap,
            ``"fragmentation"``: bytes that even its fullest moment leaves between buffers.
        start: first schedule index at which it is live.
        end: last schedule index at which it is live.
        path: tree path of the argument or output, or of the argument that it is a copy of, ``""``
            for others.
        source: ``file.py:line (function)`` of the user's own line, ``""`` if there is none.
        module: module path from the name stack.
        checkpoint_name: name given by ``checkpoint_name``, or ``""``.
        primitive: the operation that makes it, ``""`` for arguments.
        shape: array shape; ``dtype`` its dtype name.
        memory: ``"device"``; ``"host"`` for what is in pinned host memory, ``"program"`` for
            constants that come with the program: these are listed, and count neither at the peak
            nor in the timeline.
        instruction: the compiler's name of what makes it, ``""`` in predicted reports.
        offset: where it starts in the compiler's heap, ``None`` for what is not in it.
        repeats: how many times per step it is made: the turns of the loops it is made in.
    """

    name: str
    nbytes: int
    category: str
    start: int
    end: int
    path: str
    source: str
    module: str
    checkpoint_name: str
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    memory: str = "device"
    instruction: str = ""
    offset: int | None = None
    repeats: int = 1


@dataclass(frozen=True)
class MemoryReport:
    """What a step needs, without running it.

    Attributes:
        function: name of the analysed function.
        target: name of the hardware.
        device_bytes: what one device has.
        peak_bytes: peak of the whole step (arguments + outputs + temporaries).
        compiled_bytes: the compiler's figure for the same program on the target.
        argument_bytes: all arguments; ``output_bytes`` all outputs; ``aliased_bytes`` shared by
            donation; ``compiled_temp_bytes`` the compiler's temporaries.
        peak_index: schedule index of the peak.
        timeline: live bytes at every schedule index.
        phases: ``(name, first schedule index)`` marks: forward, backward, update.
        buffers: everything that occupies memory, with its lifetime.
        equations: number of traced operations; 0 where only the compiled program is known.
        source: whose buffers and lifetimes these are. ``"compiled"``: the compiler's, read from
            its buffer assignment; the peak is its figure. ``"predicted"``: those of jaxmem's
            simulator, by which it plans.
        operations: what runs at each schedule index; empty in predicted reports.
        predicted: of a compiled report the predicted one of the same program, if there is one.
        fusion: what the compiler fused; ``None`` in predicted reports.
        notes: anything to know about the figures.
    """

    function: str
    target: str
    device_bytes: int
    peak_bytes: int
    compiled_bytes: int
    compiled_temp_bytes: int
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    peak_index: int
    timeline: tuple[int, ...]
    phases: tuple[tuple[str, int], ...]
    buffers: tuple[Buffer, ...]
    equations: int
    source: Source = "predicted"
    operations: tuple[str, ...] = ()
    predicted: MemoryReport | None = None
    fusion: FusionReport | None = None
    notes: tuple[str, ...] = ()

    @property
    def predicted_bytes(self) -> int:
        """The simulator's peak, whichever report this is; 0 where nothing was simulated."""
        if self.source == "predicted":
            return self.peak_bytes
        return self.predicted.peak_bytes if self.predicted else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of everything that is in pinned host memory."""
        return sum(b.nbytes for b in self.buffers if b.memory == "host")

    def fusions(self) -> FusionReport:
        """What the compiler fused, and the largest values that a fusion would remove.

        Raises:
            ReportError: the report is predicted: it knows nothing of the compiler's kernels.
        """
        if self.fusion is None:
            raise ReportError(
                f"the report of {self.function} on {self.target} is {self.source}, and only "
                "compiled ones know what was fused: jaxmem.analyze(step, *args).fusions()."
            )
        return self.fusion

    def at_peak(self) -> tuple[Buffer, ...]:
        """The buffers that are live at the peak, largest first."""
        at = self.peak_index
        live = [b for b in self.buffers if b.memory == "device" and b.start <= at <= b.end]
        return tuple(sorted(live, key=lambda b: (-b.nbytes, b.name)))

    def top(self, count: int = 10) -> tuple[Buffer, ...]:
        """The ``count`` largest buffers at the peak."""
        return self.at_peak()[:count]

    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category, largest first."""
        return self._summed(lambda b: b.category)

    def by_source(self) -> dict[str, int]:
        """Bytes at the peak by source line, largest first; arguments are under their path."""
        return self._summed(lambda b: b.source or b.path or b.name)

    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by module path (name stack), largest first."""
        return self._summed(lambda b: b.module or "(no module)")

    def by_checkpoint_name(self) -> dict[str, int]:
        """Bytes at the peak by ``checkpoint_name``, largest first; unnamed values are left out."""
        return self._summed(lambda b: b.checkpoint_name)

    def by_argument(self) -> dict[str, int]:
        """Bytes of each argument leaf by its path, largest first."""
        return self._summed(lambda b: b.path if b.category == "argument" else "")

    def _summed(self, key: Callable[[Buffer], str]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for buffer in self.at_peak():
            if name := key(buffer):
                sums[name] = sums.get(name, 0) + buffer.nbytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)

    def __str__(self) -> str:
        from jaxmem.show.terminal import report_text

        return report_text(self)

    def _repr_html_(self) -> str:
        from jaxmem.show.html import report_html

        return report_html(self)
