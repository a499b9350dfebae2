"""Put one page together: static parts, data, script and style under a strict policy, in one file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from jaxmem import __version__
from jaxmem.errors import ArgumentError, ReportError
from jaxmem.planner.frontier import Frontier
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.show.page import assets, static
from jaxmem.show.page.data import json_text, page_data
from jaxmem.show.page.summary import summary
from jaxmem.show.rows import clean


def document(
    report: MemoryReport | None = None,
    *,
    plan: Plan | None = None,
    before: MemoryReport | None = None,
    frontier: Frontier | None = None,
) -> str:
    """Returns a whole HTML page about a step; it loads nothing and runs only its own script.

    Args:
        report: what the page is about; of the planned step where there is a plan.
        plan: its budget becomes the line that must not be crossed, its decisions a table.
        before: the report of the step as written, shown beside ``report``.
        frontier: what other budgets would cost.

    Raises:
        ArgumentError: one of them is of another kind, or they are of different steps.

    A Content-Security-Policy in the page allows its own script and style by their hashes and nothing
    else: no connection, no image, no frame, no inline handler, no ``eval``; with Trusted Types, no
    text becomes markup either (https://www.w3.org/TR/CSP3, https://www.w3.org/TR/trusted-types).
    """
    _check(report, plan, before, frontier)
    subject = report or plan or frontier
    assert subject is not None
    if before is None:
        shown = [("Planned" if plan else "As written", report)]
    else:
        shown = [("As written", before), ("Planned" if plan else "After", report)]
    reports = [(label, part) for label, part in shown if part is not None]
    title = f"{clean(subject.function)} on {clean(subject.target)}: memory"
    body = [
        "<header>",
        *_head(title, report, plan, before),
        "</header><main>",
        *_reports(reports),
        *(static.plan_section(plan) if plan else ()),
        *(static.frontier_section(frontier) if frontier else ()),
        "</main>",
    ]
    return "".join(_page(title, body, json_text(page_data(reports, plan, frontier))))


def write_page(path: str | os.PathLike[str], text: str) -> Path:
    """Write a page to ``path`` and return that.

    Raises:
        ReportError: it cannot be written there; the message says why and what to do.
    """
    file = Path(path)
    try:
        file.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ReportError(f"the report cannot be written to {file}: {_fix(file, error)}") from error
    return file


def _fix(file: Path, error: OSError) -> str:
    folder = file.parent
    if isinstance(error, IsADirectoryError):
        return f"it is a folder. Name a file in it: {file / 'report.html'}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"there is no folder {folder}. Make it first, or choose another path."
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return f"no permission ({error.strerror}). Choose a path in a folder you may write to."
    return f"{error.strerror or error}."


def _check(
    report: MemoryReport | None,
    plan: Plan | None,
    before: MemoryReport | None,
    frontier: Frontier | None,
) -> None:
    kinds = {"report": MemoryReport, "plan": Plan, "before": MemoryReport, "frontier": Frontier}
    parts = {"report": report, "plan": plan, "before": before, "frontier": frontier}
    for name, part in parts.items():
        if part is not None and not isinstance(part, kinds[name]):
            raise ArgumentError(
                f"{name}= takes a {kinds[name].__name__}, not a {type(part).__name__}"
                + _ways[kinds[name]]
            )
    if before is not None and report is None:
        raise ArgumentError(
            "before= is shown beside a report: before.to_html(path) for it alone, or "
            "step.report(...).to_html(path, plan=plan, before=before)"
        )
    steps = {
        name: f"{part.function} on {part.target}"
        for name, part in parts.items()
        if part is not None and name != "before"
    }
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{name} of {step}" for name, step in steps.items())
        raise ArgumentError(
            f"one page is about one step on one target, not {told}. Write a page for each."
        )


_ways = {
    MemoryReport: ": jaxmem.analyze(...) and step.report(...) give one.",
    Plan: ": step.plan(...) and jaxmem.plan(...) give one.",
    Frontier: ": jaxmem.frontier(...) gives one.",
}


def _head(
    title: str, report: MemoryReport | None, plan: Plan | None, before: MemoryReport | None
) -> Iterator[str]:
    summed = summary(report, plan, before)
    if summed is None:
        yield f"<h1><bdi>{escape(title)}</bdi></h1>"
    else:
        yield from static.head(summed)


def _reports(reports: Sequence[tuple[str, MemoryReport]]) -> Iterator[str]:
    """Where the script works, and what is read until it does, or without it."""
    if not reports:
        return
    yield '<div id="app" hidden></div><div id="static">'
    yield (
        "<noscript><p>This browser runs no JavaScript: below are the chart and the largest "
        f"{static.MOST_ROWS} buffers. Search, selection and the rest need it.</p></noscript>"
    )
    for label, report in reports:
        yield from static.report_section(label, report)
    yield "</div>"


def _page(title: str, body: Sequence[str], data: str) -> Iterator[str]:
    script, style = assets.script(), assets.style()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {assets.csp_hash(script)}",
            f"style-src {assets.csp_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="referrer" content="no-referrer">'
    yield '<meta name="color-scheme" content="light dark">'
    yield f"<title>{escape(title)}</title><style>{style}</style></head><body>"
    yield from body
    yield f'<footer>jaxmem {__version__}; charts by uPlot {assets.uplot_version()} (MIT). '
    yield "Nothing in this file is fetched from anywhere.</footer>"
    yield f'<script type="application/json" id="data">{data}</script>'
    yield f"<script>{script}</script></body></html>\n"
