"""What a tracked process tells others: its last samples, in a file that its number leads to."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmem.errors import TrackError
from jaxmem.monitor.samples import Sample
from jaxmem.targets.measured import cache_folder

_MOST_KEPT = 60


@dataclass(frozen=True)
class Published:
    """What is known of a tracked process.

    Attributes:
        pid: its number; 0 for a file of samples.
        command: how it was started.
        alive: whether it still runs.
        sample: its last sample.
        history: bytes in use of its fullest device, oldest first.
    """

    pid: int
    command: str
    alive: bool
    sample: Sample
    history: tuple[int, ...]


class Publisher:
    """Keeps the file of this process up to date, and takes it away at the end.

    Attributes:
        problem: why it is not published; ``""`` where it is.
    """

    def __init__(self):
        self.problem = ""
        self._pid = 0
        self._history: deque[int] = deque(maxlen=_MOST_KEPT)

    def publish(self, sample: Sample) -> None:
        """Tell others; where that does not work, ``problem`` says so."""
        if self._pid != os.getpid():  # A child process has a file of its own.
            self._pid = os.getpid()
            self._history.clear()
            atexit.register(_remove, self._pid)
        self._history.append(max((d.in_use.nbytes for d in sample.devices), default=0))
        kept = {
            "pid": self._pid,
            "started": _started(self._pid),
            "command": " ".join(sys.argv)[:500] or "python",
            "sample": sample.to_dict(),
            "history": list(self._history),
        }
        path = path_of(self._pid)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Several threads may publish at once.
            part = path.with_suffix(f".{threading.get_ident()}.part")
            part.write_text(json.dumps(kept, separators=(",", ":")))
            part.replace(path)
            self.problem = ""
        except OSError as error:
            self.problem = f"jaxmem top cannot see it: {path.parent} ({error.strerror})"


PUBLISHER = Publisher()


def path_of(pid: int) -> Path:
    """The file of a process."""
    return cache_folder() / "tracked" / f"{pid}.json"


def _remove(pid: int) -> None:
    if pid == os.getpid():
        path_of(pid).unlink(missing_ok=True)


def _started(pid: int) -> str:
    """When a process started, in the kernel's count: numbers are used again, this is not."""
    try:
        # The name in parentheses may have spaces; what follows it has none.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def everyone() -> list[Published]:
    """The tracked processes of this user that run; files of others that are gone are removed."""
    found = []
    for path in sorted((cache_folder() / "tracked").glob("*.json")):
        with contextlib.suppress(TrackError):
            one = of_process(int(path.stem)) if path.stem.isdigit() else None
            if one is not None and one.alive:
                found.append(one)
            elif one is not None:
                path.unlink(missing_ok=True)
    return found


def of_process(pid: int) -> Published:
    """What a process tells.

    Raises:
        TrackError: it tells nothing.
    """
    path = path_of(pid)
    try:
        kept: Any = json.loads(path.read_text())
        started, command, history = kept["started"], str(kept["command"]), kept["history"]
        sample, numbers = Sample.from_dict(kept["sample"]), tuple(map(int, history))
    except FileNotFoundError:
        if not _is_running(pid):
            raise TrackError(
                f"there is no process {pid}. jaxmem top without a number shows all that track."
            ) from None
        raise TrackError(
            f"process {pid} tracks nothing that is published here ({path.parent}). In it: "
            'with jaxmem.track("train"): ..., and the same JAXMEM_CACHE_DIR if that is set.'
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackError(f"{path} cannot be read: {type(error).__name__}.") from error
    alive = _started(pid) == started and (bool(started) or _is_running(pid))
    return Published(pid, command, alive, sample, numbers)


def _is_running(pid: int) -> bool:
    if pid <= 0:  # To the kernel that is a group of processes.
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def of_file(path: str | os.PathLike[str]) -> Published:
    """What the end of a file of samples tells.

    Raises:
        TrackError: it has none.
    """
    where = Path(path)
    try:
        with where.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 2**16))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        raise TrackError(f"{where} cannot be read: {error.strerror}.") from error
    samples = []
    for line in lines[-_MOST_KEPT:]:
        with contextlib.suppress(TrackError, ValueError):  # The first and last may be cut off.
            samples.append(Sample.from_dict(json.loads(line)))
    if not samples:
        raise TrackError(
            f"{where} has no samples: it is written by jaxmem.track(..., jsonl={str(where)!r})."
        )
    history = tuple(max((d.in_use.nbytes for d in s.devices), default=0) for s in samples)
    return Published(0, str(where), True, samples[-1], history)
