"""Time runs on the device in turns, so that whatever drifts meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

Timer = Callable[[Callable[[], None]], float]
"""Calls what it is given once, and says how many seconds that took."""

_WARM_UPS = 2
_FEWEST, _MOST = 5, 25
# Short steps are run more often, up to this many seconds in all: their times scatter more.
_LONG_ENOUGH = 1.0


class Run(Protocol):
    """One thing to time: prepared, then called; only the call counts."""

    def prepare(self) -> None:
        """Make ready what the call takes."""
        ...

    def __call__(self) -> None:
        """Run it to its end."""
        ...


def wall_seconds(run: Callable[[], None]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def in_turns(runs: Sequence[Run], timer: Timer = wall_seconds) -> list[list[float]]:
    """The seconds of each of several runs, as often as they count.

    They take turns, there and back, after two rounds that do not count. Five rounds count, and of
    short runs more, up to 25 or a second in all.

    Args:
        runs: what to time.
        timer: times one call.

    >>> class Sleep:
    ...     def prepare(self): pass
    ...     def __call__(self): pass
    >>> figures = iter([3.0, 1.0, 1.0, 3.0, 9.0, 1.0, 1.0, 3.0, 3.0, 1.0])
    >>> in_turns([Sleep(), Sleep()], lambda run: next(figures))
    [[3.0, 3.0, 9.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]]
    """
    for _ in range(_WARM_UPS):
        for run in runs:
            run.prepare()
            run()
    taken: list[list[float]] = [[] for _ in runs]
    count, total = 0, 0.0
    while count < _FEWEST or (count < _MOST and total < _LONG_ENOUGH):
        order = range(len(runs)) if count % 2 == 0 else reversed(range(len(runs)))
        for number in order:
            runs[number].prepare()
            taken[number].append(timer(runs[number]))
        count, total = count + 1, sum(map(sum, taken))
    return taken
