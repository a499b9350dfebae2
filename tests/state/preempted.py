"""Trains until it is told to stop, then saves and exits. See test_preemption.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import numpy as np

import jaxmem
from tests import cluster


def main(directory: Path) -> None:
    if int(sys.argv[2]) > 1:
        cluster.initialize()
    first = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    if first:
        # The signal comes before the first call, as while a resumed run plans its step.
        print("starting", flush=True)
        time.sleep(3)
    for step in range(first, first + 10_000):
        time.sleep(0.01 * (1 + jax.process_index()))
        told = jaxmem.preempted(step)
        if step == first + 3:
            print("training", flush=True)
        if told:
            jaxmem.save(directory, {"w": np.ones(3), "step": step}, step=step, wait=True)
            print(f"stopped after {step}", flush=True)
            return


if __name__ == "__main__":
    main(Path(sys.argv[4]))
