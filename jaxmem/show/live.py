"""The screen of ``jaxmem top``."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.text import Text

from jaxmem.monitor.published import Published
from jaxmem.monitor.top import Screen
from jaxmem.show.html import page_html
from jaxmem.show.memory import device_grid
from jaxmem.show.pages import Page
from jaxmem.show.rows import clean, percent_text, resampled
from jaxmem.show.terminal import page_view
from jaxmem.units import format_bytes

_LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60
# A sample that is older than this is said to be.
_OLD_SECONDS = 5.0


def screen_view(screen: Screen, width: int) -> RenderableType:
    """Returns the screen as something rich prints."""
    parts: list[RenderableType] = []
    for process in screen.processes:
        parts += [page_view(_page(process, screen.time), width), *_curve(process), Text()]
    return Group(*parts)


def screen_html(screen: Screen) -> str:
    """Returns the screen as an HTML fragment."""
    return "".join(page_html(_page(process, screen.time)) for process in screen.processes)


def _page(process: Published, now: float) -> Page:
    sample = process.sample
    who = f"process {process.pid}: " if process.pid else ""
    host = sample.host
    rss = "" if host.rss is None else f"resident {host.rss}, "
    sentences = [f"host: {rss}pinned {host.pinned}"]
    age = now - sample.time
    when = time.strftime("%H:%M:%S", time.localtime(sample.time))
    if not process.alive:
        sentences.append(f"ended; last seen {when}")
    elif age > _OLD_SECONDS:
        sentences.append(f"nothing is tracked now; last seen {when}")
    calls = f", call {sample.calls}" if sample.calls > 1 else ""
    return Page(
        headline=f"{who}{clean(process.command)} - {clean(sample.name)}{calls}",
        sentences=tuple(sentences),
        grids=(device_grid(sample.devices),),
    )


def _curve(process: Published) -> list[RenderableType]:
    """Bytes in use of the fullest device, as far back as they are known."""
    if len(process.history) < 2:
        return []
    limit = max((d.limit.nbytes for d in process.sample.devices if d.limit), default=0)
    top = limit or max(process.history) or 1
    values = resampled(process.history, _COLUMNS)
    cells = "".join(_LEVELS[min(7, value * 8 // top)] for value in values)
    of = f" of {format_bytes(limit)}" if limit else ""
    last = process.history[-1]
    share = f", {percent_text(last, limit)}" if limit else ""
    label = f"  in use: {format_bytes(last)}{of}{share}"
    return [Text(), Text(f"  {cells}", "cyan", no_wrap=True), Text(label, "dim")]
