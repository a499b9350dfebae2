"""Whatever shows itself does so everywhere: as text, in colours, and as HTML without scripts."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from rich.console import Console

import jaxmem
from jaxmem.runtime.benchmark import Benchmark, Timed
from jaxmem.runtime.profile import StepProfile
from jaxmem.show import shown
from jaxmem.units import format_bytes
from tests.show.samples import HOSTILE, explained_plan, frontier, plan, report

STATE = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}


def fitted() -> object:
    step = jaxmem.fit(lambda x: x * 2, budget="1MiB", progress=False)
    step.plan(jnp.ones(8))
    return step


class Model:
    @jaxmem.fit(budget="1MiB", static_argnums=0)
    def step(self, x):
        return x * 2


BENCHMARK = Benchmark(
    "step",
    "cpu",
    2**30,
    (
        Timed("as written", 3 * 2**20, 0.5, (), "not run: it needs 1.0GiB more than cpu has"),
        Timed("planned", 2**20, 0.6, (0.5, 0.7, 0.6, 0.65, 0.8)),
    ),
    "MILP",
)
OBJECTS = {
    "plan": (plan, "recomputes 18 of 42 values"),
    "report": (report, "live bytes over the step"),
    "explanation": (lambda: explained_plan().explain(), "it uses 19.0GiB of the budget"),
    "difference": (lambda: plan().diff(plan(function="other")), "other"),
    "frontier": (frontier, "best programs"),
    "layout": (lambda: jaxmem.shard(STATE, AbstractMesh((8,), ("data",)), "fsdp"), "256.0KiB"),
    "tree": (lambda: jaxmem.shard(STATE, AbstractMesh((8,), ("data",)), "fsdp").tree(), "split"),
    "target": (lambda: jaxmem.Target("4x8xh100"), "4 hosts with 8 devices"),
    "profile": (lambda: StepProfile(0.25, 0.2, 0.1, 0.05, 0.0), "50.0ms"),
    "benchmark": (lambda: BENCHMARK, "not run: it needs 1.0GiB more"),
    "fitted step": (fitted, "planned for 1 signature so far"),
    "fitted method": (lambda: Model().step, "not planned yet"),
}


@pytest.fixture(params=OBJECTS)
def value(request):
    make, said = OBJECTS[request.param]
    return make(), said, request.param


def test_it_shows_itself_everywhere(value):
    found, said, kind = value
    bundle = found._repr_mimebundle_()
    assert said in " ".join(bundle["text/plain"].split())
    assert bundle["text/html"] == found._repr_html_() or kind == "tree", "its ids differ each time"
    console = Console(file=io.StringIO(), width=100, color_system="truecolor", force_terminal=True)
    console.print(found)
    assert said.split()[0] in console.file.getvalue()
    assert "\x1b[" in console.file.getvalue()
    assert "\x1b" not in str(found)


class Tags(HTMLParser):
    """Collects tags and attributes, and checks that what is opened is closed."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_has_no_script_and_fetches_nothing(value):
    found, _, kind = value
    if kind == "tree":
        pytest.skip("treescope's trees fold by a script of their own; see test_trees.py")
    tags = Tags()
    tags.feed(found._repr_html_())
    assert not tags.open
    assert not tags.names & {"script", "link", "img", "iframe", "style", "object"}
    for name, text in tags.attributes:
        assert name not in ("href", "src", "srcset") and not name.startswith("on")
        assert name != "style" or "url(" not in text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_of_targets_and_steps_are_inert(name):
    target = dataclasses.replace(jaxmem.Target("h100"), name=name, sources=(name,))

    def step(x):
        return x

    step.__name__ = name
    for found in (target, jaxmem.fit(step, budget="1MiB")):
        html = found._repr_html_()
        Tags().feed(html)
        assert "<script" not in html and "<img" not in html
        html.encode()
        assert "\x1b" not in found._repr_mimebundle_()["text/plain"]


def test_a_target_names_each_figure_and_its_source():
    target = jaxmem.Target("2xa100-80")
    text = shown.text(target, width=140)
    assert format_bytes(target.device_bytes) in text
    for dtype, rate in target.flops.items():
        assert f"{dtype} " in text and f"{rate / 1e12:.4g}" in text
    for source in target.sources:
        assert source in text
    assert "1 device\n" in shown.text(jaxmem.Target("a100-80")) + "\n"
    assert str(target) == f"2xa100-80 ({format_bytes(target.device_bytes)} usable each)"


def test_ipython_prints_the_table_where_there_is_no_html():
    """Without a bundle it prints the ``repr``, thousands of characters for a plan."""
    formatters = pytest.importorskip("IPython.core.formatters")
    formatter = formatters.DisplayFormatter(active_types=["text/plain"])
    data, _ = formatter.format(plan())
    assert data["text/plain"] == str(plan())


def test_what_nothing_knows_how_to_show():
    with pytest.raises(TypeError, match="does not know how to show a list"):
        shown.text([])


def test_plans_show_themselves_without_the_optional_libraries():
    code = (
        "import sys; sys.modules['treescope'] = sys.modules['IPython'] = None\n"
        "from jaxmem.planner.plan import Plan\nplan = Plan.from_json(sys.stdin.read())\n"
        "print(plan); plan._repr_html_()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=plan().to_json(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "recomputes 18 of 42 values" in done.stdout
    assert json.loads(plan().to_json())["function"] in done.stdout
