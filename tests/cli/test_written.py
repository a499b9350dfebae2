"""What ``-o`` writes says what the command shows, on a real step, for every command and suffix.

The table of what each command can is itself a test: a command or a suffix that is added is held to
the same laws.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxmem
from jaxmem import cli
from jaxmem.monitor import doctor
from jaxmem.planner.report import MemoryReport
from tests.cli.test_real import TRAIN
from tests.show.samples import GIB, plan, report

ROOT = Path(__file__).parent.parent.parent
SUFFIXES = {
    "doctor": (".json",),
    "analyze": (".html", ".json", ".csv", ".trace.json"),
    "plan": (".html", ".json", ".csv"),
    "frontier": (".html", ".json", ".csv"),
    "bench": (".json", ".csv"),
    "diff": (".json", ".csv"),
    "top": (".json",),
}
ASKED = {
    "analyze": ["real:entry"],
    "plan": ["real:entry", "--budget", "760KiB"],
    "frontier": ["real:entry"],
    "bench": ["real:entry", "--budget", "64MiB"],
    "diff": ["old.json", "real:entry"],
}


@pytest.fixture(autouse=True)
def train(workplace):
    (workplace / "real.py").write_text(TRAIN)


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


def written(capsys, name: str, *words: str) -> tuple[Any, dict[str, str]]:
    """What a command prints with ``--json``, and the text of each file that it writes meanwhile."""
    files = {suffix: Path(f"{name}{suffix}") for suffix in SUFFIXES[name]}
    outs = [word for file in files.values() for word in ("-o", str(file))]
    code = cli.main([name, *(words or ASKED[name]), "--json", *outs])
    assert code == (1 if name == "diff" else 0)
    return json.loads(capsys.readouterr().out), {s: f.read_text() for s, f in files.items()}


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def drawn(page: str) -> dict[str, Any]:
    """What the script of a page draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_every_command_that_shows_something_has_json_and_files():
    found = {}
    for name, parser in commands().items():
        options = {word: action for action in parser._actions for word in action.option_strings}
        assert "--json" in options, name
        if "--output" in options:
            keywords = getattr(options["--output"].type, "args", ())
            found[name] = keywords[0]
        assert "exit codes: " in parser.format_help(), name
    assert found == SUFFIXES
    assert set(commands()) - set(SUFFIXES) == {"completion"}


def test_a_report(capsys):
    told, files = written(capsys, "analyze")
    assert json.loads(files[".json"]) == told
    again = MemoryReport.from_json(files[".json"])
    assert again.peak_bytes == told["peak_bytes"]

    table = rows(files[".csv"])
    assert [(r["name"], int(r["nbytes"]), int(r["start"]), int(r["end"])) for r in table] == [
        (b["name"], b["nbytes"], b["start"], b["end"]) for b in told["buffers"]
    ]
    at_peak = sum(int(r["nbytes"]) for r in table if r["at_peak"] == "True")
    assert at_peak <= told["peak_bytes"]

    (page,) = drawn(files[".html"])["reports"]
    assert page["peak"] == told["peak_bytes"]
    assert sorted(page["columns"]["bytes"]) == sorted(b["nbytes"] for b in told["buffers"])

    events = json.loads(files[".trace.json"])["traceEvents"]
    sums = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(sums) == told["peak_bytes"]


def test_a_plan(capsys):
    told, files = written(capsys, "plan")
    assert jaxmem.Plan.from_json(files[".json"]) == jaxmem.Plan.from_json(json.dumps(told))
    assert [(r["key"], r["action"], int(r["nbytes"])) for r in rows(files[".csv"])] == [
        (d["key"], d["action"], d["nbytes"]) for d in told["decisions"]
    ]
    assert any(d["action"] == "recompute" for d in told["decisions"])
    before, planned = drawn(files[".html"])["reports"]
    assert (before["label"], planned["label"]) == ("As written", "Planned")
    assert before["compiled"] == told["keep_all_compiled_bytes"]
    assert planned["compiled"] == told["compiled_bytes"] <= told["budget_bytes"]
    assert planned["limit"] == {"name": "budget", "bytes": told["budget_bytes"]}


@pytest.mark.wide
def test_a_frontier(capsys):
    told, files = written(capsys, "frontier")
    assert json.loads(files[".json"]) == told
    assert [
        (int(r["peak_bytes"]), float(r["seconds"]), r["solver"]) for r in rows(files[".csv"])
    ] == [(p["peak_bytes"], p["seconds"], p["solver"]) for p in told["points"]]
    data = drawn(files[".html"])["frontier"]
    assert {p["bytes"] for p in data["points"]} <= {p["peak_bytes"] for p in told["points"]}
    assert len(data["points"]) > 1


def test_a_benchmark(capsys):
    told, files = written(capsys, "bench")
    assert json.loads(files[".json"]) == told
    assert [
        (r["name"], int(r["compiled_bytes"]), float(r["median_seconds"]))
        for r in rows(files[".csv"])
    ] == [(p["name"], p["compiled_bytes"], p["median_seconds"]) for p in told["programs"]]


@pytest.mark.wide
def test_a_difference(capsys):
    assert cli.main(["plan", "real:entry", "--budget", "760KiB", "-o", "old.json"]) == 0
    old = json.loads(Path("old.json").read_text())
    Path("old.json").write_text(json.dumps({**old, "compiled_bytes": old["compiled_bytes"] + 5}))
    capsys.readouterr()
    told, files = written(capsys, "diff")
    assert json.loads(files[".json"]) == told and told["changes"]
    assert rows(files[".csv"]) == told["changes"]


def test_the_table_is_what_is_in_the_file(capsys, workplace):
    """The same command without ``--json``: the file says the figures that the table shows."""
    assert cli.main(["analyze", "real:entry", "-o", "r.json"]) == 0
    shown = capsys.readouterr().out
    assert str(MemoryReport.from_json((workplace / "r.json").read_text())).strip() == shown.strip()


@pytest.mark.parametrize("name", SUFFIXES)
def test_a_suffix_that_is_none_of_them_names_them(name, capsys):
    words = ["diff", "a.json", "b.json"] if name == "diff" else [name]
    words += ["train:entry"] if name in ("analyze", "plan", "frontier", "bench") else []
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "-o", "found.pdf"])
    assert left.value.code == 64
    err = capsys.readouterr().err
    assert f"its suffix must be {' or '.join(SUFFIXES[name])}" in err
    assert not Path("found.pdf").exists()


@pytest.mark.parametrize("name", ["plan.json", "plan.csv", "plan.html"])
@pytest.mark.parametrize(
    ("folder", "message"),
    [("none", "is not a file in an existing directory"), ("shut", "Permission denied")],
)
def test_where_nothing_can_be_written(planning, capsys, monkeypatch, name, folder, message):
    """Said before anything is planned, and nothing is left there."""
    Path("shut").mkdir()
    opened = Path.open

    def refusing(path: Path, *args, **options):  # root may write everywhere
        if path.parent.name == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "train:entry", "-o", f"{folder}/{name}"])
    assert left.value.code == 64
    err = capsys.readouterr().err
    assert f"{folder}/{name}" in err and message in err
    assert planning.seen == [] and list(Path("shut").iterdir()) == []


@pytest.mark.parametrize("suffix", SUFFIXES["analyze"])
def test_a_writer_that_fails_leaves_the_old_file(planning, capsys, monkeypatch, suffix):
    """As where the disk is full half way: one message, exit code 1, the answer is shown."""
    planning.answer = report()
    file = Path(f"old{suffix}")
    file.write_text("old")
    replace = Path.replace

    def full(part: Path, target: Path) -> Path:
        if part.suffix == ".part":
            raise OSError(28, "No space left on device")
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", full)
    assert cli.main(["analyze", "train:entry", "-o", str(file)]) == 1
    out, err = capsys.readouterr()
    assert "train_step on h200" in out
    assert "No space left on device" in err and str(file) in err and "Traceback" not in err
    assert file.read_text() == "old"
    assert not list(Path().glob(".jaxmem-*"))


def test_doctor(capsys, monkeypatch):
    found = doctor.diagnose()
    monkeypatch.setattr(doctor, "diagnose", lambda **_: dataclasses.replace(found, problems=[]))
    assert cli.main(["doctor", "--json", "-o", "found.json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("found.json").read_text())
    Path("found.json").unlink()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    assert cli.main(["doctor", "-o", "found.json"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("python ") and "found.json cannot be written: No space" in err


@pytest.mark.parametrize("suffix", SUFFIXES["plan"][1:])
def test_an_old_file_is_replaced(planning, suffix):
    planning.answer = plan()
    file = Path(f"old{suffix}")
    file.write_text("old" * 10_000)
    assert cli.main(["plan", "train:entry", "-o", str(file)]) == 0
    fresh = Path(f"new{suffix}")
    assert cli.main(["plan", "train:entry", "-o", str(fresh)]) == 0
    assert file.read_text() == fresh.read_text()


@pytest.mark.parametrize("name", ["diff", "doctor"])
def test_colours_are_for_terminals(name, workplace):
    """Piped there are none, whatever the command; in a terminal NO_COLOR says so."""
    plan().save(workplace / "one.json")
    plan(predicted_bytes=17 * GIB).save(workplace / "two.json")
    words = [name, "one.json", "two.json"] if name == "diff" else [name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("FORCE_COLOR", None)
    command = [sys.executable, "-m", "jaxmem", *words]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.stdout and b"\x1b" not in done.stdout + done.stderr


def test_no_color_in_a_terminal(planning, capsys, monkeypatch):
    planning.answer = plan()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["plan", "train:entry"]) == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", capsys.readouterr().out)
