"""A file is replaced as a whole or stays as it was, whoever writes it and however that ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxmem.errors import ReportFileError
from jaxmem.files import check_replaceable, replacing
from tests.show.samples import frontier, plan, report

WRITERS = {
    "page": lambda path: report().to_html(path),
    "csv": lambda path: report().to_csv(path),
    "trace": lambda path: report().to_trace(path),
    "plan": lambda path: plan().save(path),
    "plan's csv": lambda path: plan().to_csv(path),
    "plan's page": lambda path: plan().to_html(path),
    "frontier": lambda path: frontier().to_csv(path),
}


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_fails_half_way_leaves_the_old_file(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(file) as out:
        out.write("half" * 100_000)
        out.flush()
        assert file.read_text() == "old"
        _ = 1 / 0
    assert (file.read_text(), only(tmp_path)) == ("old", ["a.txt"])


def test_what_fails_half_way_leaves_nothing_new(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a.txt") as out:
        out.write("half")
        raise KeyboardInterrupt
    assert only(tmp_path) == []


def test_what_a_killed_process_leaves_goes_with_the_next_write(tmp_path: Path):
    """And what another one still writes, to this file or to another, stays."""
    killed = """
import os, signal, sys
from jaxmem.files import replacing
with replacing(sys.argv[1]) as out:
    out.write("half")
    out.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    file, other = tmp_path / "a.txt", tmp_path / "b.txt"
    root = Path(__file__).parent.parent
    for path in (file, other):
        command = [sys.executable, "-c", killed, str(path)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, timeout=60)
        assert done.returncode == -signal.SIGKILL
    left = only(tmp_path)
    assert len(left) == 2 and all(name.startswith(".jaxmem-") for name in left)
    with replacing(file) as first:
        first.write("first")
        assert left[0] in only(tmp_path) and left[1] in only(tmp_path), "they may be written yet"
        for part in only(tmp_path):
            os.utime(tmp_path / part, (0, 0))
        with replacing(file) as second:
            second.write("second")
        assert file.read_text() == "second"
    assert file.read_text() == "first"
    assert len(only(tmp_path)) == 2, "the other file's part is left to whoever writes that"
    with replacing(other) as out:
        out.write("whole")
    assert only(tmp_path) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_writer_replaces_as_a_whole(tmp_path: Path, write, monkeypatch):
    file = tmp_path / "a"
    write(file)
    whole = file.read_text()
    file.write_text("old")
    opened = file.stat().st_ino
    seen = []
    replace = Path.replace

    def watched(part: Path, target: Path) -> Path:
        seen.append((part.read_text() == whole, file.read_text()))
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", watched)
    write(file)
    assert seen == [(True, "old")], "complete before it takes the old one's place"
    assert (file.read_text(), only(tmp_path)) == (whole, ["a"])
    assert file.stat().st_ino != opened


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path, write, monkeypatch):
    file = tmp_path / "a"
    file.write_text("old")
    opened = Path.open

    def full(path: Path, mode: str = "r", **options):
        return opened(Path("/dev/full"), "w", **options) if "x" in mode else opened(path, mode)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(file)
    monkeypatch.undo()
    assert (file.read_text(), only(tmp_path)) == ("old", ["a"])


def test_the_mode_and_the_link_stay(tmp_path: Path):
    file, link = tmp_path / "real.txt", tmp_path / "link.txt"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    with replacing(link) as out:
        out.write("new")
    assert link.is_symlink()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)


def test_a_new_file_has_the_mode_that_the_user_wants(tmp_path: Path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "a") as out:
            out.write("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_pipe_is_written_to(tmp_path: Path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_replaceable(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with replacing(pipe) as out:
        out.write("through")
    reader.join(timeout=30)
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_looking_changes_nothing(tmp_path: Path):
    file = tmp_path / "a"
    check_replaceable(file)
    assert only(tmp_path) == []
    file.write_text("old")
    before = file.stat()
    check_replaceable(file)
    assert (file.stat(), only(tmp_path)) == (before, ["a"])


def test_what_cannot_be_is_said(tmp_path: Path):
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "no" / "a", FileNotFoundError)):
        with pytest.raises(kind):
            check_replaceable(path)
    with pytest.raises(ReportFileError, match=r"it is a folder\. Name a file in it"):
        report().to_html(tmp_path)
    with pytest.raises(ReportFileError, match="there is no folder"):
        report().to_html(tmp_path / "no" / "a.html")


def test_a_file_that_is_not_to_be_written_is_not_replaced(tmp_path: Path, monkeypatch):
    """Its folder would allow it, but who made it read-only meant it."""
    file = tmp_path / "a"
    file.write_text("old")
    file.chmod(0o444)
    # root may write to everything
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    for attempt in (check_replaceable, plan().save):
        with pytest.raises(PermissionError):
            attempt(file)
    with pytest.raises(ReportFileError, match="no permission"):
        report().to_html(file)
    assert (file.read_text(), only(tmp_path)) == ("old", ["a"])
