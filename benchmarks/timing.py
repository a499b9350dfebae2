"""How steps of a training loop are timed, whatever they are made of."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

# Their losses are compared; they warm up as well.
FIRST_STEPS = 12
# A sample lasts at least so long. A loop starts steps ahead of the device: with two in a sample,
# Python's share of the first is a tenth of it where a state has a thousand leaves.
SAMPLE_SECONDS = 1.0


def timed(step: Callable[[], Any], wait: Callable[[], None], samples: int) -> tuple[float, list]:
    """Seconds of a step, the median of ``samples``, and the losses of the first ones.

    Args:
        step: starts one step and returns its loss.
        wait: returns when everything that was started is done.
        samples: how many samples are taken, each of as many steps as take a second, all started
            before any is waited for.
    """
    losses = [step() for _ in range(FIRST_STEPS - 1)]
    wait()
    started = time.perf_counter()
    losses.append(step())
    wait()
    inner = math.ceil(SAMPLE_SECONDS / (time.perf_counter() - started))
    seconds = []
    for _ in range(samples):
        started = time.perf_counter()
        for _ in range(inner):
            step()
        wait()
        seconds.append((time.perf_counter() - started) / inner)
    return statistics.median(seconds), [float(loss) for loss in losses]
