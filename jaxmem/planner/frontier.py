"""The trade-off between peak bytes and seconds of one step, as plain data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxmem.displayed import Displayed
from jaxmem.errors import BudgetInfeasibleError, MissingExtraError
from jaxmem.planner.tables import Rows, names_of, write_table
from jaxmem.units import GIB, format_budget, format_bytes, parse_budget, parse_bytes

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Point:
    """One program that computes the step.

    Attributes:
        peak_bytes: predicted peak on each device: arguments, results and temporaries.
        seconds: predicted time of one step.
        recompute_share: how much longer than the step as written, as a share of that.
        solver: who proposed it; for a stock policy its name.
        compiled_bytes: the compiler's peak for it; ``None`` where it was not compiled.
        problem: what the compiler undid of it, or ``""``.
    """

    peak_bytes: int
    seconds: float
    recompute_share: float
    solver: str
    compiled_bytes: int | None = None
    problem: str = ""

    @property
    def needed_bytes(self) -> int:
        """The compiler's figure where there is one, else the predicted one."""
        return self.peak_bytes if self.compiled_bytes is None else self.compiled_bytes


@dataclass(frozen=True)
class Frontier(Displayed):
    """Every best trade of peak bytes for seconds that was found for one step.

    All figures are predicted for each device; where ``compiled`` is true every point has the
    compiler's bytes as well. No point is both larger and slower than another.

    Attributes:
        function: name of the step; ``target`` the hardware it is for.
        device_bytes: what a budget of ``"100%"`` stands for.
        points: from the smallest peak to the fastest step.
        stock: the step as written and what policies without a planner give, for comparison.
        compiled: whether every point was compiled.
        fingerprint: hash of the program.
    """

    function: str
    target: str
    device_bytes: int
    points: tuple[Point, ...]
    stock: tuple[Point, ...]
    fingerprint: str
    compiled: bool = False

    def at(self, budget: int | str | None) -> Point:
        """The fastest point within a budget.

        Args:
            budget: as for :func:`jaxmem.fit`; it may be more than the device has.

        Raises:
            BudgetError: the budget does not parse.
            BudgetInfeasibleError: no point is within it.
        """
        nbytes = self._bytes(budget)
        sound = [p for p in self.points if not p.problem]
        within = [p for p in sound if p.needed_bytes <= nbytes]
        if within:
            return min(within, key=lambda p: (p.seconds, p.needed_bytes))
        smallest = min(p.needed_bytes for p in sound)
        figure = "compiled" if self.compiled else "predicted"
        raise BudgetInfeasibleError(
            f"no point of the frontier of {self.function} on {self.target} is within "
            f"{format_bytes(nbytes)}: the smallest {figure} peak is {format_bytes(smallest)}. "
            f'Use "{format_budget(smallest)}" or more, donate the state, or use a smaller batch.',
            budget_bytes=nbytes,
            smallest_bytes=smallest,
        )

    def hull(self) -> tuple[Point, ...]:
        """The points on the lower convex hull: between two of them a byte saves the same time."""
        hull: list[Point] = []
        for point in pareto(self.points):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
                hull.pop()
            hull.append(point)
        return tuple(hull)

    def marginal(self, budget: int | str | None) -> float:
        """Seconds saved for each GiB more than a budget, along the lower convex hull.

        Args:
            budget: as for :meth:`at`; the predicted peak is what counts here.

        Raises:
            BudgetError: the budget does not parse.
            BudgetInfeasibleError: no point is within it.
        """
        nbytes = self._bytes(budget)
        self.at(nbytes)
        for first, second in pairwise(self.hull()):
            if nbytes < second.peak_bytes:
                return -_slope(first, second) * GIB
        return 0.0

    def to_json(self) -> str:
        """The frontier as JSON text; the same frontier gives the same text, byte for byte."""
        data = {**asdict(self), "schema_version": SCHEMA_VERSION}
        return json.dumps(data, indent=1, sort_keys=True)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the frontier as one HTML file that works offline, and return its path.

        Raises:
            ReportFileError: the file cannot be written.
        """
        from jaxmem.show.page import document, write_page

        return write_page(path, document(frontier=self))

    def to_csv(self, path: str | Path, table: str = "points") -> None:
        """Write ``"points"``, the frontier itself, or ``"stock"``, the policies, as CSV.

        Raises:
            ReportError: there is no table of that name.
        """
        tables: dict[str, tuple[list[str], Rows]] = {
            "points": (names_of(Point), lambda: map(vars, self.points)),
            "stock": (names_of(Point), lambda: map(vars, self.stock)),
        }
        write_table(path, tables, table)

    def plot(self, ax: Any = None) -> Any:
        """Draw it on matplotlib axes, new ones by default, and return them.

        Raises:
            MissingExtraError: without ``ax``, if matplotlib is not installed.
        """
        if ax is None:
            try:
                import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise MissingExtraError(
                    f'plot() needs matplotlib ({error}): pip install "jaxmem[notebook]"'
                ) from error
            ax = plt.subplots()[1]
        known = pareto(self.points)
        gib, ms = [p.peak_bytes / GIB for p in known], [p.seconds * 1e3 for p in known]
        ax.step(gib, ms, where="post", marker=".", label="frontier")
        for point in self.stock:
            place = ([point.peak_bytes / GIB], [point.seconds * 1e3])
            ax.plot(*place, linestyle="", marker="D", label=point.solver)
        ax.set_xlabel("peak on each device, predicted (GiB)")
        ax.set_ylabel("one step, predicted (ms)")
        ax.set_title(f"{self.function} on {self.target}")
        ax.legend()
        return ax

    def _bytes(self, budget: int | str | None) -> int:
        if budget is None or (isinstance(budget, str) and "%" in budget):
            return parse_budget(budget, self.device_bytes)
        return parse_bytes(budget)


def pareto(points: Iterable[Point]) -> list[Point]:
    """Those that are not both as large and as slow as another, by bytes."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.seconds)):
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    return found


def spaced(smallest: int, largest: int, count: int) -> list[int]:
    """``count`` limits from the smallest to the largest, each the same factor above the last.

    >>> spaced(100, 1600, 5)
    [100, 200, 400, 800, 1600]
    """
    low, ratio = max(1, smallest), max(1, largest) / max(1, smallest)
    return [round(low * math.pow(ratio, n / max(1, count - 1))) for n in range(count)]


def thinned(points: Sequence[Point], count: int) -> list[Point]:
    """At most ``count`` of them: both ends, and of each stretch of bytes between the smallest."""
    if len(points) <= count:
        return list(points)
    marks = spaced(points[0].peak_bytes, points[-1].peak_bytes, count)[1:-1]
    chosen = {next(n for n, p in enumerate(points) if p.peak_bytes >= mark) for mark in marks}
    return [points[n] for n in sorted(chosen | {0, len(points) - 1})]


def _slope(first: Point, second: Point) -> float:
    return (second.seconds - first.seconds) / max(1, second.peak_bytes - first.peak_bytes)
