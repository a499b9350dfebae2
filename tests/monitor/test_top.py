"""``jaxmem top`` finds tracked processes and shows what they told last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxmem
from jaxmem.errors import ArgumentError, TrackError
from jaxmem.monitor import published, top
from jaxmem.monitor.figures import DeviceMemory, Figure, HostMemory
from jaxmem.monitor.samples import Sample
from jaxmem.units import GIB


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    return tmp_path / "tracked"


def sample(name: str = "train", used: int = 3 * GIB) -> Sample:
    device = DeviceMemory(
        "cuda:0",
        Figure(used, "allocator"),
        peak=Figure(5 * GIB, "allocator peak"),
        limit=Figure(8 * GIB, "allocator"),
    )
    host = HostMemory(Figure(GIB, "process"), Figure(0, "estimated"))
    return Sample(time.time(), name, 12, (device,), host)


def kept_of(folder: Path, pid: int, **changed: object) -> Path:
    """The file of a process, as it is published."""
    path = folder / f"{pid}.json"
    path.parent.mkdir(exist_ok=True)
    kept = {
        "pid": pid,
        "started": published._started(pid),
        "command": "train.py",
        "sample": sample().to_dict(),
        "history": [GIB, 2 * GIB, 3 * GIB],
    }
    path.write_text(json.dumps(kept | changed))
    return path


def test_a_sample_is_the_same_after_json():
    one = sample()
    assert Sample.from_dict(json.loads(one.to_json())) == one


def test_a_process_that_tracks_is_seen_from_another_one(folder: Path):
    code = "from jaxmem.monitor import top; import sys; sys.exit(top.run(int(sys.argv[1])))"
    array = jnp.ones((64, 64))
    with jaxmem.track("epoch") as t:
        t.point("here")
        done = subprocess.run(
            [sys.executable, "-c", code, str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    assert f"process {os.getpid()}" in done.stdout
    assert "epoch" in done.stdout and "(estimated)" in done.stdout and "(process)" in done.stdout
    assert folder.stat().st_mode & 0o077 == 0, "others can read what a user tracks"
    assert array is not None


def test_what_is_shown_says_what_each_figure_is(folder: Path):
    kept_of(folder, os.getpid())
    text = str(top.screen(os.getpid()))
    assert "3.0GiB (allocator)" in text and "5.0GiB (allocator peak)" in text
    assert "not told" in text
    assert "in use: 3.0GiB of 8.0GiB, 38%" in text
    assert "call 12" in text


def test_all_of_a_user_are_shown_and_those_that_are_gone_are_tidied_up(folder: Path):
    kept_of(folder, os.getpid())
    gone = kept_of(folder, 2**22 + 7)
    reused = kept_of(folder, os.getppid(), started="1")
    (one,) = top.screen().processes
    assert one.pid == os.getpid()
    assert not gone.exists() and not reused.exists()


def test_the_live_view_ends_with_the_process(folder: Path, monkeypatch):
    kept_of(folder, os.getpid())
    seen = []

    def slept(seconds: float) -> None:
        seen.append(seconds)
        kept_of(folder, os.getpid(), started="ended")

    monkeypatch.setattr(top.time, "sleep", slept)
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    assert top.run(os.getpid(), every=0.5, console=console) == 0
    assert seen == [0.5]
    assert "ended; last seen" in out.getvalue()


def test_ctrl_c_ends_the_live_view(folder: Path, monkeypatch):
    kept_of(folder, os.getpid())

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", interrupted)
    assert top.run(os.getpid(), console=Console(file=StringIO(), force_terminal=True)) == 0


def test_a_file_of_samples_is_followed_too(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    lines = [sample(used=n * GIB).to_json() for n in (1, 2, 4)]
    path.write_text('{"cut off' + "\n" + "\n".join(lines) + "\n" + lines[0][:20])
    (one,) = top.screen(path).processes
    assert one.sample.devices[0].in_use.nbytes == 4 * GIB
    assert one.history == (GIB, 2 * GIB, 4 * GIB)
    out = StringIO()
    assert top.run(path, console=Console(file=out, width=100)) == 0
    assert "4.0GiB (allocator)" in out.getvalue() and "\x1b" not in out.getvalue()


def test_what_it_shows_is_data_as_well(folder: Path):
    kept_of(folder, os.getpid())
    (one,) = json.loads(json.dumps(top.screen(os.getpid()).to_dict()))
    assert one["pid"] == os.getpid() and one["alive"] is True
    assert one["devices"][0]["in_use"] == {"bytes": 3 * GIB, "how": "allocator"}


def test_hostile_names_are_inert(folder: Path):
    kept_of(folder, os.getpid(), command="\x1b]0;x\x07 [bold]" + "a" * 10_000)
    out = StringIO()
    top.run(os.getpid(), once=True, console=Console(file=out, width=100))
    assert "\x1b" not in out.getvalue() and "[bold]" in out.getvalue()


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path):
    with pytest.raises(TrackError, match="no process of this user is tracked now"):
        top.run()
    with pytest.raises(TrackError, match="there is no process 4194311"):
        top.run(2**22 + 7)
    with pytest.raises(TrackError, match=r"nowhere\.jsonl cannot be read: No such file"):
        top.run(tmp_path / "nowhere.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(TrackError, match=r"empty\.jsonl has no samples"):
        top.run(empty)
    kept_of(folder, os.getpid()).write_text("{")
    with pytest.raises(TrackError, match="cannot be read"):
        top.run(os.getpid())
    kept_of(folder, os.getpid(), sample={"devices": 5})
    with pytest.raises(TrackError, match="no sample"):
        top.run(os.getpid())


@pytest.mark.parametrize("given", [True, 1.5, ["x"]])
def test_it_takes_a_number_or_a_path(given: object):
    with pytest.raises(ArgumentError, match="it takes the number of a process or a file"):
        top.run(given)  # pyright: ignore[reportArgumentType]


def test_it_takes_a_number_of_seconds():
    with pytest.raises(ArgumentError, match="every is 0"):
        top.run(os.getpid(), every=0)


def test_a_folder_that_cannot_be_written_does_not_end_the_run(monkeypatch, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(file))
    with jaxmem.track("epoch") as t:
        t.point("here")
    assert any("jaxmem top cannot see it" in note for note in t.summary().notes)
