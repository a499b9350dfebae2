"""A frontier as HTML, with a chart of seconds against peak bytes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from jaxmem.planner.frontier import Frontier, Point, pareto
from jaxmem.show.html import BLUE, RED, page_html
from jaxmem.show.pages import frontier_page
from jaxmem.show.rows import clean
from jaxmem.units import format_bytes, format_seconds

_WIDTH, _HEIGHT, _LEFT, _MARGIN = 800, 260, 70, 24
_MOST_DOTS = 64


def frontier_html(frontier: Frontier) -> str:
    """Returns a frontier as an HTML fragment: chart, points, policies."""
    return page_html(
        frontier_page(frontier), f'<div style="max-width:{_WIDTH}px">{frontier_svg(frontier)}</div>'
    )


def frontier_svg(frontier: Frontier) -> str:
    """Returns the curve as steps, since a budget buys the point at its left; policies as letters.

    It has no ``style`` attribute, so it may stand in a page whose policy forbids them.
    """
    points = pareto(frontier.points)
    shown = [*points, *frontier.stock]
    least, most = (pick(p.peak_bytes for p in shown) for pick in (min, max))
    quick, slow = (pick(p.seconds for p in shown) for pick in (min, max))

    def x(nbytes: int) -> str:
        share = (nbytes - least) / max(1, most - least)
        return f"{_LEFT + share * (_WIDTH - _LEFT - 2 * _MARGIN):.1f}"

    def y(seconds: float) -> str:
        share = (slow - seconds) / ((slow - quick) or 1.0)
        return f"{_MARGIN + share * (_HEIGHT - 2 * _MARGIN):.1f}"

    steps, last = [], None
    for p in points:
        steps += [f"{x(p.peak_bytes)},{y(last)}"] if last is not None else []
        steps.append(f"{x(p.peak_bytes)},{y(p.seconds)}")
        last = p.seconds
    dots = "".join(
        f'<circle cx="{x(p.peak_bytes)}" cy="{y(p.seconds)}" r="3.5" fill="{BLUE}">{_title(p)}'
        "</circle>"
        for p in points[:: max(1, -(-len(points) // _MOST_DOTS))]
    )
    places = [(float(x(p.peak_bytes)), float(y(p.seconds))) for p in frontier.stock]
    letters = "".join(
        f'<g><rect x="{px}" y="{py}" width="6" height="6" fill="{RED}" '
        f'transform="translate(-3 -3)"/><text x="{px}" y="{py}" dx="6" '
        f'dy="{raised}">{chr(ord("a") + n % 26)}</text>{_title(p)}</g>'
        for n, (p, (px, py), raised) in enumerate(
            zip(frontier.stock, places, _raised(places), strict=True)
        )
    )
    name = f"seconds a step against peak bytes, {len(points)} points"
    ends = [(_LEFT, "start", least), (_WIDTH - _MARGIN, "end", most)]
    axis = "".join(
        f'<text x="{at}" y="{_HEIGHT - 4}" text-anchor="{anchor}">{format_bytes(n)}</text>'
        for at, anchor, n in ends
    )
    axis += "".join(
        f'<text x="{_LEFT - 8}" y="{y(s)}" dy="4" text-anchor="end">{format_seconds(s)}</text>'
        for s in dict.fromkeys((slow, quick))
    )
    left, foot = _LEFT - 4, _HEIGHT - _MARGIN + 4
    axis += (
        f'<polyline points="{left},{_MARGIN - 8} {left},{foot} {_WIDTH - _MARGIN},{foot}" '
        'fill="none" stroke="currentColor" stroke-opacity=".35"/>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-size="13" font-family="inherit" fill="currentColor"><title>{escape(name)}</title>'
        f'<polyline points="{" ".join(steps)}" fill="none" stroke="{BLUE}" stroke-width="2"/>'
        f"{dots}{letters}{axis}</svg>"
    )


def _raised(places: Sequence[tuple[float, float]]) -> list[int]:
    """How far above its point each letter stands, so that none lies on another."""
    taken: list[tuple[float, float]] = []
    found = []
    for x, y in places:
        above = -4
        while any(abs(x - a) < 10 and abs(y + above - b) < 11 for a, b in taken):
            above -= 11
        taken.append((x, y + above))
        found.append(above)
    return found


def _title(point: Point) -> str:
    words = f"{clean(point.solver)}: {format_bytes(point.peak_bytes)}"
    return f"<title>{escape(f'{words}, {format_seconds(point.seconds)}')}</title>"
