"""``jaxmem top``: the memory of a tracked process, live in a terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxmem.displayed import Displayed
from jaxmem.errors import ArgumentError, TrackError
from jaxmem.monitor import published
from jaxmem.monitor.duty import check_seconds
from jaxmem.monitor.published import Published

_SECONDS = 1.0


@dataclass(frozen=True)
class Screen(Displayed):
    """What ``jaxmem top`` shows at one moment.

    Attributes:
        processes: what each of them told last.
        time: seconds since 1970, to say how old that is.
    """

    processes: tuple[Published, ...]
    time: float

    def to_dict(self) -> list[dict[str, Any]]:
        """The last sample of each process, as what JSON knows, and what was in use before it."""
        return [
            {
                "pid": p.pid,
                "command": p.command,
                "alive": p.alive,
                "history": list(p.history),
                **p.sample.to_dict(),
            }
            for p in self.processes
        ]

    def to_json(self) -> str:
        """All that is shown, as JSON text: when it was looked at, and the processes."""
        return json.dumps({"time": self.time, "processes": self.to_dict()}, indent=1)


def screen(pid_or_path: int | str | os.PathLike[str] | None = None) -> Screen:
    """Returns what there is to see now.

    Args:
        pid_or_path: number of a process, a file that ``jaxmem.track(..., jsonl=...)`` writes, or
            ``None`` for all processes of this user that are tracked.

    Raises:
        TrackError: nothing is tracked there.
        ArgumentError: this is neither a number nor a path.
    """
    if pid_or_path is None:
        found = tuple(published.everyone())
        if not found:
            raise TrackError(
                "no process of this user is tracked now. In one that runs: "
                'with jaxmem.track("train"): ..., or name a file of samples.'
            )
        return Screen(found, time.time())
    if isinstance(pid_or_path, bool) or not isinstance(pid_or_path, int | str | os.PathLike):
        raise ArgumentError(
            f"top of {pid_or_path!r}: it takes the number of a process or a file of samples."
        )
    given = str(pid_or_path)
    # Twenty digits hold every number that a kernel gives; a longer name is that of a file.
    if given.isascii() and given.isdecimal() and len(given) <= 20:
        return Screen((published.of_process(int(given)),), time.time())
    return Screen((published.of_file(given),), time.time())


def screens(
    pid_or_path: int | str | os.PathLike[str] | None = None, *, every: float = _SECONDS
) -> Iterator[Screen]:
    """What there is to see, again and again, until the process that was named has ended."""
    while True:
        now = screen(pid_or_path)
        yield now
        if not any(process.alive for process in now.processes):
            return
        time.sleep(every)


def is_live(console: Any) -> bool:
    """Whether a ``rich.console.Console`` can show what changes."""
    return console.is_terminal and not console.is_dumb_terminal


def run(
    pid_or_path: int | str | os.PathLike[str] | None = None,
    *,
    every: float = _SECONDS,
    once: bool | None = None,
    console: Any = None,
) -> int:
    """Show the memory of a tracked process until it ends, or Ctrl-C.

    Args:
        pid_or_path: as for :func:`screen`.
        every: seconds between two looks.
        once: show what there is and return; ``None`` does so where there is no terminal, or one
            that cannot draw over what it has drawn.
        console: a ``rich.console.Console``; by default that of the standard output.

    Returns:
        0.

    Raises:
        TrackError: nothing is tracked there.
        ArgumentError: an argument is of another kind.
    """
    from rich.console import Console
    from rich.live import Live

    check_seconds("every", every)
    console = console or Console()
    if once or (once is None and not is_live(console)):
        console.print(screen(pid_or_path), markup=False, emoji=False, highlight=False)
        return 0
    first = screen(pid_or_path)
    try:
        with Live(first, console=console, auto_refresh=False, transient=False) as live:
            for now in screens(pid_or_path, every=every):
                live.update(now, refresh=True)
    except KeyboardInterrupt:
        pass
    except TrackError:
        # The process ended and took its file away: what it told last stays on the screen.
        console.print("ended", style="dim")
    return 0
