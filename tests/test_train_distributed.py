"""examples/train_distributed.py: killed and started again, it comes to the losses it would have."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "train_distributed.py"
STEPS, EVERY = 24, 3


class Run:
    """The example, started; its processes are gone when it is left."""

    def __init__(self, directory: Path, *options: str):
        command = [sys.executable, str(SCRIPT), "--local", "2", "--devices", "2", *options]
        self.out = directory.with_suffix(".out")
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--steps", str(STEPS), "--every", str(EVERY), str(directory)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)},
                start_new_session=True,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """SIGKILL for all that is left of it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(n) for n in found.split()]

    def text(self) -> str:
        return self.out.read_text()

    def losses(self) -> dict[int, str]:
        return {
            int(n): loss for n, loss in re.findall(r"^step (\d+) loss (\S+)$", self.text(), re.M)
        }

    def begun_at(self) -> int | None:
        found = re.search(r"; from step (\d+)$", self.text(), re.M)
        return None if found is None else int(found[1])

    def wait_for(self, step: int) -> None:
        end = time.monotonic() + 120
        while step not in self.losses():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.01)


def kill(run: Run, whom: int) -> None:
    """SIGKILL for the process that started the others (2), or one of these; all end then."""
    os.kill([*run.children(), run.process.pid][whom], signal.SIGKILL)
    end = time.monotonic() + 30
    while any(_lives(n) for n in _group(run.process.pid)):
        assert time.monotonic() < end, "some are left"
        time.sleep(0.02)
    run.process.wait()


def _group(group: int) -> list[int]:
    """The processes of a session."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(group)], capture_output=True, text=True
    ).stdout
    return [int(n) for n in found.split()]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check(tmp_path: Path, kills: int, seed: int) -> None:
    with Run(tmp_path / "whole") as run:
        assert run.process.wait(timeout=300) == 0, run.text()
        expected = run.losses()
    assert sorted(expected) == list(range(STEPS))
    draw, done, directory = random.Random(seed), -1, tmp_path / "killed"
    for n in range(kills):
        last = n == kills - 1
        with Run(directory) as run:
            begin, most = done + 1, 0 if last else draw.randrange(EVERY + 1)
            run.wait_for(min(begin + most, STEPS - 1))
            time.sleep(draw.random() * 0.3)
            if run.process.poll() is None:
                kill(run, draw.randrange(3))
            assert run.begun_at() == begin, run.text()
            for step, loss in run.losses().items():
                assert loss == expected[step], (step, loss, expected[step])
            reached = max(run.losses())
        complete = sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal())
        done = complete[-1] if complete else -1
        # The one that was being written may be lost, and no more.
        assert done >= (reached + 1) // EVERY * EVERY - 1 - EVERY, (complete, reached)
        if done == STEPS - 1:
            for path in directory.iterdir():
                _remove(path)
            done = -1
    with Run(directory) as run:
        assert run.process.wait(timeout=300) == 0, run.text()
        assert {n: expected[n] for n in range(done + 1, STEPS)} == run.losses()
    names = sorted(p.name for p in directory.iterdir())
    assert names == [str(STEPS - 1 - EVERY), str(STEPS - 1)], "leftovers"


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.wide
def test_killed_anywhere_it_goes_on_from_its_newest_checkpoint(tmp_path):
    check(tmp_path, kills=2, seed=0)


@pytest.mark.slow
def test_killed_two_hundred_times_it_goes_on_from_its_newest_checkpoint(tmp_path):
    check(tmp_path, kills=200, seed=1)


@pytest.mark.wide
def test_told_to_stop_it_saves_and_exits(tmp_path):
    directory = tmp_path / "run"
    with Run(directory, "--budget", "26MiB", "--shard", "zero1") as run:
        run.wait_for(3)
        run.process.terminate()
        assert run.process.wait(timeout=60) == 0, run.text()
        reached = max(run.losses())
    assert reached < STEPS - 1
    assert str(reached) in [p.name for p in directory.iterdir()]
