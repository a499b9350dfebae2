"""Plans and reports as text for a terminal (rich): colour where there is any, clear without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import pairwise

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxmem.errors import BudgetInfeasibleError
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.show.pages import Page
from jaxmem.show.rows import (
    NUMERIC,
    Bar,
    Grid,
    ReportRows,
    clean,
    column_of,
    infeasible_grid,
    percent_text,
    plan_rows,
    report_rows,
    resampled,
)
from jaxmem.units import format_bytes

MIN_WIDTH, MAX_WIDTH = 40, 140
CHART_HEIGHT = 6
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = " ▁▂▃▄▅▆▇█"
_TONES = {"good": "green", "changed": "yellow", "bad": "bold red"}
_GAP = 2  # cells between two columns
MIN_NAME = 12  # cells below which a column of names says nothing and is left out


def plan_text(plan: Plan, *, width: int | None = None) -> str:
    """Returns a plan as plain text without colour, at most ``width`` cells wide.

    Args:
        plan: the plan to show.
        width: cells in a line, 40 to 140; the terminal's own width by default.
    """
    cells = terminal_width() if width is None else bounded(width)
    return plain_text(plan_view(plan, cells), cells)


def report_text(report: MemoryReport, *, width: int | None = None) -> str:
    """Returns a memory report as plain text without colour, at most ``width`` cells wide.

    Args:
        report: the report to show.
        width: cells in a line, 40 to 140; the terminal's own width by default.
    """
    cells = terminal_width() if width is None else bounded(width)
    return plain_text(report_view(report, cells), cells)


def bounded(width: int) -> int:
    """Returns a width that the views can use.

    >>> bounded(10), bounded(100), bounded(400)
    (40, 100, 140)
    """
    return min(max(width, MIN_WIDTH), MAX_WIDTH)


def terminal_width() -> int:
    """Returns the width of the terminal, or 100 where there is none, as far as the views use it."""
    return bounded(shutil.get_terminal_size((100, 24)).columns)


def plan_view(plan: Plan, width: int) -> Group:
    """Returns a plan as something :func:`print_view` prints."""
    rows = plan_rows(plan)
    notes = [_line(f"note: {note}") for note in rows.notes]
    return Group(
        _line(rows.headline, "bold"),
        _line(rows.verdict, _TONES[rows.tone]),
        Text(),
        *_bars(rows.bars, width, rows.budget),
        _line(rows.makeup, "dim"),
        _line(rows.solver, "dim"),
        *_grid(rows.decisions, width),
        *_grid(rows.rounds, width),
        *([Text(), *notes] if notes else []),
    )


def report_view(report: MemoryReport, width: int) -> Group:
    """Returns a memory report as something :func:`print_view` prints."""
    rows = report_rows(report)
    return Group(
        _line(rows.headline, "bold"),
        _line(rows.verdict, _TONES[rows.tone]),
        Text(),
        *_bars(rows.bars, width, rows.device),
        _line(rows.makeup, "dim"),
        *_chart(rows, width),
        *_section("at the peak", rows.categories),
        *_bars(rows.categories, width),
        *_grid(rows.buffers, width),
        *_grid(rows.arguments, width),
        *([Text(), *(_line(f"note: {note}") for note in rows.notes)] if rows.notes else []),
    )


def page_view(page: Page, width: int) -> Group:
    """Returns a page as something :func:`print_view` prints."""
    items: list[RenderableType] = []
    for item in page.items:
        lines = [Padding(_line(text), (0, 0, 0, 4)) for text in item.lines]
        items += [Text(), _line(item.head, "bold"), *lines]
    return Group(
        _line(page.headline, "bold"),
        *(_line(sentence) for sentence in page.sentences),
        *items,
        *([_line(page.more, "dim")] if page.more else []),
        *(part for grid in page.grids for part in _grid(grid, width)),
    )


def infeasible_view(error: BudgetInfeasibleError, width: int) -> Group:
    """Returns "does not fit" with what fills the memory, as :func:`print_view` prints it."""
    smallest = Bar("smallest found", error.smallest_bytes)
    return Group(
        *(_line(clean(line, 2000)) for line in str(error).split("\n")),
        Text(),
        *_bars((smallest,), width, Bar("budget", error.budget_bytes)),
        *_grid(infeasible_grid(error), width),
    )


def print_view(console: Console, view: RenderableType) -> None:
    """Prints a view as it is: nothing in a name is markup, an emoji code or a link."""
    console.print(view, markup=False, emoji=False, highlight=False)


def plain_text(view: RenderableType, width: int) -> str:
    """Returns a view as text without colour and without spaces at the ends of lines."""
    # Inside Jupyter rich would show it there as well.
    console = Console(
        file=StringIO(),
        width=width,
        color_system=None,
        legacy_windows=False,
        force_jupyter=False,
    )
    with console.capture() as capture:
        print_view(console, view)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="fold")


def _section(title: str, content: Sequence[object]) -> list[Text]:
    return [Text(), _line(title, "bold")] if content else []


def _bars(bars: Sequence[Bar], width: int, limit: Bar | None = None) -> Iterator[Text]:
    """One line per bar, all on one scale; what is beyond ``limit`` is drawn differently."""
    shown = (limit, *bars) if limit else bars
    scale = max((bar.nbytes for bar in shown), default=0) or 1
    names = max((cell_len(bar.label) for bar in shown), default=0)
    room = min(width - names - 20, 60)
    mark = limit and min(_cells(limit.nbytes, scale, room), room - (limit.nbytes < scale))
    for bar in shown:
        line = Text(f"  {set_cell_size(bar.label, names)} {bar.size:>9} ", no_wrap=True)
        if bar.share is not None:
            line.append(f"{percent_text(bar.share, 1):>4} ")
        if bar is limit:
            line.append("─" * ((mark or 1) - 1) + "┤", "dim")
        elif limit and mark is not None and bar.nbytes > limit.nbytes:
            line.append("█" * mark, "cyan")
            line.append("▒" * max(1, _cells(bar.nbytes, scale, room) - mark), "red")
        else:
            line.append(_blocks(bar.nbytes / scale * room), "cyan")
        yield line


def _cells(nbytes: int, scale: int, room: int) -> int:
    return max(1, round(nbytes / scale * room))


def _blocks(cells: float) -> str:
    eighths = max(1, round(cells * 8)) if cells > 0 else 0
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _chart(rows: ReportRows, width: int) -> Iterator[Text]:
    """Live bytes over the step, with the peak marked above and the phases below."""
    peak = format_bytes(rows.peak_bytes)
    count, gutter = len(rows.timeline), max(9, len(peak)) + 1
    values = resampled(rows.timeline, min(width - gutter, 100))
    yield from _section("live bytes over the step", values)
    if not values:
        return
    columns, top = len(values), max(values) or 1
    at = column_of(min(rows.peak_index, count - 1), count, columns)
    label = "▼ peak" if at + 6 <= columns else "peak ▼"
    yield _line(" " * (gutter + (at if label[0] == "▼" else at - 5)) + label, "red")
    eighths = [max(v > 0, round(v / top * CHART_HEIGHT * 8)) for v in values]
    for row in reversed(range(CHART_HEIGHT)):
        axis = peak if row == CHART_HEIGHT - 1 else "0B" if row == 0 else ""
        cells = (_LEVELS[min(max(e - 8 * row, 0), 8)] for e in eighths)
        yield Text(f"{axis:>{gutter - 1}} ", no_wrap=True).append("".join(cells), "cyan")
    starts = [column_of(start, count, columns) for _, start in rows.phases]
    marks = " " * min(starts, default=0)
    for (name, _), (start, end) in zip(rows.phases, pairwise([*starts, columns]), strict=True):
        marks += set_cell_size(f"│{name}", end - start)
    yield Text(" " * gutter + marks, "dim", no_wrap=True, overflow="crop")


def _grid(grid: Grid, width: int) -> Iterator[RenderableType]:
    yield from _section(grid.title, grid.rows)
    if not grid.rows:
        return
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), expand=False
    )
    widths = _widths(grid, width - 2)
    for column, cells in widths.items():
        name = grid.header[column]
        right = "right" if name in NUMERIC else "left"
        table.add_column(name, justify=right, width=cells, no_wrap=True, header_style="dim")
    for row in grid.rows:
        table.add_row(*(_cell(grid.header[column], row[column]) for column in widths))
    yield Padding(table, (0, 0, 0, 2))
    if grid.more:
        yield _line(f"  {grid.more}", "dim")


def _cell(header: str, text: str) -> Text:
    style = ""
    if header == "decision" and text.startswith("recompute"):
        style = "yellow"
    elif header == "outcome":
        style = "green" if text == "fits" else "red"
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _widths(grid: Grid, width: int) -> dict[int, int]:
    """The cells of each column that has room: figures whole, names share what is left."""
    natural = {
        column: max(cell_len(text) for text in (name, *(row[column] for row in grid.rows)))
        for column, name in enumerate(grid.header)
        if any(row[column] for row in grid.rows)
    }
    flexible = [column for column in grid.flexible if column in natural]
    while True:
        fixed = [natural[column] for column in natural if column not in grid.flexible]
        free = width - sum(fixed) - _GAP * (len(natural) - 1)
        if len(flexible) <= 1 or free >= MIN_NAME * len(flexible):
            break
        del natural[flexible.pop()]
    for waiting, column in enumerate(sorted(flexible, key=natural.__getitem__)):
        share = max(1, free // (len(flexible) - waiting))
        natural[column] = min(natural[column], share)
        free -= natural[column]
    return natural
