"""The command line: exit codes, one clean message per mistake, JSON that parses, a quick start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmem import cli
from jaxmem.commands import platform
from jaxmem.errors import (
    BudgetError,
    BudgetInfeasibleError,
    Holder,
    JaxmemError,
    UnknownTargetError,
)
from jaxmem.planner.plan import Plan
from jaxmem.show.terminal import plan_text, report_text
from tests.show.samples import GIB, plan, report

ROOT = Path(__file__).parent.parent.parent
# Its plan is a stand-in: for what happens after planning, in a process of its own.
STUB = """
import jaxmem
from tests.show.samples import plan
jaxmem.plan = lambda *args, **options: plan()
def entry(): return print, ()
"""
INFEASIBLE = BudgetInfeasibleError(
    "no plan fits budget=12.0GiB on h200: the smallest peak found is 16.0GiB.",
    budget_bytes=12 * GIB,
    smallest_bytes=16 * GIB,
    holders=(Holder("params", 4 * GIB, "argument"),),
)


def test_a_plan_that_fits(planning, capsys):
    planning.answer = plan()
    command = ["plan", "train:entry", "--budget", "20GiB", "--target", "h200"]
    assert cli.main(command) == 0
    assert planning.seen == [("step", (1.0,), {"budget": "20GiB", "target": "h200"})]
    assert capsys.readouterr().out == f"loading\n{plan_text(plan(), width=100)}\n"


def test_a_plan_as_json_is_only_the_plan(planning, capsys):
    planning.answer = plan()
    assert cli.main(["plan", "train:entry", "--budget", "20GiB", "--json"]) == 0
    out, err = capsys.readouterr()
    assert Plan.from_json(out) == plan()
    assert err == "loading\n"


def test_a_saved_plan_loads(planning, tmp_path, capsys):
    planning.answer = plan()
    assert cli.main(["plan", "train.py:entry", "--budget", "1GiB", "-o", "plan.json"]) == 0
    assert Plan.load(tmp_path / "plan.json") == plan()


def test_no_budget_means_all_of_the_device(planning):
    planning.answer = plan()
    assert cli.main(["plan", "train:entry"]) == 0
    assert planning.seen[0][2] == {"budget": None, "target": None}


def test_a_plan_over_its_budget_does_not_fit(planning):
    planning.answer = plan(compiled_bytes=20 * GIB + 1)
    assert cli.main(["plan", "train:entry", "--budget", "20GiB"]) == 2


def test_an_infeasible_budget(planning, capsys):
    planning.answer = INFEASIBLE
    assert cli.main(["plan", "train:entry", "--budget", "12GiB"]) == 2
    out, err = capsys.readouterr()
    assert out == "loading\n"
    lines = err.splitlines()
    assert lines[0] == str(INFEASIBLE)
    assert lines[-1] == "  4.0GiB    25%  argument  params"
    assert "Traceback" not in err


def test_an_infeasible_budget_as_json(planning, capsys):
    planning.answer = INFEASIBLE
    assert cli.main(["plan", "train:entry", "--budget", "12GiB", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "fits": False,
        "error": str(INFEASIBLE),
        "budget_bytes": 12 * GIB,
        "smallest_bytes": 16 * GIB,
        "holders": [{"name": "params", "nbytes": 4 * GIB, "kind": "argument"}],
    }


def test_a_report(planning, capsys):
    planning.answer = report()
    assert cli.main(["analyze", "train:entry", "--target", "h200"]) == 0
    assert planning.seen == [("step", (1.0,), {"target": "h200"})]
    assert capsys.readouterr().out == f"loading\n{report_text(report(), width=100)}\n"


def test_a_report_as_json(planning, capsys):
    planning.answer = report()
    assert cli.main(["analyze", "train:entry", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == 32 * GIB


def test_a_step_bigger_than_the_device_does_not_fit(planning, capsys):
    planning.answer = report(device_bytes=33 * GIB - 1)
    assert cli.main(["analyze", "train:entry"]) == 2


@pytest.mark.parametrize(
    "error",
    [BudgetError("'7 apples' is not a size."), UnknownTargetError("no target h2oo"), JaxmemError()],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_one_message(planning, capsys, error):
    planning.answer = error
    code = 1 if type(error) is JaxmemError else 64
    assert cli.main(["plan", "train:entry", "--budget", "7 apples", "--json"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"loading\n{type(error).__name__}: {error}\n")


def test_traceback_shows_where(planning, capsys):
    planning.answer = BudgetError("no")
    assert cli.main(["plan", "train:entry", "--traceback"]) == 64
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert "in respond" in err
    planning.answer = INFEASIBLE
    assert cli.main(["plan", "train:entry", "--traceback"]) == 2
    assert "in respond" in capsys.readouterr().err


def test_the_users_own_line_is_shown_when_the_step_raises(planning, capsys, tmp_path):
    (tmp_path / "bad.py").write_text(
        "def step(x):\n    return x @ 'w'\n\ndef entry():\n    return step, (1.0,)\n"
    )
    planning.answer = lambda fun, *args: fun(*args)
    assert cli.main(["plan", "bad:entry"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("EntryPointError: bad:entry raised TypeError: unsupported operand")
    assert err[1:] == [f"  {tmp_path / 'bad.py'}:2 (step): return x @ 'w'"]


def test_a_bug_of_ours_is_not_blamed_on_the_user(planning):
    # The error is raised inside jaxmem, below a line of this file.
    planning.answer = lambda fun, *args: plan_text(None)
    with pytest.raises(AttributeError, match="NoneType"):
        cli.main(["plan", "train:entry"])


def test_in_a_terminal_there_are_colors(planning, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    planning.answer = plan()
    assert cli.main(["plan", "train:entry"]) == 0
    assert "\x1b[33mrecomputes 18 of 42 values" in capsys.readouterr().out


def test_interrupting_is_quiet(planning, capsys):
    planning.answer = KeyboardInterrupt()
    assert cli.main(["plan", "train:entry"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_plan_that_cannot_be_saved(planning, capsys, tmp_path):
    planning.answer = lambda fun, *args: (tmp_path / "plan.json").mkdir() or plan()
    assert cli.main(["plan", "train:entry", "-o", "plan.json"]) == 1
    assert "plan.json cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["plan"],
        ["paln", "train:entry"],
        ["plan", "train:entry", "--bugdet", "1GiB"],
        ["plan", "train:entry", "-o", "no/such/folder/plan.json"],
        ["plan", "train:entry", "-o", "."],
        ["analyze", "train:entry", "--budget", "1GiB"],
        ["doctor", "train:entry"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_not_mistaken_for_does_not_fit(words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 64
    assert ": error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["--help"], "0 fits, 2 does not fit"),
        (["plan", "--help"], "0 fits, 2 does not fit"),
        (["doctor", "-h"], "0 all works, 1 there is a problem"),
        (["diff", "-h"], "0 no difference, 1 a difference"),
    ],
)
def test_help(words, ends, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 0
    assert f"exit codes: {ends}" in capsys.readouterr().out


def run_jaxmem(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxmem", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [["--help"], ["top", "--help"], ["plan", "--help"]])
def test_help_waits_for_neither_jax_nor_rich(arguments):
    code = (
        "import atexit, sys, jaxmem.cli\n"
        "heavy = {'jax', 'rich', 'numpy'}\n"
        "atexit.register(lambda: print('imported:', *sorted(heavy & set(sys.modules))))\n"
        f"jaxmem.cli.main({arguments})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: ")
    assert done.stdout.splitlines()[-1].split() == ["imported:"]


def test_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"jaxmem {version}\n"


def test_a_reader_that_stops_reading_is_no_error(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jaxmem", "plan", "stub:entry", "-o", "plan.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
    assert Plan.load(tmp_path / "plan.json") == plan(), "the file is written all the same"


def test_a_terminal_that_is_not_unicode_gets_replacements(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    done = run_jaxmem("plan", "stub:entry", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "recomputes 18 of 42 values" in done.stdout


@pytest.mark.parametrize("words", [["plan", "--budget", "5MiB"], ["analyze", "--target", "h200"]])
def test_options_that_a_fitted_step_would_ignore(workplace, planning, capsys, words):
    (workplace / "fitted.py").write_text(
        "import jaxmem\n@jaxmem.fit(budget='1MiB')\ndef step(x): return x\n"
        "def entry(): return step, (1.0,)\n"
    )
    assert cli.main([words[0], "fitted:entry", *words[1:]]) == 1
    assert "returned a step that is fitted already, for its own" in capsys.readouterr().err
    planning.answer = plan() if words[0] == "plan" else report()
    assert cli.main([words[0], "fitted:entry"]) == 0


@pytest.mark.parametrize(
    ("plugins", "driver", "libtpu", "before", "after"),
    [
        (["xla_cuda13"], False, False, None, "cpu"),
        (["xla_cuda12"], False, False, "", "cpu"),
        (["xla_cuda13"], True, False, None, None),
        (["xla_cuda13"], False, True, None, None),
        (["xla_cuda13", "xla_rocm7"], False, False, None, None),
        ([], False, False, None, None),
        (["xla_cuda13"], False, False, "cuda", "cuda"),
    ],
)
def test_the_cpu_is_chosen_only_when_nothing_else_is_meant(
    monkeypatch, plugins, driver, libtpu, before, after
):
    if before is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    else:
        monkeypatch.setenv("JAX_PLATFORMS", before)
    specs = {"libtpu": SimpleNamespace() if libtpu else None}
    if plugins:
        specs["jax_plugins"] = SimpleNamespace(submodule_search_locations=["somewhere"])
    found = [SimpleNamespace(name=name) for name in plugins]
    monkeypatch.setattr(platform.importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(platform.pkgutil, "iter_modules", lambda folders: found)
    monkeypatch.setattr(platform, "has_nvidia_driver", lambda: driver)
    platform.choose()
    assert os.environ.get("JAX_PLATFORMS") == after
