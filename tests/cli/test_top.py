"""``jaxmem top`` as people call it: on a live process that tracks itself."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxmem import cli

ROOT = Path(__file__).parent.parent.parent
NBYTES = 512 * 256 * 4
TRACKED = """
import sys
import jax.numpy as jnp
import jaxmem

held = jnp.ones((512, 256), jnp.float32)
with jaxmem.track("epoch 7") as t:
    t.point("here")
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def tracking(cache: Path) -> subprocess.Popen[str]:
    """A process that tracks itself by now."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRACKED],
        env=environment(cache),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="module")
def live(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds 512 KiB and tracks itself until it is told to end."""
    process = tracking(cache)
    yield process
    process.communicate(timeout=60)
    assert process.returncode == 0


def environment(cache: Path, **changes: str) -> dict[str, str]:
    ours = {"PYTHONPATH": str(ROOT), "JAXMEM_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    return {**kept, **ours, **changes}


def top(cache: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxmem", "top", *words],
        env=environment(cache, **changes),
        capture_output=True,
        text=True,
        timeout=120,
    )


def in_terminal(cache: Path, *words: str, until: bytes, **changes: str) -> tuple[int, bytes]:
    """What it draws into a terminal until that has come, Ctrl-C then, and how it ended."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxmem", "top", *words],
        env=environment(cache, **{"TERM": "xterm-256color", "COLUMNS": "100", **changes}),
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    drawn, end = b"", time.monotonic() + 100
    try:
        while until not in drawn and time.monotonic() < end:
            try:
                drawn += os.read(ours, 2**16)
            except OSError:  # It has ended, and the terminal with it.
                break
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=60), drawn
    finally:
        process.kill()
        os.close(ours)


def test_one_look_as_json_has_the_numbers_of_the_process(cache, live):
    before = time.time()
    done = top(cache, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert before <= found["time"] <= time.time()
    (process,) = found["processes"]
    assert process["pid"] == live.pid and process["alive"] is True
    assert (process["name"], process["calls"]) == ("epoch 7", 1)
    (device,) = process["devices"]
    assert device["device"] == "cpu:0"
    assert device["in_use"] == {"bytes": NBYTES, "how": "estimated"}
    assert process["history"][-1] == NBYTES
    resident = int(Path(f"/proc/{live.pid}/statm").read_text().split()[1]) * 4096
    assert process["rss"]["bytes"] == pytest.approx(resident, rel=0.2)


def test_json_of_one_process_and_in_a_file(cache, live, workplace):
    done = top(cache, str(live.pid), "--json", "-o", str(workplace / "top.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((workplace / "top.json").read_text()) == json.loads(done.stdout)


@pytest.mark.parametrize("words", [["--once"], []], ids=["--once", "not a terminal"])
def test_one_look_as_text(cache, live, words):
    done = top(cache, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"process {live.pid}: " in done.stdout and "epoch 7" in done.stdout
    assert "512.0KiB (estimated)" in done.stdout
    assert "\x1b" not in done.stdout


def test_in_a_terminal_it_is_live_in_colours_until_ctrl_c(cache, live):
    code, drawn = in_terminal(cache, "--every", "0.1", until=b"in use: 512.0KiB")
    assert code == 0
    assert b"\x1b[36m" in drawn, "the curve is cyan"


def test_in_a_terminal_without_colours(cache, live):
    code, drawn = in_terminal(cache, "--every", "0.1", until=b"in use: 512.0KiB", NO_COLOR="1")
    assert code == 0 and b"in use: 512.0KiB" in drawn
    assert b"\x1b[3" not in drawn and b"\x1b[38" not in drawn


def test_a_terminal_that_cannot_draw_over_gets_one_look(cache, live):
    code, drawn = in_terminal(cache, until=b"never comes", TERM="dumb")
    assert code == 0 and drawn.count(b"in use: 512.0KiB") == 1


def test_it_ends_with_the_process(cache):
    process = tracking(cache)
    pid = process.pid
    assert top(cache, str(pid), "--json").returncode == 0
    process.communicate(timeout=60)
    assert process.returncode == 0
    done = top(cache, str(pid), "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"TrackError: there is no process {pid}.")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("4194311", "there is no process 4194311. jaxmem top without a number shows all"),
        ("0", "there is no process 0."),
        ("9" * 20, f"there is no process {'9' * 20}."),
        (str(os.getpid()), f"process {os.getpid()} tracks nothing that is published here"),
        ("none.jsonl", "none.jsonl cannot be read: No such file or directory"),
        ("²", "² cannot be read: No such file or directory"),
        ("9" * 5000, "cannot be read: File name too long"),
    ],
    ids=["none", "zero", "huge", "does not track", "no file", "no digit", "no name"],
)
@pytest.mark.parametrize("words", [[], ["--json"], ["--once"]], ids=" ".join)
def test_what_is_not_there_is_one_message(tmp_path, monkeypatch, capsys, word, message, words):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["top", word, *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("TrackError: ") and message in err


def test_nothing_tracks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["top", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "no process of this user is tracked now" in err


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf", "soon"])
def test_seconds_that_are_none_are_wrong_usage(capsys, every):
    with pytest.raises(SystemExit) as left:
        cli.main(["top", f"--every={every}"])
    assert left.value.code == 64
    assert f"{every!r} is not a number of seconds above 0" in capsys.readouterr().err


def test_how_it_ends_is_in_its_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["top", "--help"])
    assert "exit codes: 0 it was shown" in capsys.readouterr().out
