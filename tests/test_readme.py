"""The Python of README and docs/ runs as it stands, commands answer, links and names exist."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxmem
from jaxmem import cli
from jaxmem.fitted import FittedStep
from jaxmem.targets import table

ROOT = Path(__file__).parent.parent
TEXTS = {path: path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
TEXT = "\n".join(TEXTS.values())
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """The text from one heading to the next and its fenced blocks by language."""

    title: str
    text: str

    def blocks(self, language: str) -> list[str]:
        return [body for found, body in FENCE.findall(self.text) if found == language]


def sections(whole: str) -> list[Section]:
    prose = FENCE.sub(lambda block: re.sub(r"^#", " ", block[0], flags=re.MULTILINE), whole)
    starts = [m.start() for m in re.finditer(r"^#{1,3} ", prose, re.MULTILINE)]
    texts = [whole[a:b] for a, b in zip(starts, [*starts[1:], len(whole)], strict=True)]
    return [Section(text.splitlines()[0].lstrip("# "), text) for text in texts]


SECTIONS = {s.title: s for text in TEXTS.values() for s in sections(text)}
WITH_PYTHON = {title for title, section in SECTIONS.items() if section.blocks("python")}
OWN_TEST = {
    "jaxmem",
    "What a budget costs",
    "Why a plan is what it is",
    "A budget that does not fit",
    "A state over several devices",
    "Checkpoints",
    "Command line",
    "Notebooks",
    "Policies",
    "Watching memory",
    "When it runs out",
}


class Net(nn.Module):
    """Stands for the reader's own model."""

    @nn.compact
    def __call__(self, x):
        for _ in range(6):
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return x


def readers_own() -> dict[str, Any]:
    """The names that the first example takes as given: a train state, a batch and a loss."""
    net, x = Net(), jax.random.normal(jax.random.key(0), (512, 32))

    def loss_fn(params, batch):
        return ((net.apply({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

    params = net.init(jax.random.key(1), x)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))
    return {"state": state, "batch": {"x": x, "y": jnp.sin(x)}, "loss_fn": loss_fn}


def run(title: str, **given: Any) -> dict[str, Any]:
    """Runs a section's Python blocks in order in one namespace and returns that."""
    namespace: dict[str, Any] = {"__name__": "readme", **given}
    for source in SECTIONS[title].blocks("python"):
        # The reader's net is a small one here.
        source = source.replace('"20GiB"', '"4MiB"')
        exec(compile(source, "train.py", "exec"), namespace)
    return namespace


def plans_in(namespace: dict[str, Any]) -> list[jaxmem.Plan]:
    made = [v for v in namespace.values() if isinstance(v, FittedStep)]
    outcomes = [outcome.plan for step in made for outcome in step._outcomes.values()]
    return [*outcomes, *(v for v in namespace.values() if isinstance(v, jaxmem.Plan))]


@pytest.mark.wide
@pytest.mark.parametrize("title", sorted(WITH_PYTHON - OWN_TEST))
def test_python_runs_and_keeps_its_budget(title: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = run(title)
    plans = plans_in(namespace)
    assert plans or isinstance(namespace["report"], jaxmem.MemoryReport)
    for plan in plans:
        assert plan.compiled_bytes <= plan.budget_bytes
        changed = plan.solver != "keep-all" or plan.microbatches > 1 or plan.hosted
        assert changed, "an example whose budget does nothing shows nothing"
    assert np.isfinite(namespace.get("loss", 0.0))


def test_the_first_example_trains_and_equals_the_step_without_jaxmem():
    given = readers_own()
    found = run("jaxmem", **given)
    plain_state, plain_loss = jax.jit(found["train_step"].__wrapped__)(
        given["state"], given["batch"]
    )
    np.testing.assert_allclose(found["loss"], plain_loss, rtol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(found["state"].opt_state),
        jax.tree.leaves(plain_state.opt_state),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)
    (plan,) = plans_in(found)
    assert plan.compiled_bytes <= plan.budget_bytes < plan.keep_all_compiled_bytes
    assert plan.recomputed()


def test_the_policy_is_followed_and_computes_the_same():
    found = run("Policies")
    params, x = jnp.ones((4, 64, 64)) / 64, jnp.ones((8, 64))

    def plain(params, x):
        return (jax.lax.scan(found["layer"], x, params)[0] ** 2).mean()

    np.testing.assert_allclose(found["grads"], jax.grad(plain)(params, x), rtol=1e-5)
    kept = jax.make_jaxpr(lambda *args: jax.vjp(found["loss_fn"], *args)[1])(params, x).out_avals
    stacked = [aval for aval in kept if aval.shape == (4, 8, 64)]
    assert [aval.memory_space for aval in stacked] == [jax.memory.Space.Host]


def test_the_leak_is_found_with_its_bytes_and_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    found = run("Watching memory")
    printed = capsys.readouterr().out
    (shown,) = SECTIONS["Watching memory"].blocks("text")
    figures = [line.split() for line in shown.splitlines() if line.strip().startswith("+")]
    (row,) = figures
    assert row in [line.split() for line in printed.splitlines()]
    assert shown.splitlines()[0] in printed
    assert found["t"].growth("step", "end").nbytes == 7 * 256 * 256 * 4
    assert (tmp_path / "samples.jsonl").read_text().count("\n") >= 10


def test_the_holder_of_what_ran_out_is_named(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    found = run("When it runs out")
    lines = capsys.readouterr().out.splitlines()
    (source,) = SECTIONS["When it runs out"].blocks("python")
    promised = [line.split("  # ")[1] for line in source.splitlines()[-2:]]
    assert lines[-2:] == promised
    assert found["why"].holdings[0].nbytes == 8 * 2**22


def test_the_curve_is_one(capsys):
    curve = run("What a budget costs")["curve"]
    assert len(curve.points) > 2
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [str(curve.at("2.5MiB").seconds), str(curve.marginal("2.5MiB"))]
    assert curve.points[0].peak_bytes < 2.5 * 2**20 < curve.points[-1].peak_bytes
    assert curve.marginal("2.5MiB") > 0


@pytest.mark.wide
def test_the_explanation_is_about_the_plan(capsys):
    found = run("Why a plan is what it is")
    printed = capsys.readouterr().out
    assert "train_step on cpu: h3\n" in printed
    assert "h3" in found["plan"].explain("h3").reasons[0].decision.modules
    assert found["plan"].diff(found["tighter"])
    assert all(p.compiled_bytes <= p.budget_bytes for p in plans_in(found))


@pytest.mark.wide
def test_the_commands_answer(tmp_path: Path, monkeypatch, capsys):
    section = SECTIONS["Command line"]
    (source,) = section.blocks("python")
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    commands = re.findall(r"^jaxmem (.*?)(?: +#.*)?$", "".join(section.blocks("sh")), re.MULTILINE)
    named = {"doctor", "analyze", "frontier", "plan", "diff", "bench"}
    assert {command.split()[0] for command in commands} == named
    for command in commands:
        sys.modules.pop("train", None)
        assert cli.main(shlex.split(command)) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.strip()
    sys.modules.pop("train", None)
    assert jaxmem.Plan.load(tmp_path / "plan.json").compiled_bytes > 0


def test_the_message_that_is_shown_is_the_one_that_is_printed(capsys):
    """Sizes differ between compilers, and with them which values are named."""
    (plan,) = plans_in(run("A budget that does not fit"))
    (shown,) = SECTIONS["A budget that does not fit"].blocks("text")
    printed = capsys.readouterr().out
    assert without_sizes(printed) == without_sizes(shown)
    assert plan.compiled_bytes <= plan.budget_bytes


def without_sizes(text: str) -> list[str]:
    first, held, *rest = re.sub(r"[0-9.]+[KMG]iB", "SIZE", text).strip().splitlines()
    assert re.fullmatch(r"  Held there by: (\S+ at train.py:\d+ \(SIZE, \w+\)(, |\.)){3}", held), (
        held
    )
    return [first, *rest]


def test_the_plan_that_is_shown_is_the_one_that_is_printed(monkeypatch):
    """Sizes and seconds differ between compilers and machines."""
    monkeypatch.setenv("COLUMNS", "96")
    (plan,) = plans_in(run("Flax Linen"))
    (shown,) = SECTIONS["Reading a plan"].blocks("text")
    assert words(str(plan)) == words(shown)


def words(text: str) -> list[str]:
    return re.sub(r"\S*[0-9.]+(s|us|ms|MiB|KiB|%)(?!\w)|[█▏▎▍▌▋▊▉─┤▒]", "", text).split()


def test_every_name_and_make_target_and_file_exists():
    for name in re.findall(r"`jaxmem\.([A-Za-z]\w*)", TEXT):
        assert name in jaxmem.__all__, name
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", TEXT):
        assert f"\n{target}:" in makefile, target
    for path, text in TEXTS.items():
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            file, _, anchor = link.partition("#")
            target = path.parent / file if file else path
            assert target.exists(), (path.name, link)
            assert not anchor or anchor in anchors(target.read_text()), (path.name, link)


def anchors(text: str) -> set[str]:
    titles = (section.title.lower() for section in sections(text))
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


def test_titles_are_told_apart():
    titles = [s.title for text in TEXTS.values() for s in sections(text)]
    assert len(titles) == len(set(titles)), titles


def test_every_target_is_listed():
    listed = SECTIONS["A GPU that you do not have"].text.partition("Targets are")[2]
    names = re.findall(r"`([a-z0-9-]+)`", listed.partition("counts of them")[0])
    assert set(names) == set(table.load()["gpus"])


def test_every_error_is_listed():
    """Those of the face, and of :mod:`jaxmem.errors` where a user may meet them."""
    errors = {name for name in jaxmem.__all__ if name.endswith("Error")} - {"JaxmemError"}
    listed = set(re.findall(r"^\| `(\w+Error)`", TEXT, re.MULTILINE))
    assert errors <= listed
    for name in listed:
        assert getattr(jaxmem, name, None) is getattr(jaxmem.errors, name), name


def test_a_layout_prints_what_is_shown(capsys):
    run("A state over several devices")
    (shown,) = SECTIONS["A state over several devices"].blocks("text")
    printed = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed] == shown.splitlines()


def test_a_tree_prints_what_is_shown(capsys):
    run("Notebooks")
    (shown,) = SECTIONS["Notebooks"].blocks("text")
    assert capsys.readouterr().out == shown


def test_a_step_over_several_devices_prints_what_is_shown(capsys):
    run("A step over several devices")
    (shown,) = SECTIONS["A step over several devices"].blocks("text")
    assert capsys.readouterr().out == shown


def test_a_checkpoint_comes_back():
    found = run("Checkpoints")
    assert found["state"]["step"] == 2
    assert (found["state"]["params"]["w"] == jnp.eye(64)).all()
    assert sorted(path.name for path in Path(found["directory"]).iterdir()) == ["1", "2"]
    shutil.rmtree(found["directory"])
