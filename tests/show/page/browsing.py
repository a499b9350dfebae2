"""A real headless Chromium that opens pages from files, offline, and notes what they do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest

from jaxmem.planner.report import Buffer, MemoryReport
from tests.show.samples import GIB, buffer, report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
OPERATIONS = 100


@contextmanager
def chromium() -> Iterator:
    """A started browser; skips where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(browser, path: Path, **settings) -> Iterator:
    """The page of a file, offline; afterwards it must have been silent and asked for nothing."""
    settings = {"viewport": {"width": 1366, "height": 768}, "color_scheme": "light", **settings}
    context = browser.new_context(offline=True, **settings)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    if settings.get("java_script_enabled", True):
        page.wait_for_selector("html[data-ready]")
    yield page
    assert said == []
    assert asked == [path.as_uri()]
    context.close()


def rows(page) -> list[list[str]]:
    """The text of each cell of each row that is made."""
    found = page.locator(".space [role=row]").all()
    return [row.locator("[role=gridcell]").all_inner_texts() for row in found]


def names(page) -> list[str]:
    return [cells[4] for cells in rows(page)]


def consistent(buffers: tuple[Buffer, ...], operations: int = OPERATIONS, **changes):
    """A report of which the timeline is what the buffers add up to."""
    steps = [0] * (operations + 1)
    for b in buffers:
        steps[b.start] += b.nbytes
        steps[b.end + 1] -= b.nbytes
    timeline = tuple(accumulate(steps[:-1]))
    peak = max(timeline)
    fields = {
        "timeline": timeline,
        "peak_bytes": peak,
        "peak_index": timeline.index(peak),
        "compiled_bytes": peak,
        "buffers": buffers,
        "phases": tuple(
            (name, share * operations // 10)
            for name, share in (("forward", 0), ("backward", 5), ("update", 9))
        ),
        "device_bytes": 16 * GIB,
    }
    return report(**{**fields, **changes})


def layered(layers: int = 10, **changes) -> MemoryReport:
    """6 GiB of arguments, 1 GiB kept of each layer, 3 GiB at the turn, 1 GiB of results."""
    argument = {"source": "", "module": "", "primitive": "", "dtype": "float32", "end": 99}
    buffers = [
        buffer(4 * GIB, "argument", name="params.w", path="params.w", **argument),
        buffer(2 * GIB, "argument", name="opt.mu", path="opt.mu", **argument),
        buffer(3 * GIB, "temporary", start=50, end=51, name="logits", source="loss.py:7 (loss)"),
        buffer(GIB, "output", start=90, end=99, name="out[0]", source="", module=""),
    ]
    for n in range(layers):
        buffers.append(
            buffer(GIB, "residual", start=5 * n, end=99 - 5 * n, module=f"layer{n}/mlp", name="up")
        )
    return consistent(tuple(buffers), **changes)
