"""MemoryReport: where the peak of a program is and what fills it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxmem.displayed import Displayed
from jaxmem.errors import ReportError
from jaxmem.files import replacing
from jaxmem.planner.decode import Kept, damaged, decode, parse
from jaxmem.planner.fusions import FusionReport
from jaxmem.planner.tables import Rows, names_of, write_table
from jaxmem.planner.tracing import trace_of

if TYPE_CHECKING:
    from jaxmem.planner.frontier import Frontier
    from jaxmem.planner.plan import Plan

SCHEMA_VERSION = 1
Source = Literal["compiled", "predicted"]
_REPORT = Kept("report", ReportError, "Make it again: jaxmem.analyze(step, *args).")


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
        source: ``file.py:line (function)`` of the user's own line, ``""`` if there is none. Where
            the compiler says no line, and only moved a value or computed from it alone, that of
            this value; of what is made of constants alone that of what reads it. The name says so.
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
class MemoryReport(Displayed):
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
    schema_version: int = SCHEMA_VERSION

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

    @property
    def attributed_bytes(self) -> int:
        """Bytes at the peak of what has a source line or the path of an argument or result."""
        return sum(b.nbytes for b in self.at_peak() if b.source or b.path)

    def to_json(self) -> str:
        """The report as JSON text, all of it; :meth:`from_json` reads it."""
        return json.dumps(self, default=vars, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MemoryReport:
        """A report from :meth:`to_json` text.

        Raises:
            ReportError: not a report, of another schema version, or damaged; the message names the
                field.
        """
        data = parse(text, _REPORT)
        version = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
        if isinstance(data, dict) and "rounds" in data and "buffers" not in data:
            raise ReportError(
                "this is a plan, and not a report: jaxmem analyze train:entry -o report.json, or "
                "report.to_json(), writes one."
            )
        if isinstance(version, bool) or version != SCHEMA_VERSION:
            raise ReportError(
                f"report has schema version {version!r}, this jaxmem reads {SCHEMA_VERSION}. "
                f"{_REPORT.again}"
            )
        report = decode(cls, data, kept=_REPORT)
        if not 0 <= report.peak_index < max(1, len(report.timeline)):
            wanted = f"below {len(report.timeline)}, the length of the timeline"
            raise damaged("peak_index", report.peak_index, wanted, _REPORT)
        return report

    def to_csv(self, path: str | Path, table: str = "buffers") -> None:
        """Write a table of the report as CSV.

        Args:
            path: the file; it is replaced.
            table: ``"buffers"`` (all of them, with all that is known), ``"timeline"``,
                ``"by_category"``, ``"by_source"``, ``"by_module"``, ``"by_checkpoint_name"``,
                ``"by_argument"``, ``"phases"``; ``"unfused"`` and ``"fusions"`` are those of
                :meth:`fusions`.

        Raises:
            ReportError: there is no table of that name.
            OSError: the file cannot be written.
        """
        if table in ("unfused", "fusions"):
            self.fusions().to_csv(path, table)
            return
        write_table(path, self._tables(), table)

    def _tables(self) -> dict[str, tuple[list[str], Rows]]:
        def summed(sums: Callable[[], dict[str, int]]) -> tuple[list[str], Rows]:
            return ["name", "nbytes"], lambda: (
                {"name": name, "nbytes": n} for name, n in sums().items()
            )

        peak = set(map(id, self.at_peak()))
        operations = self.operations or ("",) * len(self.timeline)
        return {
            "buffers": (
                [*names_of(Buffer), "at_peak"],
                lambda: ({**vars(b), "at_peak": id(b) in peak} for b in self.buffers),
            ),
            "timeline": (
                ["index", "operation", "nbytes"],
                lambda: (
                    {"index": n, "operation": operation, "nbytes": nbytes}
                    for n, (operation, nbytes) in enumerate(
                        zip(operations, self.timeline, strict=True)
                    )
                ),
            ),
            "phases": (
                ["name", "start"],
                lambda: ({"name": name, "start": start} for name, start in self.phases),
            ),
            "by_category": summed(self.by_category),
            "by_source": summed(self.by_source),
            "by_module": summed(self.by_module),
            "by_checkpoint_name": summed(self.by_checkpoint_name),
            "by_argument": summed(self.by_argument),
        }

    def to_trace(self, path: str | Path, *, least_bytes: int | None = None) -> None:
        """Write it as a trace for https://ui.perfetto.dev or ``chrome://tracing``.

        The timeline is a counter by category, and each large buffer is a slice with its shape,
        source line and module. A microsecond is an operation: a schedule has an order and no times.

        Args:
            path: the file; it is replaced.
            least_bytes: the smallest buffer with a slice of its own; by default a thousandth of the
                peak. Of 20,000 and more the largest are taken.

        Raises:
            OSError: the file cannot be written.
        """
        least = max(1, self.peak_bytes // 1000) if least_bytes is None else least_bytes
        with replacing(path) as file:
            json.dump(trace_of(self, least), file)

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        plan: Plan | None = None,
        before: MemoryReport | None = None,
        frontier: Frontier | None = None,
    ) -> Path:
        """Write the report as one HTML file that works offline, and return its path.

        The page shows live bytes over the step, stacked by category, module, source line or buffer
        by buffer, with the peak and what must not be exceeded; the buffers as a table that can be
        searched, sorted and narrowed to what was selected in the chart. Without JavaScript the
        tables still read. It loads nothing from anywhere.

        Args:
            path: the file to write; one that is there is replaced.
            plan: the plan of the step: its budget is drawn, its decisions are listed.
            before: the report of the step as written, shown beside this one on one scale.
            frontier: what other budgets would cost, drawn with stock policies.

        Raises:
            ReportFileError: the file cannot be written.
            ArgumentError: an argument is of another kind, or of another step or target.

        Cost: about 30 bytes for each buffer, 70 where each has a name of its own. Beyond 20,000 the
        smallest are drawn as one, and the page says so; its table and search have all.

        >>> import tempfile
        >>> import jax, jax.numpy as jnp, jaxmem
        >>> report = jaxmem.analyze(lambda x: jnp.sin(x) @ x, jnp.ones((8, 8)))
        >>> report.to_html(f"{tempfile.mkdtemp()}/report.html").name
        'report.html'
        """
        from jaxmem.show.page import document, write_page

        return write_page(path, document(self, plan=plan, before=before, frontier=frontier))
