"""With --json nothing but JSON reaches standard output, whatever the user's own code does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmem import cli
from jaxmem.planner.plan import Plan
from tests.show.samples import plan, report

ROOT = Path(__file__).parent.parent.parent
# Its plan is a stand-in: what is tested is what a module may do on its way.
NOISY = """
import argparse, atexit, os, sys
print("printed")
os.system("echo from a child process")
os.write(1, b"from C code")
atexit.register(os.write, 1, b"at the end")
os.chdir("/")
argparse.ArgumentParser().parse_args()
sys.stdout = open(os.devnull, "w")

import jaxmem
from tests.show.samples import plan
jaxmem.plan = lambda *args, **options: plan()
def entry(): return print, ()
"""


def run(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxmem", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, **options
    )


def test_what_a_module_does_when_it_is_imported_stays_out_of_the_answer(workplace):
    (workplace / "noisy.py").write_text(NOISY)
    done = run("plan", "noisy:entry", "--json", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(done.stdout) == plan()
    for said in ("printed", "from a child process", "from C code", "at the end"):
        assert said in done.stderr
    assert Plan.load(workplace / "plan.json") == plan(), "written where the command was given"


def test_a_table_is_printed_although_the_module_took_standard_output(workplace):
    (workplace / "noisy.py").write_text(NOISY)
    assert "recomputes 18 of 42 values" in run("plan", "noisy:entry").stdout


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_disk_that_is_full(words):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "jaxmem", "completion", "bash", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE)
    message = b"the answer cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_ctrl_c_while_the_module_is_imported(workplace):
    (workplace / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "jaxmem", "plan", "slow:entry", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, **streams)
    while not (workplace / "started").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"interrupted\n")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "plan.txt",
            "'plan.txt' does not say what to write: its suffix must be .html or .json or .csv",
        ),
        ("plan", "its suffix must be .html or .json or .csv"),
        ("no/such/plan.json", "'no/such/plan.json' is not a file in an existing directory"),
        ("/proc/plan.json", "'/proc/plan.json': No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_known_before_planning(planning, capsys, name, message):
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "train:entry", "-o", name])
    assert left.value.code == 64
    assert message in capsys.readouterr().err
    assert planning.seen == []


def test_finding_out_changes_no_file(planning, workplace):
    (workplace / "old.json").write_text("old")
    planning.answer = KeyboardInterrupt()
    assert cli.main(["plan", "train:entry", "-o", "old.json", "-o", "new.json"]) == 130
    assert (workplace / "old.json").read_text() == "old"
    assert not (workplace / "new.json").exists()


def test_several_files(planning, workplace, capsys):
    planning.answer = report()
    words = ["analyze", "train:entry", "-o", "one.json", "-o", "two.JSON", "--json"]
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert json.loads((workplace / "one.json").read_text()) == told
    assert json.loads((workplace / "two.JSON").read_text()) == told
