"""How each kind of object is shown, once: terminal text, rich and HTML read the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from jaxmem.fitted import FittedStep
from jaxmem.monitor.oom.explanation import Explanation as OutOfMemory
from jaxmem.monitor.points import Growth
from jaxmem.monitor.summary import Summary
from jaxmem.monitor.top import Screen
from jaxmem.planner.difference import PlanDiff
from jaxmem.planner.explain import Explanation
from jaxmem.planner.frontier import Frontier
from jaxmem.planner.fusions import FusionReport
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.runtime.benchmark import Benchmark
from jaxmem.runtime.bound import BoundStep
from jaxmem.runtime.profile import StepProfile
from jaxmem.show import figures, live, memory, pages
from jaxmem.show.curve import frontier_html
from jaxmem.show.html import page_html, plan_html, report_html
from jaxmem.show.pages import Page
from jaxmem.show.terminal import (
    bounded,
    page_view,
    plain_text,
    plan_view,
    report_view,
    terminal_width,
)
from jaxmem.show.trees import tree_html, tree_view
from jaxmem.state.sharded import Sharded
from jaxmem.state.tiers import PlacedTree
from jaxmem.targets.target import Target


@dataclass(frozen=True)
class Shown:
    """Two renderings of one object.

    Attributes:
        view: what :func:`jaxmem.show.terminal.print_view` prints, for a width.
        html: an HTML fragment.
    """

    view: Callable[[int], RenderableType]
    html: Callable[[], str]


@dataclass(frozen=True)
class View:
    """A view as wide as the console that prints it."""

    shown: Shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.shown.view(bounded(options.max_width))


def text(value: Any, *, width: int | None = None) -> str:
    """Returns an object as plain text without colour.

    Args:
        value: a plan, a report, or what else shows itself.
        width: cells in a line, 40 to 140; the terminal's own width by default.
    """
    cells = terminal_width() if width is None else bounded(width)
    return plain_text(shown(value).view(cells), cells)


def html(value: Any) -> str:
    """Returns an object as an HTML fragment: no script, nothing fetched, all names escaped."""
    return shown(value).html()


def view(value: Any) -> View:
    """Returns an object as rich prints it."""
    return View(shown(value))


@functools.singledispatch
def shown(value: Any) -> Shown:
    """How an object is shown.

    Raises:
        TypeError: nothing says how.
    """
    raise TypeError(f"jaxmem does not know how to show a {type(value).__name__}")


@shown.register
def _(value: Plan) -> Shown:
    return Shown(lambda width: plan_view(value, width), lambda: plan_html(value))


@shown.register
def _(value: MemoryReport) -> Shown:
    return Shown(lambda width: report_view(value, width), lambda: report_html(value))


@shown.register
def _(value: Frontier) -> Shown:
    page = pages.frontier_page(value)
    return Shown(lambda width: page_view(page, width), lambda: frontier_html(value))


@shown.register
def _(value: Screen) -> Shown:
    return Shown(lambda width: live.screen_view(value, width), lambda: live.screen_html(value))


@shown.register
def _(value: PlacedTree) -> Shown:
    return Shown(lambda width: tree_view(value, width), lambda: tree_html(value))


def _as_page(kind: type, page_of: Callable[[Any], Page]) -> None:
    def of_value(value: Any) -> Shown:
        page = page_of(value)
        return Shown(lambda width: page_view(page, width), lambda: page_html(page))

    shown.register(kind, of_value)


_as_page(Explanation, pages.explanation_page)
_as_page(PlanDiff, pages.diff_page)
_as_page(FusionReport, pages.fusion_page)
_as_page(OutOfMemory, memory.explanation_page)
_as_page(Summary, memory.summary_page)
_as_page(Growth, memory.growth_page)
_as_page(Sharded, pages.sharded_page)
_as_page(Target, figures.target_page)
_as_page(StepProfile, figures.profile_page)
_as_page(Benchmark, figures.bench_page)
_as_page(FittedStep, figures.fitted_page)
_as_page(BoundStep, lambda bound: figures.fitted_page(bound.__func__))
