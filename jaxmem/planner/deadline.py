"""A time limit for the search alone: it does not run while programs are compiled."""

from __future__ import annotations

import contextlib
import numbers
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxmem.errors import ArgumentError
from jaxmem.planner.solvers.answer import Clock


@dataclass
class Deadline(Clock):
    """A clock that only runs within :meth:`running`.

    Attributes:
        spent: seconds it ran until it was last stopped.
        depth: how many are running it now.
    """

    spent: float = 0.0
    depth: int = 0

    def left(self) -> float:
        """Seconds that are left."""
        since = time.perf_counter() - self.started if self.depth else 0.0
        return self.seconds - self.spent - since

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the clock meanwhile."""
        if not self.depth:
            self.started = time.perf_counter()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.spent += time.perf_counter() - self.started


def check_time_limit(seconds: Any) -> None:
    """Check that something is a time limit: a number of seconds, or ``None`` for none.

    Raises:
        ArgumentError: it is not.

    >>> check_time_limit(0.5)
    """
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if seconds is None or (is_number and float(seconds) > 0):
        return
    raise ArgumentError(
        f"time_limit is {seconds!r}: it takes a number of seconds above 0, such as time_limit=30, "
        "or None for as long as the search takes."
    )
