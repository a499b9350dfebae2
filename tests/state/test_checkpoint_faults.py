"""Checkpoints that are damaged, cut short or over several devices."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.errors import CheckpointError
from jaxmem.state import seal, writing
from tests.state.trees import assert_same, blank

HERE = Path(__file__).parent


def test_a_checkpoint_of_another_format_or_of_orbax_alone(tmp_path):
    import orbax.checkpoint as ocp

    jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=0, wait=True)
    listed = tmp_path / "0" / "jaxmem" / "metadata"
    written = json.loads(listed.read_text())
    assert written["by"] == f"jaxmem {jaxmem.__version__}"
    listed.write_text(json.dumps({**written, "format": 2, "by": "jaxmem 9.1"}))
    said = r"has format 2, written by jaxmem 9\.1; this is jaxmem 0\.\S+, which reads format 1\."
    with pytest.raises(CheckpointError, match=said):
        jaxmem.restore(tmp_path, {"w": jnp.ones(3)})
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    with pytest.raises(CheckpointError, match=r"not written by jaxmem\.save"):
        jaxmem.restore(tmp_path / "orbax", {"w": jnp.ones(3)})


@pytest.fixture
def freed():
    """What failed reads leave is freed in the test that made them."""
    yield
    gc.collect()


# Where a read fails, Orbax leaves what its event loop should still do; Python says so.
UNCLOSED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@UNCLOSED
@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("seed", range(3))
def test_every_flipped_bit_is_an_error_that_names_what_is_damaged(tmp_path, seed):
    """Any file, any byte, also of those that no array needs."""
    rng = random.Random(seed)
    state = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "zeros": jnp.zeros(50), "n": 4}
    jaxmem.save(tmp_path, state, step=0, wait=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 12
    for path in files:
        whole = path.read_bytes()
        raw = bytearray(whole)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match="damaged") as said:
            jaxmem.restore(tmp_path, blank(state))
        name = path.relative_to(tmp_path / "0").as_posix()
        assert name in str(said.value) or name == "jaxmem/metadata", said.value
        path.write_bytes(whole)
    assert_same(state, jaxmem.restore(tmp_path, blank(state)))


@UNCLOSED
@pytest.mark.usefixtures("freed")
def test_a_damaged_leaf_is_named_and_another_checkpoint(tmp_path):
    """The largest file holds the arrays; every byte of it is flipped in turn."""
    state = {"w": jax.random.normal(jax.random.key(0), (64, 32))}
    jaxmem.save(tmp_path, state, step=1, wait=True)
    jaxmem.save(tmp_path, state, step=2, wait=True)
    files = [path for path in (tmp_path / "2" / "state").rglob("*") if path.is_file()]
    data = max(files, key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    named = 0
    for at in range(0, len(whole), len(whole) // 12):
        raw = bytearray(whole)
        raw[at] ^= 0x10
        data.write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"damaged: .* Try step=1") as said:
            jaxmem.restore(tmp_path, blank(state))
        named += "['w']" in str(said.value)
    assert named >= 11  # Orbax reads all of it but some bytes at the end.
    assert_same(state, jaxmem.restore(tmp_path, blank(state), step=1))


@UNCLOSED
@pytest.mark.usefixtures("freed")
def test_damage_beside_the_arrays_is_named(tmp_path):
    whole = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
    state = {name: jax.device_put(jnp.ones((64, 32)), whole) for name in "ab"}
    jaxmem.save(tmp_path, state, step=1, wait=True)
    beside = tmp_path / "1" / "state" / "array_metadatas"
    for file in beside.iterdir():
        file.write_bytes(file.read_bytes()[:40])
    said = r"'a'.*'b'.* cannot be read .* Not as written: state/array_metadatas/process_0\."
    with pytest.raises(CheckpointError, match=said):
        jaxmem.restore(tmp_path, state)


def test_files_that_no_array_needs_can_be_given_up(tmp_path):
    state = {"w": jnp.ones((64, 32)), "n": 4}
    jaxmem.save(tmp_path, state, step=1, wait=True)
    (tmp_path / "1" / "state" / "_sharding").write_text("{}")
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(CheckpointError, match="Every array is as it was") as said:
        jaxmem.restore(tmp_path, blank(state))
    assert "Not as written: _CHECKPOINT_METADATA, state/_sharding." in str(said.value)
    for name in re.findall(r"\w+\.txt", str(said.value)):
        (tmp_path / "1" / name).unlink()
    assert_same(state, jaxmem.restore(tmp_path, blank(state)))


def test_what_cannot_be_read_is_damaged(tmp_path, monkeypatch):
    """A bad sector, a file of somebody else, a directory in the place of a file."""
    state = {"w": jnp.ones((64, 32)), "n": 4}
    jaxmem.save(tmp_path, state, step=1, wait=True)
    (tmp_path / "1" / "commit_success.txt").unlink()
    (tmp_path / "1" / "commit_success.txt").mkdir()
    with pytest.raises(CheckpointError, match=r"Not as written: commit_success\.txt"):
        jaxmem.restore(tmp_path, blank(state))
    piece = seal._piece

    def failing(path: Path, start: int) -> int:
        if path.name == "_sharding":
            raise OSError(5, "Input/output error")
        return piece(path, start)

    monkeypatch.setattr(seal, "_piece", failing)
    with pytest.raises(CheckpointError, match=r"commit_success\.txt, state/_sharding\."):
        jaxmem.restore(tmp_path, blank(state))


def test_a_file_of_several_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(seal, "_PIECE_BYTES", 100)
    monkeypatch.setattr(seal, "_READ_BYTES", 30)
    file = tmp_path / "a file"
    sums = set()
    for size in (0, 1, 99, 100, 101, 2000):
        for at in (None, 0, size // 2, size - 1):
            raw = bytearray(size)
            if at is not None and size:
                raw[at] = 1
            file.write_bytes(raw)
            sums.add(seal.sums_of(tmp_path)["a file"])
    assert len(sums) == 1 + 2 + 4 * 4


def test_a_directory_that_orbax_takes_for_a_pattern_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has \[ in it, which Orbax takes for a pattern"):
        jaxmem.save(tmp_path / "run [x]", {"w": jnp.ones(3)}, step=0)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_complete_when_python_ends_is_not_called_incomplete(tmp_path):
    # Nobody waits for it but by looking; a moment later Orbax's thread has ended, too.
    code = (
        "import pathlib, time, numpy as np, jaxmem\n"
        f"jaxmem.save({str(tmp_path)!r}, {{'w': np.ones(3, np.float32)}}, step=3)\n"
        f"while not pathlib.Path({str(tmp_path)!r}, '3').exists(): time.sleep(0.05)\n"
        "time.sleep(0.5)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    # jax's plugins may say something of their own.
    assert "jaxmem: " not in ended.stderr, ended.stderr
    assert (tmp_path / "3" / seal.AROUND).is_file()


def test_the_list_of_files_is_there_before_a_checkpoint_is(tmp_path, monkeypatch):
    """A checkpoint is complete when it is renamed: what is complete has its list."""
    seen = []

    def write_around(place: Path) -> None:
        seen.append(seal.changed(place))
        assert (place / seal.ITEMS).is_file()

    monkeypatch.setattr(writing.seal, "write_around", write_around)
    state = {"w": jnp.ones((64, 32))}
    jaxmem.save(tmp_path, state, step=1, wait=True)
    assert seen == [[]]
    assert_same(state, jaxmem.restore(tmp_path, state))
    inside = {
        p.relative_to(tmp_path / "1").as_posix() for p in tmp_path.rglob("*/*/*") if p.is_file()
    }
    listed = (tmp_path / "1" / seal.ITEMS).read_text().splitlines()[1:]
    assert {line.split(" ", 2)[2] for line in listed} == inside


# --- faults -----------------------------------------------------------------------------------


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=0, wait=True)
    usage = SimpleNamespace(free=2**20)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"up to 4\.0MiB, and 1\.0MiB are free"):
        jaxmem.save(tmp_path, {"w": np.ones(2**20, np.float32)}, step=1)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["0"]


def run_script(name: str, *args: str) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    return subprocess.Popen(
        [sys.executable, str(HERE / name), *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    """The system refuses files of more than a megabyte; the one before stays, leftovers go."""
    process = run_script("failing_writes.py", str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "could not be written" in out
    assert "8.0MiB" in out
    assert "that are there: 1" in out


@pytest.mark.parametrize("end", ["", "raise ValueError", "sys.exit(3)"])
def test_python_ends_when_the_checkpoint_is_complete_or_says_that_it_is_not(tmp_path, end):
    code = (
        "import sys, numpy as np, jaxmem\n"
        f"jaxmem.save({str(tmp_path)!r}, {{'w': np.ones(3, np.float32)}}, step=3, wait=True)\n"
        f"jaxmem.save({str(tmp_path)!r}, {{'w': np.ones(2**24, np.float32)}}, step=4)\n{end}"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.parent.parent, capture_output=True, text=True
    )
    assert bool(ended.returncode) == bool(end)
    told = "is not complete; wait() for it before Python ends" in ended.stderr
    assert (tmp_path / "4").is_dir() != told, ended.stderr
    if sys.version_info < (3, 12):
        assert not told
    size = 3 if told else 2**24
    assert (jaxmem.restore(tmp_path, {"w": np.zeros(size, np.float32)})["w"] == 1).all()


def test_several_devices(tmp_path):
    process = run_script("sharded_checkpoints.py", str(tmp_path))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.count("holds") == 4


def _next_line(process) -> dict:
    """What a script prints next; fails with what it said where it ended instead."""
    line = process.stdout.readline()
    if not line:
        pytest.fail(process.communicate()[1])
    return json.loads(line)


@pytest.mark.parametrize(
    "kills", [pytest.param(6, id="few"), pytest.param(200, id="many", marks=pytest.mark.slow)]
)
def test_killed_at_any_moment_it_goes_on_from_a_complete_checkpoint(tmp_path, kills):
    """SIGKILL while it trains and saves; the script verifies every value it finds."""
    rng = random.Random(0)
    newest = -1
    for number in range(kills):
        process = run_script("killed_while_saving.py", str(tmp_path))
        assert process.stdout is not None
        last = _next_line(process)["step"]
        assert last >= newest, (number, last, newest)
        for _ in range(rng.randrange(1, 12)):
            last = _next_line(process)["complete"]
        threading_seconds = rng.random() * 0.02
        try:
            process.wait(timeout=threading_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        newest = last
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    process = run_script("killed_while_saving.py", str(tmp_path), "--stop")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[0])["step"] >= newest
    after = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert all(name.isdigit() for name in after), (left, after)


KILLED_WHILE_DELETING = """
import os, shutil, sys
import jax.numpy as jnp
import jaxmem

def killed(*args, **kwargs):
    os._exit(9)

for step in range(3):
    if step == 2:  # What pushes the first one out.
        os.unlink = os.rmdir = shutil.rmtree = killed
    jaxmem.save(sys.argv[1], {"w": jnp.ones(3) * step}, step=step, keep=2, wait=True)
"""


def test_a_process_that_ends_while_an_old_checkpoint_goes_leaves_none_that_is_half_there(tmp_path):
    code = [sys.executable, "-c", KILLED_WHILE_DELETING, str(tmp_path)]
    ended = subprocess.run(code, cwd=HERE.parent.parent, capture_output=True, text=True)
    assert ended.returncode == 9, ended.stderr
    assert {path.name for path in tmp_path.iterdir() if path.name.isdecimal()} == {"1", "2"}
    assert jaxmem.restore(tmp_path, {"w": jnp.zeros(3)})["w"][0] == 2
    jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=3, keep=2, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
