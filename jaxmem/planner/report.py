"""MemoryReport: where the peak of a program is and what fills it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from jaxmem.displayed import Displayed


@dataclass(frozen=True)
class Buffer:
    """One thing that occupies device memory for a while.

    Attributes:
        name: argument path, or ``primitive`` with its checkpoint name.
        nbytes: bytes on each device.
        category: ``"argument"``, ``"output"``, ``"residual"`` (made in the forward pass, used in
            the backward pass), ``"temporary"`` or ``"constant"``.
        start: first schedule index at which it is live.
        end: last schedule index at which it is live.
        path: tree path of the argument or output, ``""`` for others.
        source: ``file.py:line (function)`` of the user's own line, ``""`` if there is none.
        module: module path from the name stack.
        checkpoint_name: name given by ``checkpoint_name``, or ``""``.
        primitive: the operation that makes it, ``""`` for arguments.
        shape: array shape; ``dtype`` its dtype name.
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


@dataclass(frozen=True)
class MemoryReport(Displayed):
    """What a step needs, without running it.

    Attributes:
        function: name of the analysed function.
        target: name of the hardware.
        device_bytes: what one device has.
        peak_bytes: predicted peak of the whole step (arguments + outputs + temporaries).
        compiled_bytes: the compiler's figure for the same program on the target.
        argument_bytes: all arguments; ``output_bytes`` all outputs; ``aliased_bytes`` shared by
            donation; ``compiled_temp_bytes`` the compiler's temporaries.
        peak_index: schedule index of the peak.
        timeline: predicted live bytes at every schedule index.
        phases: ``(name, first schedule index)`` marks: forward, backward, update.
        buffers: everything that occupies memory, with its lifetime.
        equations: number of traced operations.
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

    def at_peak(self) -> tuple[Buffer, ...]:
        """The buffers that are live at the peak, largest first."""
        live = [b for b in self.buffers if b.start <= self.peak_index <= b.end]
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
