"""Checkpoints that are damaged, cut short or over several devices."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import CheckpointError
from jaxmem.state import writing
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
def test_flipped_bytes_never_become_values(tmp_path, seed):
    """Any file, any byte: an error, or, in what says nothing of the values, the saved ones."""
    rng = random.Random(seed)
    state = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "zeros": jnp.zeros(50), "n": 4}
    saved = tmp_path / "run"
    jaxmem.save(saved, state, step=0, wait=True)
    files = [path for path in saved.rglob("*") if path.is_file() and path.stat().st_size]
    detected = named = 0
    for number in range(20):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(saved, copy)
        path = rng.choice(files)
        target = copy / path.relative_to(saved)
        raw = bytearray(target.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        target.write_bytes(raw)
        try:
            found = jaxmem.restore(copy, blank(state))
        except CheckpointError as error:
            detected += 1
            named += "['w']" in str(error) or "['zeros']" in str(error)
        else:
            assert_same(state, found)
    assert detected


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
    detected = 0
    for at in range(0, len(whole), len(whole) // 12):
        raw = bytearray(whole)
        raw[at] ^= 0x10
        data.write_bytes(raw)
        try:
            assert_same(state, jaxmem.restore(tmp_path, blank(state)))
        except CheckpointError as error:
            assert re.search(r"damaged: .*\['w'\].* Try step=1", str(error)), error
            detected += 1
    assert detected >= 11  # Orbax reads all of it but some bytes at the end.
    assert_same(state, jaxmem.restore(tmp_path, blank(state), step=1))


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
