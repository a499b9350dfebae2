"""What a page says without scripts: head, tables, and charts as plain SVG.

The page's Content-Security-Policy forbids ``style`` attributes too, so the look is in classes and
in SVG's own attributes. Every text that comes from a program is escaped and stands in a ``<bdi>``,
which keeps right-to-left names from reordering what is beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from jaxmem.planner.frontier import Frontier
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.show.curve import frontier_svg
from jaxmem.show.html import timeline_svg
from jaxmem.show.page.summary import Summary
from jaxmem.show.pages import frontier_page
from jaxmem.show.rows import NUMERIC, Bar, Grid, percent_text, plan_rows, report_rows

# Rows of each table: enough to read, few enough that a browser shows them at once.
MOST_ROWS = 200
_BAR_WIDTH = 1000


def head(summary: Summary) -> Iterator[str]:
    """The first screen's words: title, whether it fits, bars against the limit, what fills it."""
    yield f"<h1><bdi>{escape(summary.title)}</bdi></h1>"
    yield f'<p class="verdict {summary.tone}">{escape(summary.verdict)}</p>'
    yield '<div class="intro">'
    yield from _bars(summary.bars, summary.limit)
    yield "<div>"
    for sentence in summary.sentences:
        yield f"<p><bdi>{escape(sentence)}</bdi></p>"
    yield "</div></div>"


def report_section(label: str, report: MemoryReport) -> Iterator[str]:
    """A report as chart and tables; what is live at the peak comes first."""
    rows = report_rows(report, MOST_ROWS)
    yield f"<section><h2>{escape(label)}</h2><p>{escape(rows.verdict)}</p>"
    yield f"<p>{escape(rows.makeup)}</p>"
    yield timeline_svg(rows)
    shares = tuple(
        (bar.size, "" if bar.share is None else percent_text(bar.share, 1), bar.label)
        for bar in rows.categories
    )
    yield from table(Grid("by category, at the peak", ("bytes", "share", "category"), (2,), shares))
    for grid in (rows.buffers, rows.arguments, rows.modules, rows.sources):
        yield from table(grid)
    yield "</section>"


def plan_section(plan: Plan) -> Iterator[str]:
    """What a plan decides, behind a line that opens it without a script."""
    rows = plan_rows(plan, MOST_ROWS)
    yield '<section class="plan"><h2>The plan</h2>'
    yield f"<p><bdi>{escape(rows.verdict)}</bdi></p>"
    yield f"<p><bdi>{escape(rows.makeup)}</bdi></p><p><bdi>{escape(rows.solver)}</bdi></p>"
    for note in rows.notes:
        yield f"<p>note: <bdi>{escape(note)}</bdi></p>"
    for grid in (rows.decisions, rows.rounds):
        if grid.rows:
            yield f"<details><summary>{escape(grid.title)} ({len(grid.rows)})</summary>"
            yield from table(grid)
            yield "</details>"
    yield "</section>"


def frontier_section(frontier: Frontier) -> Iterator[str]:
    """The frontier: a chart, which the script replaces by its own, and its tables."""
    page = frontier_page(frontier)
    yield '<section class="frontier"><h2>What every budget costs</h2>'
    yield from (f"<p><bdi>{escape(sentence)}</bdi></p>" for sentence in page.sentences)
    yield "<p>The line: the quickest program found for each budget. Points beside it: policies.</p>"
    yield f'<div id="frontier">{frontier_svg(frontier)}</div>'
    for grid in page.grids:
        yield f"<details><summary>{escape(grid.title)}</summary>"
        yield from table(grid)
        yield "</details>"
    yield "</section>"


def table(grid: Grid) -> Iterator[str]:
    """A table that reads aloud well: a caption, and headers with their scope."""
    if not grid.rows:
        return
    numeric = [name in NUMERIC for name in grid.header]
    cells = "".join(
        f'<th scope="col"{_right(n)}>{escape(name)}</th>'
        for name, n in zip(grid.header, numeric, strict=True)
    )
    yield f'<div class="wide"><table><caption>{escape(grid.title)}</caption>'
    yield f"<thead><tr>{cells}</tr></thead><tbody>"
    for row in grid.rows:
        cells = (
            f"<td{_right(n)}><bdi>{escape(text)}</bdi></td>"
            for text, n in zip(row, numeric, strict=True)
        )
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if grid.more:
        yield f"<p>{escape(grid.more)}</p>"


def _right(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _bars(bars: Sequence[Bar], limit: Bar) -> Iterator[str]:
    """All on one scale; the limit is a line through every bar, what is beyond it is marked."""
    scale = max(limit.nbytes, *(bar.nbytes for bar in bars), 1)

    def at(nbytes: int) -> str:
        return f"{nbytes * _BAR_WIDTH / scale:.1f}"

    yield '<table class="bars"><tbody>'
    for bar in (*bars, limit):
        fill = ""
        if bar is not limit:
            within = min(bar.nbytes, limit.nbytes)
            fill = f'<rect class="within" width="{at(within)}" height="12"/>'
            if bar.nbytes > within:
                fill += (
                    f'<rect class="beyond" x="{at(within)}" width="{at(bar.nbytes - within)}" '
                    'height="12"/>'
                )
        mark = (
            f'<line class="limit" x1="{at(limit.nbytes)}" x2="{at(limit.nbytes)}" y1="0" y2="12"/>'
        )
        yield (
            f'<tr><th scope="row">{escape(bar.label)}</th><td class="number">{bar.size}</td>'
            f'<td class="bar"><svg viewBox="0 0 {_BAR_WIDTH} 12" preserveAspectRatio="none" '
            f'aria-hidden="true"><rect class="track" width="{_BAR_WIDTH}" height="12"/>'
            f"{fill}{mark}</svg></td></tr>"
        )
    yield "</tbody></table>"
