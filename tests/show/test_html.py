"""The HTML is well formed, complete in itself, inert, and readable on dark and light pages."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from jaxmem.show import html
from jaxmem.show.html import plan_html, report_html
from jaxmem.show.rows import clean
from tests.show.samples import GIB, HOSTILE, buffer, decision, plan, report

ELEMENTS = {
    *("div", "span", "table", "tbody", "tr", "td", "bdi", "details", "summary"),
    *("svg", "title", "polygon", "line", "circle", "text"),
}
ATTRIBUTES = {
    *("style", "viewBox", "role", "font-size", "font-family", "fill", "fill-opacity"),
    *("stroke", "stroke-opacity", "stroke-dasharray", "points", "text-anchor"),
    *("x", "y", "x1", "x2", "y1", "y2", "dx", "cx", "cy", "r"),
}


def parsed(fragment: str) -> ET.Element:
    """The fragment as a tree; raises where a name broke out of its place."""
    return ET.fromstring(fragment)


def texts(element: ET.Element, tag: str) -> list[str]:
    return ["".join(found.itertext()) for found in element.iter(tag)]


def hostile_plan():
    decisions = tuple(
        decision(i, source=n, module=n, checkpoint_name=n, primitive=n, dtype=n)
        for i, n in enumerate(HOSTILE)
    )
    rounds = tuple(type(plan().rounds[0])(n, 1, 1, 1, False, n) for n in HOSTILE)
    names = {"function": HOSTILE[0], "target": HOSTILE[1], "notes": HOSTILE}
    return plan(decisions=decisions, rounds=rounds, **names)


def hostile_report():
    buffers = [buffer(GIB, n, name=n, source=n, module=n, dtype=n) for n in HOSTILE]
    buffers += [buffer(GIB, "argument", name=n, path=n, dtype=n) for n in HOSTILE]
    phases = tuple((n, i) for i, n in enumerate(HOSTILE))
    names = {"function": HOSTILE[0], "target": HOSTILE[1]}
    return report(buffers=tuple(buffers), phases=phases, **names)


@pytest.mark.parametrize(
    "fragment",
    [
        plan_html(plan()),
        report_html(report()),
        plan_html(hostile_plan()),
        report_html(hostile_report()),
        plan_html(plan(decisions=(), rounds=(), notes=(), budget_bytes=0)),
        report_html(report(timeline=(), phases=(), buffers=(), device_bytes=0)),
    ],
    ids=["plan", "report", "hostile plan", "hostile report", "empty plan", "empty report"],
)
def test_only_inert_elements_and_nothing_fetched(fragment):
    for element in parsed(fragment).iter():
        assert element.tag in ELEMENTS
        assert element.attrib.keys() <= ATTRIBUTES
        assert not re.search(r"url\(|expression|@import|//", " ".join(element.attrib.values()))


def test_hostile_names_stay_text():
    shown = "".join(texts(parsed(plan_html(hostile_plan())), "div"))
    for name in HOSTILE:
        assert clean(name) in shown
    shown = "".join(texts(parsed(report_html(hostile_report())), "div"))
    for name in HOSTILE:
        assert clean(name) in shown
    assert "x" * 401 not in shown


def test_a_plan_says_what_the_terminal_says():
    tree = parsed(plan_html(plan()))
    head = [texts(div, "div")[0] for div in list(tree)[:2]]
    assert head == [
        "train_step on h200",
        "recomputes 18 of 42 values, +6.1% predicted time (106ms a step)",
    ]
    rows = [texts(row, "td") for row in tree.iter("tr")]
    assert rows[:4] == [
        ["budget", "20.0GiB", ""],
        ["compiled", "19.0GiB", ""],
        ["predicted", "18.0GiB", ""],
        ["keep-all", "30.0GiB", ""],
    ]
    assert rows[6] == [
        *("4.0GiB", "recompute 2 of 16", "+1.10ms", "up (mul)", "16 x bf16[8,2048,2048]"),
        *("train.py:41 (mlp)", "block/mlp"),
    ]
    assert rows[-1] == ["2", "search", "20.0GiB", "18.0GiB", "19.0GiB", "fits"]
    assert texts(tree, "div")[-1] == "note: planned for h200, which is not this machine."


def test_bars_are_to_scale_and_what_is_over_budget_is_red():
    styles = [div.get("style", "") for div in parsed(plan_html(plan())).iter("div")]
    bars = [s.removeprefix("width:") for s in styles if re.match(r"width:[\d.]+%", s)]
    assert bars == [
        f"63.33%;background:{html.BLUE}",  # compiled 19 of 30
        f"60.00%;background:{html.BLUE}",  # predicted 18 of 30
        f"66.67%;background:{html.BLUE}",  # keep-all up to the budget
        f"33.33%;background:{html.RED}",  # and beyond
    ]


def test_the_timeline_is_drawn_to_scale_with_its_peak_and_phases():
    tree = parsed(report_html(report()))
    (svg,) = tree.iter("svg")
    points = [tuple(map(float, p.split(","))) for p in svg.find("polygon").get("points").split()]
    assert (points[0], points[-1]) == ((0, 150), (800, 150))
    heights = [150 - y for _, y in points[1:-1]]
    assert max(heights) == 128  # 32GiB fill the chart
    assert heights[0] == pytest.approx(128 * 4 / 32, abs=0.06)
    assert all(a[0] <= b[0] for a, b in pairwise(points))
    peak = svg.find("circle")
    assert float(peak.get("cx")) == pytest.approx(800 * 7 / 12, abs=1.1)
    assert texts(svg, "text") == ["forward", "backward", "update", "peak 32.0GiB"]
    starts = [float(line.get("x1")) for line in svg.iter("line") if line.get("stroke-dasharray")]
    assert starts == pytest.approx([0, 800 * 7 / 12, 800 * 10 / 12], abs=0.1)
    assert texts(svg, "title") == ["live bytes over 12 operations, peak 32.0GiB"]


def test_the_name_of_a_narrow_last_phase_is_not_cut_off():
    phases = (("forward", 0), ("backward", 500), ("update", 998))
    long = report(timeline=tuple(range(1000)), peak_index=999, peak_bytes=999, phases=phases)
    (svg,) = parsed(report_html(long)).iter("svg")
    anchors = {"".join(t.itertext()): t.get("text-anchor") for t in svg.iter("text")}
    assert (anchors["forward"], anchors["update"]) == (None, "end")


def test_wide_tables_have_all_the_room_there_is():
    """Only text is kept to a width that is easy to read."""
    outer = parsed(report_html(report())).find("div")
    assert "max-width" not in outer.get("style")


def test_a_long_timeline_stays_small():
    long = report(timeline=tuple(range(200_000)), peak_index=199_999, peak_bytes=199_999)
    assert len(report_html(long)) < 40_000


def test_reports_fold_the_longer_tables():
    summaries = texts(parsed(report_html(report())), "summary")
    assert summaries == [
        *("arguments at the peak", "by module, at the peak", "by source line, at the peak"),
    ]


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2.1."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("page", ["#ffffff", "#1e1e1e"])
def test_every_color_reads_on_a_dark_and_on_a_light_page(page):
    fragments = plan_html(plan()) + report_html(report(device_bytes=1))
    colors = {*re.findall(r"#[0-9a-f]{6}", fragments), *html._CATEGORIES.values(), html.GREEN}
    assert len(colors) >= 8
    for color in colors:
        light, dark = sorted((luminance(color), luminance(page)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, color


def test_text_has_the_color_of_the_page():
    for fragment in (plan_html(plan()), report_html(report())):
        assert parsed(fragment).get("style").startswith("color:inherit;")


def test_notebooks_get_these_fragments():
    assert plan()._repr_html_() == plan_html(plan())
    assert report()._repr_html_() == report_html(report())
