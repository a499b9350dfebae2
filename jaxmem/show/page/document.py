"""Put one page together: static parts, data, script and style under a strict policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from jaxmem import __version__
from jaxmem.errors import ArgumentError
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

    A Content-Security-Policy in the page allows its own script and style by their hashes and
    nothing else: no connection, no image, no frame, no inline handler, no ``eval``; with Trusted
    Types, no text becomes markup (https://www.w3.org/TR/CSP3, https://www.w3.org/TR/trusted-types).
    """
    _check(report, plan, before, frontier)
    subject = report or plan or frontier
    if subject is None:
        raise ArgumentError("there is nothing to show: give a report, a plan or a frontier")
    if before is None:
        # A report alone does not say whether it is of the step as written or as planned.
        shown = [("Planned" if plan else "The step", report)]
    else:
        shown = [("As written", before), ("Planned" if plan else "After", report)]
    reports = [(label, part) for label, part in shown if part is not None]
    title = f"{clean(subject.function)} on {clean(subject.target)}: memory"
    body = [
        "<header>",
        *_head(title, report, plan, before),
        '</header><main><div id="app" hidden></div>',
        *(static.plan_section(plan) if plan else ()),
        *(static.frontier_section(frontier) if frontier else ()),
        "</main>",
    ]
    data = json_text(page_data(reports, plan, frontier))
    return "".join(_page(title, body, data, _without_script(reports)))


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


def _without_script(reports: Sequence[tuple[str, MemoryReport]]) -> Iterator[str]:
    """What is read where the script does not work; it comes after it, so nobody waits for it."""
    if not reports:
        return
    yield '<div id="static"><noscript><p>This browser runs no JavaScript: here are charts and the '
    yield f"{static.MOST_ROWS} largest entries of each table. Search and selection need it.</p>"
    yield "</noscript>"
    for label, report in reports:
        yield from static.report_section(label, report)
    yield "</div>"


def _page(
    title: str, body: Iterable[str], data: str, without_script: Iterable[str]
) -> Iterator[str]:
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
    yield f'<script type="application/json" id="data">{data}</script>'
    yield f"<script>{script}</script>"
    yield from without_script
    yield f"<footer>jaxmem {__version__}; charts by uPlot {assets.uplot_version()} (MIT). "
    yield "Nothing in this file is fetched from anywhere.</footer></body></html>\n"
