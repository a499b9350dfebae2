"""What came of timing a step, as written and as planned."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxmem.displayed import Displayed
from jaxmem.planner.tables import Rows, names_of, write_table


@dataclass(frozen=True)
class Timed:
    """How long one program took.

    Attributes:
        name: ``"as written"`` or ``"planned"``.
        compiled_bytes: the compiler's peak, arguments and results included.
        predicted_seconds: of a step, on paper.
        seconds: of each run; empty where it was not run.
        why: why it was not run, or ``""``.
    """

    name: str
    compiled_bytes: int
    predicted_seconds: float
    seconds: tuple[float, ...]
    why: str = ""

    @property
    def median_seconds(self) -> float | None:
        """The median of its runs."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Benchmark(Displayed):
    """How long a step took here, as written and as planned.

    Attributes:
        function: name of the step.
        target: the device.
        budget_bytes: what it was planned for, by which ``solver``.
        programs: the two.
    """

    function: str
    target: str
    budget_bytes: int
    programs: tuple[Timed, ...]
    solver: str

    def to_csv(self, path: str | Path, table: str = "programs") -> None:
        """Write the two ``"programs"``, or each of their ``"runs"``, as CSV.

        Raises:
            ReportError: there is no table of that name.
        """
        programs = [n for n in names_of(Timed) if n != "seconds"]
        tables: dict[str, tuple[list[str], Rows]] = {
            "programs": (
                [*programs, "median_seconds"],
                lambda: ({**vars(p), "median_seconds": p.median_seconds} for p in self.programs),
            ),
            "runs": (
                ["name", "seconds"],
                lambda: ({"name": p.name, "seconds": s} for p in self.programs for s in p.seconds),
            ),
        }
        write_table(path, tables, table)

    def to_json(self) -> str:
        """What was measured as JSON text."""
        programs = [{**asdict(p), "median_seconds": p.median_seconds} for p in self.programs]
        return json.dumps({**asdict(self), "programs": programs}, indent=1, sort_keys=True)
