"""FusionReport: what the compiler fused, and what still goes through memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jaxmem.displayed import Displayed
from jaxmem.planner.tables import names_of, write_table


@dataclass(frozen=True)
class Fusion:
    """Operations that the compiler made one kernel of.

    Attributes:
        name: the compiler's name of the kernel.
        kind: the compiler's kind: ``"loop"`` (element by element), ``"input"`` (a reduction with
            what leads to it), ``"output"``, or ``"custom"`` (such as a matrix product with what
            surrounds it).
        operations: how many traced or made operations are in it.
        primitives: what they are, each once, in their order.
        read_bytes: what one run reads of memory, each operand whole.
        written_bytes: what one run writes to memory.
        saved_bytes: results of operations inside that never reach memory.
        times: runs per step; more than one in loops whose number of turns is known.
        source: ``file.py:line (function)`` of the user's own line of its result.
        module: module path of its result.
        phase: ``"backward"`` for what JAX made by transposing, else ``"forward"``.
    """

    name: str
    kind: str
    operations: int
    primitives: tuple[str, ...]
    read_bytes: int
    written_bytes: int
    saved_bytes: int
    times: int
    source: str
    module: str
    phase: str


@dataclass(frozen=True)
class Unfused:
    """A value that one kernel writes and others read, where a single kernel would need no memory.

    What makes it is element-wise work, and so is, or reduces, everything that reads it.

    Attributes:
        name: the compiler's name of what makes it.
        nbytes: its bytes.
        times: how often it is made per step.
        reads: how many kernels read it.
        category: ``"residual"`` where it waits for the backward pass (to fuse it means to compute
            it again there), else as in :class:`~jaxmem.planner.report.Buffer`.
        primitive: the operation that makes it.
        source: ``file.py:line (function)`` of the user's own line that makes it.
        module: module path of what makes it.
        readers: the same lines for what reads it, each once.
        shape: its shape; ``dtype`` its dtype name.
        at_peak: whether it is live at the peak, in memory of its own: what waits in the memory of a
            result takes none.
    """

    name: str
    nbytes: int
    times: int
    reads: int
    category: str
    primitive: str
    source: str
    module: str
    readers: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    at_peak: bool

    @property
    def traffic_bytes(self) -> int:
        """Bytes a step would neither write nor read if it were fused."""
        return self.nbytes * self.times * (1 + self.reads)


@dataclass(frozen=True)
class FusionReport(Displayed):
    """What the compiler fused of a step and what it did not.

    Attributes:
        function: name of the step; ``target`` the hardware it was compiled for.
        kernels: kernels of the program that are no fusions, loops' bodies counted once.
        fusions: every fusion, most bytes saved per step first.
        unfused: what a fusion would remove, most traffic per step first.
    """

    function: str
    target: str
    kernels: int
    fusions: tuple[Fusion, ...]
    unfused: tuple[Unfused, ...]

    def to_csv(self, path: str | Path, table: str = "unfused") -> None:
        """Write a table as CSV: ``"unfused"``, or ``"fusions"``.

        Raises:
            ReportError: there is no table of that name.
        """
        unfused = [*names_of(Unfused), "traffic_bytes"]
        tables = {
            "unfused": (
                unfused,
                lambda: ({**vars(u), "traffic_bytes": u.traffic_bytes} for u in self.unfused),
            ),
            "fusions": (names_of(Fusion), lambda: map(vars, self.fusions)),
        }
        write_table(path, tables, table)

    def to_json(self) -> str:
        """It as JSON text; the report that it comes from has it as well."""
        return json.dumps(self, default=vars, sort_keys=True)
