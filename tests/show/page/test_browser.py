"""The page in a real browser: it opens offline and silently, and finds, selects, sorts, shows."""

import re

import pytest

from jaxmem.show.page import assets
from jaxmem.show.rows import clean
from jaxmem.units import format_bytes, format_seconds
from tests.show.page.browsing import (
    OPERATIONS,
    layered,
    names,
    opened,
    rows,
)
from tests.show.page.test_document import PAGES, hostile
from tests.show.samples import GIB, HOSTILE, frontier, plan

# What the script does is the same on every Python.
pytestmark = [pytest.mark.browser, pytest.mark.wide]


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """The path of the report of ten layers."""
    return layered().to_html(tmp_path_factory.mktemp("pages") / "layers.html")


def place(page, operation, share=0.0, which=0):
    """Where an operation is on the screen, at a share of the plot's height from the top."""
    box = page.locator(".u-over").nth(which).bounding_box()
    x = box["x"] + (operation + 0.5) / OPERATIONS * box["width"]
    return x, box["y"] + share * box["height"]


def brush(page, first, last, which=0):
    page.mouse.move(*place(page, first, 0.05, which))
    page.mouse.down()
    page.mouse.move(*place(page, last, 0.06, which), steps=3)
    page.mouse.up()


def pixel(page, operation, nbytes, top):
    """The colour at an operation and a height in bytes, "" for none; the scale ends at `top`."""
    x, y = place(page, operation, 1 - nbytes / top)
    return page.evaluate(
        """([x, y]) => {
            const canvas = document.querySelector(".uplot canvas");
            const box = canvas.getBoundingClientRect(), scale = canvas.width / box.width;
            const copy = new OffscreenCanvas(1, 1).getContext("2d");
            const at = [x - box.left, y - box.top].map((n) => -Math.floor(n * scale));
            copy.drawImage(canvas, ...at);
            const [r, g, b, alpha] = copy.getImageData(0, 0, 1, 1).data;
            const digits = [r, g, b].map((n) => n.toString(16).padStart(2, "0"));
            return alpha ? "#" + digits.join("") : "";
        }""",
        [x, y],
    )


def variable(page, name):
    return page.evaluate(
        "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()",
        name,
    )


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_offline_without_a_word_or_a_request(browser, tmp_path, name):
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](), encoding="utf-8")
    with opened(browser, path) as page:
        if name not in ("plan", "frontier"):
            assert page.locator(".timeline canvas").count() == (
                2 if name in ("all", "hostile") else 1
            )
            assert page.locator("#static").is_hidden()
        for mode in page.locator("[aria-label='Stack by'] button").all():
            mode.click()


def test_at_first_the_largest_at_the_peak_are_shown_alike_together(browser, layers):
    with opened(browser, layers) as page:
        shown = rows(page)
        assert [(r[0], r[2], r[3], r[4]) for r in shown] == [
            ("10.0GiB", "10", "residual", "up"),
            ("4.0GiB", "1", "argument", "params.w"),
            ("3.0GiB", "1", "temporary", "logits"),
            ("2.0GiB", "1", "argument", "opt.mu"),
        ]
        assert shown[0][5:] == [
            "bf16[8,2048,2048]",
            "train.py:41 (mlp)",
            "layer*/mlp",
            "1\u2013100",
        ]
        assert "13 buffers live at operation 51, the peak, 19.0GiB" in page.inner_text(".count")


def test_a_buffer_is_found_by_typing_part_of_its_name(browser, layers):
    with opened(browser, layers) as page:
        page.get_by_label("Find").fill("pt.m")
        assert names(page) == ["opt.mu"]
        page.get_by_label("Find").fill("LAYER7 up")  # every word, of any of its names
        assert [(r[4], r[7]) for r in rows(page)] == [("up", "layer7/mlp")]
        page.get_by_label("Find").fill("out[0]")  # not live at the peak
        assert names(page) == ["out[0]"]
        assert "none at the peak: the whole step is shown" in page.inner_text(".count")
        page.get_by_label("Find").fill("no such thing")
        assert rows(page) == []


def test_brushing_the_chart_filters_the_table_to_what_is_live_there(browser, layers):
    with opened(browser, layers) as page:
        page.get_by_label("alike together").uncheck()
        brush(page, 92, 96)
        assert page.get_by_role("radio", name="Selection").get_attribute("aria-checked") == "true"
        first, last = (
            int(n) - 1
            for n in re.search(r"operations (\d+) to (\d+)", page.inner_text(".count")).groups()
        )
        assert 91 <= first <= 93 and 95 <= last <= 97
        live = [b for b in layered().buffers if b.start <= last and b.end >= first]
        assert len(live) == 5
        assert sorted(names(page)) == sorted(b.name for b in live)
        page.keyboard.press("Tab")
        page.get_by_role("radio", name="At the peak").click()
        assert len(rows(page)) == 13


def test_a_row_of_the_table_is_highlighted_in_the_chart_and_told_in_full(browser, layers):
    top = 1.1 * 19 * GIB
    with opened(browser, layers) as page:
        before = pixel(page, 20, GIB, top)
        assert before == variable(page, "argument")
        page.get_by_role("radio", name="Each buffer").click()
        page.locator(".space [role=row]").filter(has_text="opt.mu").click()
        assert pixel(page, 20, 5 * GIB, top) == variable(page, "argument")
        assert pixel(page, 20, GIB, top) != variable(page, "argument")  # the other one is faded
        told = page.locator("aside dl").inner_text()
        for text in ("opt.mu", "2.0GiB (2,147,483,648)", "f32[8,2048,2048]", "argument"):
            assert text in told
        assert "operations 1 (forward) to 100 (update)" in told
        page.get_by_role("button", name="Close").click()
        assert pixel(page, 20, GIB, top) == variable(page, "argument")


def test_a_buffer_of_the_chart_tells_what_it_is_when_pointed_at_and_clicked(browser, layers):
    top = 1.1 * 19 * GIB
    with opened(browser, layers) as page:
        page.get_by_role("radio", name="Each buffer").click()
        # At operation 21 the arguments are 6 GiB and five layers' values lie on them.
        x, y = place(page, 20, 1 - 8.5 * GIB / top)
        page.mouse.move(x, y)
        tip = page.locator(".timeline .tooltip")
        for text in ("up bf16[8,2048,2048] 1.0GiB", "operation 21, forward: 11.0GiB"):
            assert text in tip.inner_text()
        for text in ("live from operation 11 to 90", "layer2/mlp", "train.py:41 (mlp)"):
            assert text in tip.inner_text()
        page.mouse.click(x, y)
        told = page.locator("aside dl").inner_text()
        assert "layer2/mlp" in told and "operations 11 (forward) to 90 (backward)" in told


def test_bands_are_drawn_at_their_height_and_filter_the_table(browser, layers):
    top = 1.1 * 19 * GIB
    with opened(browser, layers) as page:
        # Away from the names in the middle of the bands and from the line of the phase.
        for at, nbytes, name in ((40, 3, "argument"), (40, 7.5, "residual"), (51, 18, "temporary")):
            assert pixel(page, at, nbytes * GIB, top) == variable(page, name)
        assert pixel(page, 2, 8 * GIB, top) == ""
        assert pixel(page, 95, 7.8 * GIB, top) == variable(page, "residual")
        page.mouse.click(*place(page, 30, 1 - 7.5 * GIB / top))
        assert names(page) == ["up"]
        assert "7 buffers of residual live at operation" in page.inner_text(".count")
        page.locator(".legend button").filter(has_text="argument").click()
        assert set(names(page)) == {"params.w", "opt.mu"}


def test_columns_sort_both_ways(browser, layers):
    with opened(browser, layers) as page:
        head = page.get_by_role("columnheader", name="Buffer")
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        assert names(page) == ["logits", "opt.mu", "params.w", "up"]
        head.get_by_role("button").click()
        assert names(page) == ["up", "params.w", "opt.mu", "logits"]
        page.get_by_role("columnheader", name="Count").get_by_role("button").click()
        assert names(page)[0] == "up"


def test_everything_is_reached_with_the_keyboard_and_its_focus_is_seen(browser, layers):
    with opened(browser, layers) as page:
        stops = []
        for _ in range(30):
            page.keyboard.press("Tab")
            stops.append(
                page.evaluate(
                    """() => {
                        const on = document.activeElement, style = getComputedStyle(on);
                        const seen = style.outlineStyle !== "none" || on === document.body;
                        return [on.getAttribute("aria-label") ?? on.id ?? "", on.textContent, seen];
                    }"""
                )
            )
        assert all(seen for _, _, seen in stops)
        order = ["Theme: system", "Category", "Zoom to selection", "Whole step"]
        assert [text for _, text, _ in stops[:4]] == order
        labels = [label for label, _, _ in stops]
        chart = next(i for i, label in enumerate(labels) if label.startswith("Live bytes over"))
        assert (
            chart
            < labels.index("search")
            < labels.index(next(label for label in labels if label.startswith("Buffers. Up")))
        )


def test_the_chart_is_walked_selected_and_picked_with_keys(browser, layers):
    with opened(browser, layers) as page:
        said = page.locator("[aria-live].unseen")
        page.locator(".timeline").focus()
        page.keyboard.press("p")
        assert said.inner_text() == "operation 51, backward, 19.0GiB"
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert said.inner_text() == "operation 53, backward, 16.0GiB"
        page.keyboard.press("Home")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowUp")
        assert said.inner_text() == "operation 1, forward, 7.0GiB: residual 1.0GiB"
        page.keyboard.press("Enter")
        assert names(page) == ["up"]
        page.keyboard.press("Escape")
        assert len(rows(page)) == 4
        page.keyboard.press("End")
        for _ in range(3):
            page.keyboard.press("Shift+ArrowLeft")
        assert "in operations 97 to 100" in page.inner_text(".count")
        for key in ("+", "+", "-", "0", "PageUp", "ArrowDown"):
            page.keyboard.press(key)
        assert said.inner_text().startswith("operation 87, backward, ")


def test_the_table_is_walked_and_picked_with_keys(browser, layers):
    with opened(browser, layers) as page:
        page.locator(".grid").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        picked = page.locator(".space [role=row][aria-selected=true]")
        assert "params.w" in picked.inner_text()
        assert page.locator(".grid").get_attribute("aria-activedescendant") == "row1"
        page.keyboard.press("Enter")
        assert picked.count() == 0
        page.locator("[aria-label='Which buffers'] [tabindex='0']").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert "14 buffers in the whole step, at most 19.0GiB at a time" in page.inner_text(
            ".count"
        )


def test_before_and_after_stand_side_by_side_on_one_scale(browser, tmp_path):
    before, after = layered(), layered(layers=5)
    planned = plan(budget_bytes=15 * GIB, compiled_bytes=14 * GIB)
    path = after.to_html(tmp_path / "both.html", plan=planned, before=before)
    with opened(browser, path) as page:
        boxes = [box.bounding_box() for box in page.locator(".u-over").all()]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
        titles = page.locator(".panel h2").all_inner_texts()
        assert titles[0].startswith(
            "As written: predicted peak 19.0GiB at operation 51 of 100 (backward)"
        )
        assert titles[1].startswith("Planned: predicted peak 14.0GiB")
        amounts = page.locator(".legend li").filter(has_text="residual").locator(".amount")
        assert [text.split()[0] for text in amounts.all_inner_texts()] == ["10.0GiB", "5.0GiB"]
        assert rows(page)[0][:3] == ["5.0GiB", "36%", "5"]  # of the plan
        brush(page, 92, 96, which=0)
        assert page.get_by_role("radio", name="As written").get_attribute("aria-checked") == "true"
        page.locator(".space [role=row]").first.click()
        assert page.locator("aside dl").is_visible()
        assert "Fits: 14.0GiB is 93% of the 15.0GiB budget" in page.inner_text(".verdict")


def test_the_frontier_is_walked_from_point_to_point(browser, tmp_path):
    path = layered().to_html(tmp_path / "page.html", frontier=frontier())
    with opened(browser, path) as page:
        page.locator("#frontier").focus()
        page.keyboard.press("ArrowRight")
        tip = page.locator("#frontier .tooltip")
        assert "10.0GiB, 125ms a step" in tip.inner_text()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert "dots_saveable" in tip.inner_text() and "130ms" in tip.inner_text()
        assert page.locator("#frontier > svg").count() == 0  # the script's chart is in its place


def test_without_javascript_the_tables_and_charts_read(browser, layers):
    with opened(browser, layers, java_script_enabled=False) as page:
        assert page.locator("#app").is_hidden()
        assert "runs no JavaScript" in page.inner_text("#static noscript")
        table = page.get_by_role("table", name="largest buffers at the peak")
        assert table.is_visible()
        assert "4.0GiB\t21%\targument\tparams.w\tf32[8,2048,2048]" in table.inner_text()
        for layer in range(10):
            assert f"train.py:41 (mlp)\tlayer{layer}/mlp" in table.inner_text()
        assert page.locator("#static svg polygon").first.is_visible()
        assert "Does not fit: 19.0GiB" in page.inner_text(".verdict")


def test_hostile_names_are_text(browser, tmp_path):
    parts = hostile()
    path = parts.pop("report").to_html(tmp_path / "hostile.html", **parts)
    with opened(browser, path) as page:
        assert page.locator("script").count() == 2
        assert page.locator("img, iframe, a, form, object, embed, link").count() == 0
        shown = page.locator(".space").inner_text()
        for name in (HOSTILE[0], HOSTILE[1], HOSTILE[3]):
            assert clean(name) in shown
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for row in page.locator(".space [role=row]").all()[:9]:
            row.click()
        page.get_by_label("Find").fill("שלום")
        assert len(rows(page)) == 2


def test_the_policy_is_in_force(browser, layers):
    path = layers
    tries = """() => {
        const refused = [];
        const attempt = (what, act) => { try { act(); } catch { refused.push(what); } };
        attempt("markup", () => { document.body.innerHTML = "<p>x</p>"; });
        attempt("script", () => {
            const script = document.createElement("script");
            script.textContent = "window.ran = 1";
            document.body.append(script);
            if (!window.ran) throw new Error("refused");
        });
        // Not here: what a debugger evaluates may use eval whatever the policy says.
        return new Promise((done) => setTimeout(() => {
            attempt("eval", () => { (0, eval)("1"); });
            done(refused);
        }));
    }"""
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.evaluate(tries) == ["markup", "script", "eval"]
    context.close()


def test_dark_and_light_follow_the_system_and_the_switch(browser, layers):
    grounds = {}
    for scheme in ("light", "dark"):
        with opened(browser, layers, color_scheme=scheme) as page:
            ground = "getComputedStyle(document.body).backgroundColor"
            grounds[scheme] = page.evaluate(ground)
            top = 1.1 * 19 * GIB
            assert pixel(page, 40, 3 * GIB, top) == variable(page, "argument")
            theme = page.locator(".theme")
            seen = []
            for _ in range(3):
                theme.click()
                seen.append((theme.inner_text(), page.evaluate(ground)))
                assert pixel(page, 40, 3 * GIB, top) == variable(page, "argument")
            assert [text for text, _ in seen] == ["Theme: light", "Theme: dark", "Theme: system"]
            assert seen[2][1] == grounds[scheme]
            assert seen[0][1] != seen[1][1]
    assert grounds["light"] != grounds["dark"]


def test_the_script_writes_figures_as_python_does(browser):
    sizes = [0, 1, 511, 1023, 1024, 1280, 1.25 * GIB, 3.75 * GIB, 2**40, 1023.96 * GIB, 15354554417]
    sizes += [int(1.37**n) for n in range(120)] + [n * 2**28 + 2**26 for n in range(40)]
    seconds = [0, 2.5e-5, 0.0123, 4.2, 59.99, 59.996, 125, 3e-8, 0.9996e-3] + [
        1.7**n * 1e-9 for n in range(60)
    ]
    page = browser.new_page()
    model = assets._read("model.js")
    result = "[sizes.map(formatBytes), seconds.map(formatSeconds)]"
    found = page.evaluate(
        f"([sizes, seconds]) => {{ {model}; return {result}; }}", [sizes, seconds]
    )
    assert found[0] == [format_bytes(n) for n in sizes]
    assert found[1] == [format_seconds(s) for s in seconds]
    page.close()
