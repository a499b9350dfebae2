"""What a page says first: whether it fits, and what fills the device at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.show.page.data import figure
from jaxmem.show.rows import Bar, clean, percent_text, plan_rows, report_rows
from jaxmem.units import format_bytes

_NAMED = 3


@dataclass(frozen=True)
class Summary:
    """The head of a page; ``tone`` is ``"good"``, ``"changed"`` or ``"bad"``.

    Attributes:
        title: the step and the hardware.
        verdict: whether it fits, with the figures that say so.
        sentences: what fills the peak, and what a plan changes.
        limit: the budget or the device; ``bars`` are compared with it.
    """

    title: str
    verdict: str
    tone: str
    sentences: tuple[str, ...]
    limit: Bar
    bars: tuple[Bar, ...]


def summary(
    report: MemoryReport | None, plan: Plan | None, before: MemoryReport | None
) -> Summary | None:
    """Returns the head of a page with these parts; ``None`` without a report and a plan."""
    shown = plan or report
    if shown is None:
        return None
    name = "budget" if plan else "device"
    limit = Bar(name, plan.budget_bytes if plan else _device(report))
    verdict, tone = _verdict(shown.compiled_bytes, limit, clean(shown.target))
    sentences = []
    if plan is not None:
        verdict = f"{verdict} The plan: {plan_rows(plan).verdict}."
    parts = (("As written", before), ("Planned" if plan else "After" if before else "", report))
    for label, part in parts:
        if part is not None:
            sentences.append(f"{label}: the {_filled(part)}" if label else f"The {_filled(part)}")
    return Summary(
        title=f"{clean(shown.function)} on {clean(shown.target)}",
        verdict=verdict,
        tone=tone,
        sentences=tuple(sentences),
        limit=limit,
        bars=tuple(_bars(report, plan, before)),
    )


def _device(report: MemoryReport | None) -> int:
    return report.device_bytes if report else 0


def _verdict(nbytes: int, limit: Bar, target: str) -> tuple[str, str]:
    size, over = format_bytes(nbytes), nbytes - limit.nbytes
    what = f"the {limit.size} " + (f"of {target}" if limit.label == "device" else "budget")
    if over > 0:
        return f"Does not fit: {size} is {format_bytes(over)} more than {what}.", "bad"
    return f"Fits: {size} is {percent_text(nbytes, limit.nbytes)} of {what}.", "good"


def _bars(
    report: MemoryReport | None, plan: Plan | None, before: MemoryReport | None
) -> Iterator[Bar]:
    """The compiler's figures: of the step as written where it is known, and of the plan."""
    if before is not None:
        yield Bar("as written", before.compiled_bytes)
    elif plan is not None and plan.keep_all_compiled_bytes is not None:
        yield Bar("as written", plan.keep_all_compiled_bytes)
    if plan is not None:
        yield Bar("planned", plan.compiled_bytes)
    elif report is not None:
        yield Bar("compiled", report.compiled_bytes)


def _filled(report: MemoryReport) -> str:
    """What fills a report's peak, by category and by the user's own lines."""
    rows = report_rows(report)
    parts = [
        f"{bar.label} {bar.size} ({percent_text(bar.share or 0, 1)})"
        for bar in rows.categories[:_NAMED]
    ]
    lines: dict[str, int] = {}
    for buffer in report.at_peak():
        if buffer.source:
            lines[buffer.source] = lines.get(buffer.source, 0) + buffer.nbytes
    largest = sorted(lines.items(), key=lambda item: (-item[1], item[0]))[:_NAMED]
    text = f"{figure(report)} peak is {', '.join(parts) or 'empty'}."
    told = ", ".join(f"{clean(name)} {format_bytes(nbytes)}" for name, nbytes in largest)
    return f"{text} Most is made at {told}." if told else text
