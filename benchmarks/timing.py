"""How steps of a training loop are timed, whatever they are made of, beside predictions."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
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


def compared(row: Mapping[str, Any]) -> dict[str, float]:
    """What was predicted of a row's time over what was measured; nothing where it lacks one."""
    for unit in ("seconds", "ms"):
        predicted, measured = row.get(f"predicted_{unit}"), row.get(unit)
        if predicted and measured:
            return {"predicted_over_measured": predicted / measured}
    return {}


def as_predicted(row: Mapping[str, Any]) -> str:
    """That ratio as the end of a line, or nothing."""
    return "".join(f", predicted {ratio:.3f} of it" for ratio in compared(row).values())
