"""How steps of a training loop are timed, whatever they are made of."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

# Steps before anything is timed; their losses are compared.
FIRST_STEPS = 12
# A sample lasts about so long. A loop starts steps ahead of the device: with two in a sample,
# Python's share of the first is a tenth of it where a state has a thousand leaves.
SAMPLE_SECONDS = 1.0
_FEW_STEPS = 2


def timed(step: Callable[[], Any], wait: Callable[[], None], samples: int) -> tuple[float, list]:
    """Seconds of a step, the median of ``samples``, and the losses of the first ones.

    Args:
        step: starts one step and returns its loss.
        wait: returns when everything that was started is done.
        samples: how many samples are taken, each of as many steps as take a second, all started
            before any is waited for.
    """
    losses = [step() for _ in range(FIRST_STEPS)]
    wait()

    def together(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        return (time.perf_counter() - started) / steps

    few = together(_FEW_STEPS)
    inner = max(_FEW_STEPS, math.ceil(SAMPLE_SECONDS / few))
    seconds = [together(inner) for _ in range(samples)]
    return statistics.median(seconds), [float(loss) for loss in losses]
