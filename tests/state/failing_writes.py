"""Saves where the system refuses large files: prints the error. See test_checkpoint_faults.py."""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem.errors import CheckpointError


def main(directory: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    small, large = {"w": jnp.ones(3)}, {"w": np.random.default_rng(0).random(2**20)}
    jaxmem.save(directory, small, step=1, keep=1, wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    saving = jaxmem.save(directory, large, step=2, keep=1)
    for _ in range(2):  # Whoever waits is told, each time.
        try:
            saving.wait()
        except CheckpointError as error:
            print(error)
        else:
            raise AssertionError("it was written")
    assert (jaxmem.restore(directory, small)["w"] == 1).all()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    jaxmem.save(directory, large, step=3, keep=1, wait=True)
    assert (jaxmem.restore(directory, large)["w"] == large["w"]).all()
    left = [path.name for path in directory.iterdir() if path.is_dir()]
    assert left == ["3"], left


if __name__ == "__main__":
    main(Path(sys.argv[1]))
