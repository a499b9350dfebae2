"""Explanations and differences of plans as terminal text and as HTML."""

from __future__ import annotations

from jaxmem.planner.difference import PlanDiff
from jaxmem.planner.explain import Explanation
from jaxmem.show.html import page_html
from jaxmem.show.pages import diff_page, explanation_page
from jaxmem.show.terminal import page_text


def explanation_text(explanation: Explanation, *, width: int | None = None) -> str:
    """Returns an explanation as plain text; ``width`` as for ``plan_text``."""
    return page_text(explanation_page(explanation), width=width)


def explanation_html(explanation: Explanation) -> str:
    """Returns an explanation as an HTML fragment."""
    return page_html(explanation_page(explanation))


def diff_text(diff: PlanDiff, *, width: int | None = None) -> str:
    """Returns a difference as plain text; ``width`` as for ``plan_text``."""
    return page_text(diff_page(diff), width=width)


def diff_html(diff: PlanDiff) -> str:
    """Returns a difference as an HTML fragment."""
    return page_html(diff_page(diff))
