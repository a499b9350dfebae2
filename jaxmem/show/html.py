"""Plans and reports as HTML for a notebook: one fragment, no script, nothing fetched.

All styling is inline, because a style sheet would leak into the page around it. Text has the
page's own colour and tints are translucent; the solid colours have a contrast of 3:1 or more on
white and on near-black, so the same fragment reads well in a dark and in a light notebook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.show.pages import Page
from jaxmem.show.rows import (
    NUMERIC,
    Bar,
    Grid,
    ReportRows,
    column_of,
    percent_text,
    plan_rows,
    report_rows,
    resampled,
)
from jaxmem.units import format_bytes

BLUE, GREEN, AMBER, RED = "#2f7de1", "#16953f", "#c2700a", "#e0443e"
_TONES = {"good": GREEN, "changed": AMBER, "bad": RED}
_CATEGORIES = {
    "argument": "#6b6ef0",
    "output": "#0d9488",
    "residual": AMBER,
    "temporary": "#d6499a",
    "constant": "#6d8f16",
    "fragmentation": "#8a6d3b",
}
_OTHER = "#7b8494"
_CHART_WIDTH, _CHART_HEIGHT, _CHART_POINTS = 800, 150, 400
_LETTER_WIDTH = 8  # of the charts' text, about
_FAINT = "opacity:.7"


def plan_html(plan: Plan) -> str:
    """Returns a plan as an HTML fragment: verdict, bars against the budget, decisions, compiles.

    Args:
        plan: the plan to show; names in it are escaped.
    """
    rows = plan_rows(plan)
    return _card(
        rows.headline,
        rows.verdict,
        _TONES[rows.tone],
        [
            _bars(rows.bars, rows.budget),
            _paragraph(rows.makeup, _FAINT),
            _paragraph(rows.solver, _FAINT),
            *_grid(rows.decisions),
            *_folded(rows.rounds),
            *(_paragraph(f"note: {note}") for note in rows.notes),
        ],
    )


def report_html(report: MemoryReport) -> str:
    """Returns a memory report as an HTML fragment: timeline, categories, buffers, arguments.

    Args:
        report: the report to show; names in it are escaped.
    """
    rows = report_rows(report)
    return _card(
        rows.headline,
        rows.verdict,
        _TONES[rows.tone],
        [
            _bars(rows.bars, rows.device),
            _paragraph(rows.makeup, _FAINT),
            *_timeline(rows),
            *_categories(rows.categories),
            *_grid(rows.buffers),
            *_folded(rows.arguments),
            *_folded(rows.modules),
            *_folded(rows.sources),
            *(_paragraph(f"note: {note}") for note in rows.notes),
        ],
    )


def page_html(page: Page, chart: str = "") -> str:
    """Returns a page as an HTML fragment.

    Args:
        page: what to show; names in it are escaped.
        chart: HTML to show below the sentences.
    """
    parts = [_paragraph(sentence) for sentence in page.sentences] + [chart]
    for item in page.items:
        parts.append(_heading(item.head))
        parts += [_paragraph(text) for text in item.lines]
    if page.more:
        parts.append(_paragraph(page.more, _FAINT))
    parts += [part for grid in page.grids for part in _grid(grid)]
    return _card(page.headline, "", "inherit", parts)


def _card(headline: str, verdict: str, color: str, parts: Sequence[str]) -> str:
    title = f'<div style="font-weight:600;font-size:1.1em">{escape(headline)}</div>'
    state = f'<div style="color:{color};margin-bottom:.6em">{escape(verdict)}</div>' * bool(verdict)
    style = "color:inherit;font-family:system-ui,sans-serif;line-height:1.45;padding:.2em 0"
    return f'<div style="{style}">{title}{state}{"".join(parts)}</div>'


def _paragraph(text: str, style: str = "") -> str:
    return f'<div style="margin:.3em 0;max-width:60em;{style}">{escape(text)}</div>'


def _heading(text: str) -> str:
    return f'<div style="font-weight:600;margin:.9em 0 .2em">{escape(text)}</div>'


def _bars(bars: Sequence[Bar], limit: Bar) -> str:
    """All on one scale; the limit is a line through every bar, what is beyond it is red."""
    scale = max(limit.nbytes, *(bar.nbytes for bar in bars)) or 1
    at = _percent(limit.nbytes / scale)
    lines = []
    for bar in (limit, *bars):
        fill = ""
        if bar is not limit:
            within = _percent(min(bar.nbytes, limit.nbytes) / scale)
            fill = _block(BLUE, within)
            if bar.nbytes > limit.nbytes:
                fill += _block(RED, _percent((bar.nbytes - limit.nbytes) / scale))
        mark = f"position:absolute;top:0;bottom:0;left:{at};border-left:2px solid currentColor"
        track = (
            "position:relative;display:flex;height:1.1em;background:rgba(128,128,128,.16);"
            "border-radius:2px"
        )
        lines.append(
            f'<tr style="background:none">{_td(bar.label)}{_td(bar.size, right=True)}'
            f'<td style="width:100%;padding:.15em 0 .15em .6em;border:0">'
            f'<div style="{track}">{fill}<div style="{mark}"></div></div></td></tr>'
        )
    return _table("".join(lines), "width:100%;max-width:46em;margin-right:2px")


def _block(color: str, width: str) -> str:
    return f'<div style="width:{width};background:{color}"></div>'


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _categories(bars: Sequence[Bar]) -> Iterator[str]:
    if not bars:
        return
    yield _heading("at the peak")
    total = sum(bar.nbytes for bar in bars) or 1
    blocks = "".join(_block(_category(bar), _percent(bar.nbytes / total)) for bar in bars)
    strip = "display:flex;height:1.1em;border-radius:2px;overflow:hidden;max-width:46em"
    yield f'<div style="{strip}">{blocks}</div>'
    legend = []
    for bar in bars:
        dot = f"display:inline-block;width:.7em;height:.7em;background:{_category(bar)}"
        share = "" if bar.share is None else f", {percent_text(bar.share, 1)}"
        words = escape(f"{bar.label} {bar.size}{share}")
        legend.append(
            f'<span style="margin-right:1.2em;white-space:nowrap"><span style="{dot}"></span>'
            f" {words}</span>"
        )
    yield f'<div style="margin:.3em 0;max-width:46em">{" ".join(legend)}</div>'


def _category(bar: Bar) -> str:
    return _CATEGORIES.get(bar.label, _OTHER)


def _timeline(rows: ReportRows) -> Iterator[str]:
    if rows.timeline:
        yield _heading("live bytes over the step")
        yield f'<div style="max-width:{_CHART_WIDTH}px">{timeline_svg(rows)}</div>'


def timeline_svg(rows: ReportRows) -> str:
    """Returns live bytes as a filled step curve, with phases as lines and the peak as a dot.

    It has no ``style`` attribute, so it may stand in a page whose policy forbids them.
    """
    values = resampled(rows.timeline, _CHART_POINTS)
    if not values:
        return ""
    columns, top = len(values), max(values) or 1
    width, height, head = _CHART_WIDTH, _CHART_HEIGHT, 22

    def x(column: float) -> str:
        return f"{column * width / columns:.1f}"

    def y(nbytes: int) -> str:
        return f"{head + (1 - nbytes / top) * (height - head):.1f}"

    points = " ".join(f"{x(c)},{y(v)} {x(c + 1)},{y(v)}" for c, v in enumerate(values))
    count = len(rows.timeline)
    marks = []
    for name, start in rows.phases:
        at = x(column_of(start, count, columns))
        marks.append(
            f'<line x1="{at}" y1="{head}" x2="{at}" y2="{height + 20}" stroke="currentColor" '
            f'stroke-opacity=".45" stroke-dasharray="3 3"/>'
            f'<text x="{at}" {_beside(float(at), name)} y="{height + 17}">{escape(name)}</text>'
        )
    peak = min(rows.peak_index, count - 1)
    column = column_of(peak, count, columns) + 0.5
    anchor = "start" if column < columns / 2 else "end"
    label = f"peak {format_bytes(rows.peak_bytes)}"
    return (
        f'<svg viewBox="0 0 {width} {height + 24}" role="img" '
        f'font-size="13" font-family="inherit" fill="currentColor">'
        f"<title>{escape(f'live bytes over {count} operations, {label}')}</title>"
        f'<polygon points="0,{height} {points} {width},{height}" fill="{BLUE}" '
        f'fill-opacity=".55" stroke="{BLUE}"/>'
        f'<line x1="0" y1="{height}" x2="{width}" y2="{height}" stroke="currentColor" '
        f'stroke-opacity=".45"/>{"".join(marks)}'
        f'<circle cx="{x(column)}" cy="{y(values[int(column)])}" r="4" fill="{RED}"/>'
        f'<text x="{x(column)}" y="13" text-anchor="{anchor}">{escape(label)}</text></svg>'
    )


def _beside(x: float, name: str) -> str:
    """Right of its line, or left of it where the drawing ends."""
    fits = x + 4 + _LETTER_WIDTH * len(name) <= _CHART_WIDTH
    return 'dx="4"' if fits else 'dx="-4" text-anchor="end"'


def _folded(grid: Grid) -> Iterator[str]:
    """A table behind a line that opens it, without any script."""
    if grid.rows:
        summary = f'<summary style="cursor:pointer">{escape(grid.title)}</summary>'
        body = "".join(_grid(grid, heading=False))
        yield f'<details style="margin:.6em 0">{summary}{body}</details>'


def _grid(grid: Grid, heading: bool = True) -> Iterator[str]:
    if not grid.rows:
        return
    if heading:
        yield _heading(grid.title)
    # As in a terminal: a column in which nobody has anything to say is left out.
    shown = [n for n in range(len(grid.header)) if any(row[n] for row in grid.rows)]
    names = [grid.header[n] for n in shown]
    head = "".join(_td(name, name in NUMERIC, f"font-weight:600;{_FAINT}") for name in names)
    line = "border-top:1px solid rgba(128,128,128,.3);background:none"
    body = "".join(
        f'<tr style="{line}">'
        + "".join(_td(row[n], grid.header[n] in NUMERIC) for n in shown)
        + "</tr>"
        for row in grid.rows
    )
    table = _table(f'<tr style="background:none">{head}</tr>{body}')
    yield f'<div style="overflow-x:auto">{table}</div>'
    if grid.more:
        yield _paragraph(grid.more, _FAINT)


def _table(rows: str, style: str = "") -> str:
    # Jupyter's own style has the columns of tables equally wide, whatever is in them.
    look = (
        "border-collapse:collapse;table-layout:auto;border:0;color:inherit;margin:.2em 0;"
        "font-size:.93em"
    )
    return f'<table style="{look};{style}"><tbody>{rows}</tbody></table>'


def _td(text: str, right: bool = False, style: str = "") -> str:
    align = "right" if right else "left"
    look = f"text-align:{align};padding:.15em .6em;border:0;white-space:nowrap;{style}"
    # <bdi> keeps a right-to-left name from reordering the figures beside it.
    return f'<td style="{look}"><bdi>{escape(text)}</bdi></td>'
