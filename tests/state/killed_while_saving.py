"""Trains and saves until it is killed, and goes on; run by test_checkpoint_faults.py.

Each value is a function of the step, so a state that mixes two steps, or lost something, is seen.
Prints the step it starts from, then every number of which the checkpoint is complete.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem.errors import CheckpointError

NUMBER, SIZE = 6, 20_000


def state_at(step: int) -> dict:
    return {"step": step, **{f"w{n}": jnp.full(SIZE, float(step * 10 + n)) for n in range(NUMBER)}}


def main(directory: Path, stop: bool) -> None:
    step = -1
    try:
        state = jaxmem.restore(directory, state_at(0))
    except CheckpointError as error:
        assert "holds no complete checkpoint" in str(error), error
    else:
        step = state["step"]
        for name, value in state_at(step).items():
            np.testing.assert_array_equal(value, state[name])
    print(json.dumps({"step": step}), flush=True)
    for number in itertools.count(step + 1):
        saving = jaxmem.save(directory, state_at(number), step=number, keep=2)
        if number % 3 == 0 or stop:
            saving.wait()
            step = number
        print(json.dumps({"complete": step}), flush=True)
        if stop:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--stop" in sys.argv)
