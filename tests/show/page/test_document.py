"""A page is complete in itself, inert whatever names are in it, and reads without scripts."""

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

import jaxmem
from jaxmem.errors import ArgumentError
from jaxmem.planner.frontier import Point
from jaxmem.show.page import assets, document, write_page
from jaxmem.show.rows import clean
from jaxmem.units import format_bytes
from tests.show.samples import GIB, HOSTILE, MIB, buffer, decision, frontier, plan, report

VOID = {"meta", "br", "rect", "line", "circle", "polygon", "polyline"}
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "script"),
    *("h1", "h2", "p", "div", "section", "noscript", "bdi", "details", "summary"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "text", "rect", "line", "circle", "polygon", "polyline"),
}


class Parsed(HTMLParser):
    """Elements with their attributes, and the text in each kind of element."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.text, self.policy = [], [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.text.append((tag, ""))
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))

    def inside(self, tag):
        return [text for kind, text in self.text if kind == tag and text]


def hostile():
    def names(n):
        return {"name": n, "source": n, "module": n, "dtype": n, "primitive": n}

    step = {"function": HOSTILE[0], "target": HOSTILE[1]}
    buffers = [buffer(GIB, n, checkpoint_name=n, **names(n)) for n in HOSTILE]
    buffers += [buffer(GIB, "argument", path=n, **names(n)) for n in HOSTILE]
    shown = report(
        buffers=tuple(buffers), phases=tuple((n, i) for i, n in enumerate(HOSTILE)), **step
    )
    decisions = tuple(
        decision(i, source=n, module=n, checkpoint_name=n, primitive=n, dtype=n)
        for i, n in enumerate(HOSTILE)
    )
    planned = plan(decisions=decisions, notes=HOSTILE, why=HOSTILE[4], solver=HOSTILE[1], **step)
    stock = tuple(Point((9 + i) * GIB, 0.1 + i / 50, 0.1, n) for i, n in enumerate(HOSTILE))
    return {
        "report": shown,
        "plan": planned,
        "before": shown,
        "frontier": frontier(stock=stock, **step),
    }


EMPTY = {"timeline": (), "phases": (), "buffers": (), "peak_index": 0, "peak_bytes": 0}
PAGES = {
    "report": lambda: document(report()),
    "all": lambda: document(report(), plan=plan(), before=report(), frontier=frontier()),
    "plan": lambda: document(plan=plan()),
    "frontier": lambda: document(frontier=frontier()),
    "hostile": lambda: document(**hostile()),
    "empty": lambda: document(report(compiled_bytes=0, device_bytes=0, **EMPTY)),
    "one operation": lambda: document(report(timeline=(5,), peak_bytes=5, peak_index=0)),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_only_inert_elements_and_fetches_nothing(name):
    page = Parsed(PAGES[name]())
    assert not page.open
    assert {tag for tag, _ in page.elements} - {"title"} <= ELEMENTS
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    for tag, attributes in page.elements:
        for attribute, value in attributes.items():
            assert not attribute.startswith("on"), (tag, attribute)
            assert attribute not in ("style", "src", "href", "srcset", "action"), (tag, attribute)
            assert "://" not in (value or "")


@pytest.mark.parametrize("name", PAGES)
def test_the_policy_allows_this_script_and_this_style_and_nothing_else(name):
    page = Parsed(PAGES[name]())
    hashes = {}
    for tag in ("script", "style"):
        text = "".join(page.inside(tag)[-1:])
        hashes[tag] = f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    assert rules == {
        "default-src": "'none'",
        "script-src": hashes["script"],
        "style-src": hashes["style"],
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_hostile_names_are_text_and_short():
    page = Parsed(document(**hostile()))
    shown = "\n".join(page.inside("bdi"))
    for name in HOSTILE:
        assert clean(name) in shown
    assert "x" * 401 not in shown


def test_without_scripts_the_largest_buffers_are_read_with_all_that_is_known_of_them():
    rows = re.findall(r"<tr>(.*?)</tr>", document(report()))
    cells = [re.findall(r"<bdi>(.*?)</bdi>", row) for row in rows]
    assert [
        *("24.0GiB", "75%", "residual", "dot_general", "bf16[8,2048,2048]"),
        *("train.py:41 (mlp)", "block/mlp: up"),
    ] in cells
    assert ["3.0GiB", "9%", "params.w"] in cells


def test_without_scripts_no_table_is_longer_than_it_can_be_read():
    many = tuple(buffer(n + 1, "temporary", name=f"t{n}") for n in range(1000))
    page = document(report(buffers=many))
    bodies = re.findall(r"<caption>(.*?)</caption>.*?<tbody>(.*?)</tbody>", page)
    counts = {title: body.count("<tr>") for title, body in bodies}
    assert counts["largest buffers at the peak"] == 200
    assert max(counts.values()) == 200
    assert "and 800 more" in page


@pytest.mark.parametrize(
    ("made", "verdict", "tone"),
    [
        (
            lambda: document(report()),
            "Fits: 33.0GiB is 26% of the 128.0GiB of h200.",
            "good",
        ),
        (
            lambda: document(report(device_bytes=24 * GIB)),
            "Does not fit: 33.0GiB is 9.0GiB more than the 24.0GiB of h200.",
            "bad",
        ),
        (
            lambda: document(report(compiled_bytes=19 * GIB), plan=plan(), before=report()),
            "Fits: 19.0GiB is 95% of the 20.0GiB budget. The plan: recomputes 18 of 42 values, "
            "+6.1% predicted time (106ms a step).",
            "good",
        ),
        (
            lambda: document(plan=plan(budget_bytes=18 * GIB)),
            "Does not fit: 19.0GiB is 1.0GiB more than the 18.0GiB budget.",
            "bad",
        ),
    ],
)
def test_the_first_line_says_whether_it_fits(made, verdict, tone):
    found, text = re.search(r'<p class="verdict (\w+)">(.*?)</p>', made()).groups()
    assert found == tone
    assert text.startswith(verdict)


def test_a_report_alone_is_not_said_to_be_of_the_step_as_written():
    """It may be of a planned one: it does not say."""
    alone, planned = document(report()), document(report(), plan=plan())
    assert '"The step"' in alone and "As written" not in alone
    assert '"Planned"' in planned


def test_the_head_says_what_fills_the_peak():
    page = document(report())
    assert (
        "The predicted peak is residual 24.0GiB (75%), argument 4.0GiB (12%), temporary 4.0GiB "
        "(12%). Most is made at train.py:41 (mlp) 28.0GiB."
    ) in page


def test_ten_thousand_buffers_are_less_than_two_megabytes():
    lines = [f"model.py:{n} (Layer.__call__)" for n in range(300)]
    buffers = tuple(
        buffer(
            (n * 7919) % (64 * MIB),
            "residual" if n % 3 else "temporary",
            start=n,
            end=min(9_999, n + (n * 31) % 4000),
            source=lines[n % 300],
            module=f"layer{n // 100}/block{n % 7}/mlp",
            shape=(n % 97, 2048),
        )
        for n in range(10_000)
    )
    timeline = tuple((n * 7919) % (1 << 37) for n in range(10_000))
    page = document(report(buffers=buffers, timeline=timeline))
    assert len(page.encode()) < 2_000_000


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "nothing to show.*report"),
        ({"report": plan()}, r"report= takes a MemoryReport, not a Plan: jaxmem.analyze"),
        ({"report": report(), "plan": report()}, r"plan= takes a Plan, not a MemoryReport"),
        ({"report": report(), "before": "as written"}, r"before= takes a MemoryReport, not a str"),
        ({"report": report(), "frontier": ()}, r"frontier= takes a Frontier, not a tuple"),
        ({"plan": plan(), "before": report()}, r"before= is shown beside a report"),
        (
            {"report": report(), "plan": plan(function="other")},
            r"not report of train_step on h200, plan of other on h200",
        ),
        (
            {"plan": plan(), "frontier": frontier(target="a100")},
            r"not plan of train_step on h200, frontier of train_step on a100",
        ),
    ],
)
def test_what_does_not_belong_on_one_page_is_refused(parts, message):
    with pytest.raises(ArgumentError, match=message):
        document(**parts)


def test_the_methods_write_what_was_asked_for_and_return_the_path(tmp_path):
    shown, planned, known = report(), plan(), frontier()
    path = shown.to_html(tmp_path / "r.html", plan=planned, before=shown, frontier=known)
    assert path == tmp_path / "r.html"
    everything = document(shown, plan=planned, before=shown, frontier=known)
    assert path.read_text(encoding="utf-8") == everything
    assert planned.to_html(str(path), frontier=known).read_text() == document(
        plan=planned, frontier=known
    )
    assert known.to_html(path).read_text() == document(frontier=known)


def test_the_same_report_gives_the_same_page():
    assert document(report(), plan=plan()) == document(report(), plan=plan())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}", r"it is a folder. Name a file in it: .*report\.html"),
        ("{tmp}/none/r.html", r"there is no folder .*none. Make it first"),
        ("{tmp}/file/r.html", r"there is no folder .*file"),
        # Linux lets nobody make files there, not even root.
        ("/sys/r.html", r"no permission|there is no folder /sys"),
        ("{tmp}/" + "x" * 300, r"(?i)too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_named_with_what_to_do(tmp_path, path, message):
    (tmp_path / "file").write_text("")
    asked = path.format(tmp=tmp_path)
    with pytest.raises(jaxmem.ReportFileError, match=message) as caught:
        report().to_html(asked)
    assert asked in str(caught.value)
    assert isinstance(caught.value, OSError)


def test_a_report_that_is_there_is_replaced(tmp_path):
    path = tmp_path / "r.html"
    path.write_text("x" * 5_000_000)
    assert write_page(path, "short").read_text() == "short"


def test_assets_are_those_that_are_pinned(monkeypatch):
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE"):
        assert assets.vendored(name)
    monkeypatch.setattr(assets, "sha256", lambda content: sha256(content + b" "))
    with pytest.raises(RuntimeError, match="LICENSE is not the file of uPlot"):
        assets.vendored("LICENSE")


def test_the_page_carries_the_licence_of_what_it_copies():
    page = document(report())
    assert "Permission is hereby granted, free of charge" in page
    assert f"uPlot {assets.uplot_version()} (MIT)" in page


def test_no_script_of_ours_makes_markup_or_code_from_text():
    own = assets.script().split('"use strict";\n', 2)[-1]
    assert "function decodeReport" in own
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    assert not re.search(forbidden, own)
    assert "fetch(" not in own and "XMLHttpRequest" not in own and "://" not in own


def test_bars_are_to_scale():
    page = document(report(compiled_bytes=19 * GIB), plan=plan(), before=report())
    fills = re.findall(r'<rect class="(within|beyond)"(?: x="[\d.]+")? width="([\d.]+)"', page)
    assert [(kind, round(float(width))) for kind, width in fills] == [
        ("within", round(1000 * 20 / 33)),
        ("beyond", round(1000 * 13 / 33)),
        ("within", round(1000 * 19 / 33)),
    ]
    assert format_bytes(33 * GIB) in page
