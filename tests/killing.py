"""Kill examples/train_distributed.py at random moments, and see that it goes on as if nobody had.

    python tests/killing.py --kills 200 --seed 1 --json kills.json

Two processes over loopback. Each kill draws a moment (while a checkpoint is being written, while it
trains, while it starts and restores) and whom to kill: one of the two, both at once, the process
that started them, or all. Afterwards nothing of it may live, only the checkpoint that was being
written may be lacking, and the next run begins after the newest one, with the losses of a run that
nobody killed, digit by digit. Exits with 1 if any of that did not hold.

A kill takes as long as starting two processes does: 15 s on two cores. What they compile is kept
beside their checkpoints (JAX's persistent cache).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "train_distributed.py"
STEPS, EVERY = 24, 3
VICTIMS = ("first", "second", "both", "starter", "all")
_SETTINGS = {
    "PYTHONPATH": str(SCRIPT.parent.parent),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
MOMENTS = ("saving",) * 9 + ("training",) * 8 + ("starting",) * 3


class Run:
    """The example, started; its processes are gone when it is left."""

    def __init__(self, directory: Path, *options: str):
        command = [sys.executable, str(SCRIPT), "--local", "2", "--devices", "2", *options]
        self.out, compiled = directory.with_suffix(".out"), directory.parent / "compiled"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--steps", str(STEPS), "--every", str(EVERY), str(directory)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_SETTINGS, "JAX_COMPILATION_CACHE_DIR": str(compiled)},
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

    def ended(self, seconds: float = 300) -> int:
        """Its exit code, when it has come to its end by itself."""
        return self.process.wait(timeout=seconds)

    def wait_for(self, step: int) -> None:
        end = time.monotonic() + 240
        while step not in self.losses():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.01)

    def kill(self, victim: str) -> None:
        """SIGKILL for one of :data:`VICTIMS`; all end then."""
        children = self.children()
        picked = {
            "first": children[:1],
            "second": children[1:],
            "both": children,
            "starter": [self.process.pid],
            "all": [self.process.pid, *children],
        }[victim]
        for pid in picked:
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while any(_lives(n) for n in _group(self.process.pid)):
            assert time.monotonic() < end, f"some are left after {victim} was killed"
            time.sleep(0.02)
        self.process.wait()


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


def complete(directory: Path) -> list[int]:
    """The numbers of the checkpoints that are there."""
    there = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(p.name) for p in there if p.name.isdecimal())


def half_written(directory: Path) -> list[str]:
    there = directory.iterdir() if directory.is_dir() else ()
    return sorted(p.name for p in there if not p.name.isdecimal())


@dataclass
class Kill:
    """One kill, and what was seen.

    Attributes:
        moment: and ``victim``, as they were drawn.
        begun: the step it began with; -1 if it was killed before that.
        reached: the last step whose loss was printed, and ``newest`` the last complete checkpoint.
        left: what was half-written when all were gone.
        seconds: from its start to the kill.
        wrong: what did not hold; "" if all did.
    """

    moment: str
    victim: str
    begun: int = -1
    reached: int = -1
    newest: int = -1
    left: tuple[str, ...] = ()
    seconds: float = 0.0
    wrong: str = ""


def _reach(run: Run, moment: str, begin: int, directory: Path, draw: random.Random) -> None:
    """Wait for a moment at which to kill, or for the end of the run."""
    if moment == "starting":
        _sleep(run, draw.random() * 12)
        return
    run.wait_for(min(begin + draw.randrange(EVERY + 1), STEPS - 1))
    if moment == "training":
        _sleep(run, draw.random() * 0.6)
        return
    before, end = half_written(directory), time.monotonic() + 60
    while half_written(directory) == before and time.monotonic() < end:
        if run.process.poll() is not None:
            return
        time.sleep(0.001)
    _sleep(run, draw.random() * 0.15)


def _sleep(run: Run, seconds: float) -> None:
    try:
        run.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        pass


def kill_once(directory: Path, done: int, expected: dict[int, str], draw: random.Random) -> Kill:
    """Start the example after checkpoint ``done``, kill it, and look at what it leaves."""
    kill = Kill(draw.choice(MOMENTS), draw.choice(VICTIMS))
    started = time.monotonic()
    with Run(directory) as run:
        try:
            _reach(run, kill.moment, done + 1, directory, draw)
            kill.seconds = time.monotonic() - started
            if run.process.poll() is None and len(run.children()) == 2:
                run.kill(kill.victim)
            elif run.process.poll() is None:
                kill.victim = "all"
                run.end()
            else:
                kill.victim = "nobody"
        except AssertionError as error:
            kill.wrong = str(error)
        losses, begun = run.losses(), run.begun_at()
    kill.begun = -1 if begun is None else begun
    kill.reached = max(losses, default=done)
    kill.newest = max(complete(directory), default=-1)
    kill.left = tuple(half_written(directory))
    kill.wrong = kill.wrong or _wrong(kill, done, losses, expected, run)
    return kill


def _wrong(
    kill: Kill, done: int, losses: dict[int, str], expected: dict[int, str], run: Run
) -> str:
    if kill.begun not in (-1, done + 1):
        return f"it began with step {kill.begun} after checkpoint {done}\n{run.text()}"
    for step, loss in losses.items():
        if loss != expected[step]:
            return f"step {step} has loss {loss}, and {expected[step]} where nobody kills"
    # The one that was being written may be lost, and no more.
    if kill.newest < max(done, (kill.reached + 1) // EVERY * EVERY - 1 - EVERY):
        return f"checkpoint {kill.newest} is the newest, step {kill.reached} was reached"
    numbered = [(name, name.split(".")[0]) for name in kill.left]
    old = [name for name, step in numbered if step.isdecimal() and int(step) <= done]
    if old and kill.newest > done:
        return f"{old} were left by earlier runs, and are still there"
    if run.process.returncode not in (0, None) and kill.victim == "nobody":
        return f"it ended by itself\n{run.text()}"
    return ""


def stop_once(directory: Path, done: int, expected: dict[int, str]) -> Kill:
    """Start the example after checkpoint ``done`` and tell it to stop (SIGTERM): it saves first."""
    seen = Kill("told", "nobody")
    with Run(directory) as run:
        run.wait_for(done + 4)
        run.process.terminate()
        code, losses, begun = run.ended(), run.losses(), run.begun_at()
    seen.begun = -1 if begun is None else begun
    seen.reached, seen.newest = max(losses), max(complete(directory), default=-1)
    seen.left = tuple(half_written(directory))
    seen.wrong = _wrong(seen, done, losses, expected, run)
    if code or seen.left or not seen.newest == seen.reached < STEPS - 1:
        seen.wrong = f"told to stop, it did not save and exit\n{run.text()}"
    return seen


def check(directory: Path, kills: int, seed: int, tell=lambda kill: None) -> list[Kill]:
    """Kill the example ``kills`` times, tell it to stop, and let it come to its end.

    Args:
        directory: for checkpoints; nothing is there yet.
        kills: how often; whenever training has ended it begins anew.
        seed: of the moments and the victims.
        tell: called with each.

    Returns:
        What was seen of each kill, of the stop and of the end.
    """
    with Run(directory / "whole") as run:
        assert run.ended() == 0, run.text()
        expected = run.losses()
    assert sorted(expected) == list(range(STEPS))
    draw, done, place = random.Random(seed), -1, directory / "killed"
    seen: list[Kill] = []
    for _ in range(kills):
        seen.append(kill_once(place, done, expected, draw))
        tell(seen[-1])
        done = seen[-1].newest
        if seen[-1].wrong:
            # What it left is kept to be looked at.
            place.rename(directory / f"wrong{len(seen)}") if place.is_dir() else None
            done = -1
        elif done == STEPS - 1:
            shutil.rmtree(place)
            done = -1
    if done > STEPS // 2:
        shutil.rmtree(place)
        done = -1
    seen.append(stop_once(place, done, expected))
    tell(seen[-1])
    done = seen[-1].newest
    last = Kill("end", "nobody")
    with Run(place) as run:
        code, losses = run.ended(), run.losses()
    if code or losses != {n: expected[n] for n in range(done + 1, STEPS)}:
        last.wrong = f"the last run did not come to its end\n{run.text()}"
    elif {p.name for p in place.iterdir()} != {
        *map(str, (max(STEPS - 1 - EVERY, done), STEPS - 1))
    }:
        last.wrong = f"leftovers: {sorted(p.name for p in place.iterdir())}"
    tell(last)
    return [*seen, last]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="empty or not there; default: a new one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)

    def tell(kill: Kill) -> None:
        print(json.dumps(asdict(kill)), flush=True)

    seen = check(directory, options.kills, options.seed, tell)
    wrong = [kill for kill in seen if kill.wrong]
    result = {
        "kills": sum(kill.victim != "nobody" for kill in seen),
        "wrong": len(wrong),
        "moments": Counter(kill.moment for kill in seen),
        "victims": Counter(kill.victim for kill in seen),
        "half_written": sum(bool(kill.left) for kill in seen),
        "python": sys.version.split()[0],
        "options": {"kills": options.kills, "seed": options.seed},
        "seen": [asdict(kill) for kill in seen],
    }
    print({name: value for name, value in result.items() if name != "seen"})
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
