"""Bounds what watching costs: a share of the time, whatever there is to look at."""

from __future__ import annotations

import math
import numbers
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from jaxmem.errors import ArgumentError


def check_seconds(name: str, seconds: Any, *, least: float = math.ulp(0.0)) -> float:
    """A number of seconds that an argument called ``name`` was given.

    Raises:
        ArgumentError: it is none, or less than ``least``.

    >>> check_seconds("every", 2)
    2.0
    """
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if is_number and math.isfinite(float(seconds)) and float(seconds) >= least:
        return float(seconds)
    above = "above 0" if least else "of 0 or more"
    raise ArgumentError(f"{name} is {seconds!r}: it takes a number of seconds {above}.")


@dataclass
class Duty:
    """Seconds that may be spent, earned as time goes by.

    Attributes:
        share: of the time that passes.
        most: that can be saved up, so that what is rare is never put off.
    """

    share: float
    most: float
    left: float = field(init=False)
    _at: float = field(default_factory=time.perf_counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self):
        self.left = self.most

    def may(self) -> bool:
        """Whether something more may be done now.

        >>> duty = Duty(share=0.01, most=0.1)
        >>> duty.spend(0.2)
        >>> duty.may()
        False
        """
        with self._lock:
            now = time.perf_counter()
            self.left = min(self.most, self.left + (now - self._at) * self.share)
            self._at = now
            return self.left > 0

    def spend(self, seconds: float) -> None:
        """Note that something took so long."""
        with self._lock:
            self.left -= seconds


# What is done at the beginning and end of tracked code, on its own thread. The sampler's thread
# has a share of its own; both together stay below 1%.
AT_POINTS = Duty(share=0.003, most=0.05)
