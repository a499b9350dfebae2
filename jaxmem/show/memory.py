"""What explanations of memory that ran out show, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxmem.monitor.figures import DeviceMemory, Figure
from jaxmem.monitor.holders import Holding
from jaxmem.monitor.oom.explanation import Explanation, Fix
from jaxmem.monitor.oom.texts import ReportedBuffer
from jaxmem.monitor.points import Growth
from jaxmem.monitor.summary import Summary
from jaxmem.show.pages import Item, Page
from jaxmem.show.rows import NOTE_LIMIT, Grid, clean, more_text, percent_text, type_text
from jaxmem.units import format_bytes

_TOP = 8


def explanation_page(explanation: Explanation) -> Page:
    """Returns what an explanation shows: what happened, what would help, what is where."""
    e = explanation
    sentences = [e.message, *e.sentences, *(f"note: {note}" for note in e.notes)]
    grids = [_holding_grid(e.holdings, e.live_bytes)]
    if e.report is not None:
        whole = e.report.peak_bytes
        grids += [
            _sums(f"{e.doing} at its peak, by source line", "line", e.report.by_source(), whole),
            _sums(f"{e.doing} at its peak, by module", "module", e.report.by_module(), whole),
        ]
    if e.buffers:
        grids.append(_buffer_grid(e.buffers))
    return Page(
        headline=clean(e.headline, NOTE_LIMIT),
        sentences=tuple(clean(sentence, NOTE_LIMIT) for sentence in sentences),
        items=tuple(_fix_item(n, fix) for n, fix in enumerate(e.fixes, 1)),
        grids=tuple(grids),
    )


def summary_page(summary: Summary) -> Page:
    """Returns what a summary shows: each device, the host, who holds arrays, what has grown."""
    sentences = [f"note: {note}" for note in summary.notes]
    if summary.host is not None:
        rss = "" if summary.host.rss is None else f"resident {summary.host.rss}, "
        sentences.insert(0, f"host: {rss}pinned {summary.host.pinned}")
    grids = [device_grid(summary.devices), _holding_grid(summary.holdings, summary.live_bytes)]
    if summary.growth is not None and summary.growth.grown:
        grids.append(_growth_grid(summary.growth))
    return Page(
        headline=clean(summary.headline, NOTE_LIMIT),
        sentences=tuple(clean(sentence, NOTE_LIMIT) for sentence in sentences),
        grids=tuple(grids),
    )


def growth_page(growth: Growth) -> Page:
    """Returns what has grown between two points, and who holds it."""
    sentences = []
    if growth.rss_bytes is not None:
        sign = "+" if growth.rss_bytes >= 0 else ""
        sentences.append(f"resident memory of the process: {sign}{format_bytes(growth.rss_bytes)}")
    if not growth.grown:
        sentences.append("no kind of array has become more")
    return Page(
        headline=clean(growth.headline, NOTE_LIMIT),
        sentences=tuple(sentences),
        grids=(_growth_grid(growth),) if growth.grown else (),
    )


def device_grid(devices: Sequence[DeviceMemory]) -> Grid:
    """Returns a table of devices, each figure with what it stands on."""

    def cell(figure: Figure | None) -> str:
        return "not told" if figure is None else str(figure)

    rows = tuple(
        (clean(d.device), cell(d.in_use), cell(d.peak), cell(d.reserved), cell(d.largest_free))
        for d in devices
    )
    header = ("device", "in use", "peak", "reserved", "largest free block")
    return Grid("devices", header, (2, 1, 4, 3), rows)


def _growth_grid(growth: Growth) -> Grid:
    rows = tuple(
        (
            f"+{format_bytes(g.nbytes)}",
            f"+{g.count}",
            type_text(g.kind.dtype, g.kind.shape)
            + ("" if g.kind.memory == "device" else f" in {clean(g.kind.memory, 24)}"),
            ", ".join(f"{clean(h.name)} ({h.count})" for h in g.holdings[:3]) or "gone by now",
            clean(g.holdings[0].source) if g.holdings else "",
        )
        for g in growth.grown[:_TOP]
    )
    title = clean(f"more arrays, from {growth.start!r} to {growth.end!r}")
    more = more_text(g.nbytes for g in growth.grown[_TOP:])
    return Grid(title, ("bytes", "#", "type", "held by", "made at"), (3, 4, 2), rows, more)


def _fix_item(number: int, fix: Fix) -> Item:
    saves = ""
    if fix.saves_bytes is not None:
        saves = f" (saves {format_bytes(fix.saves_bytes)}, {fix.basis})"
    lines = (clean(fix.code, NOTE_LIMIT),) if fix.code else ()
    return Item(f"{number}. {clean(fix.what, NOTE_LIMIT)}{saves}", lines)


def _holding_grid(holdings: Sequence[Holding], whole: int) -> Grid:
    rows = tuple(
        (
            format_bytes(h.nbytes),
            percent_text(h.nbytes, whole),
            clean(h.name) + (f" in {clean(h.scope, 40)}" if h.scope else ""),
            str(h.count),
            f"{clean(h.largest)} {type_text(h.dtype, h.shape)}"
            if h.count > 1
            else type_text(h.dtype, h.shape),
            clean(h.source),
        )
        for h in holdings
    )
    header = ("bytes", "share", "held by", "#", "largest", "made at")
    return Grid("live arrays, and who holds them", header, (2, 5, 4), rows)


def _sums(title: str, name: str, sums: Mapping[str, int], whole: int) -> Grid:
    ordered = list(sums.items())
    rows = tuple(
        (format_bytes(nbytes), percent_text(nbytes, whole), clean(label))
        for label, nbytes in ordered[:_TOP]
    )
    more = more_text(nbytes for _, nbytes in ordered[_TOP:])
    return Grid(clean(title), ("bytes", "share", name), (2,), rows, more)


def _buffer_grid(buffers: Sequence[ReportedBuffer]) -> Grid:
    rows = tuple(
        (
            format_bytes(b.nbytes),
            clean(b.shape, 40),
            clean(b.source),
            clean(b.operation or b.label),
        )
        for b in buffers[:_TOP]
    )
    title = "largest buffers of the program, as XLA reports them"
    more = more_text(b.nbytes for b in buffers[_TOP:])
    return Grid(title, ("bytes", "type", "line", "operation"), (2, 3), rows, more)
