"""Checkpoints of several real processes, which reach each other over loopback."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmem
from tests import cluster
from tests.state.several_processes import W

HERE = Path(__file__).parent


def test_several_processes_save_and_restore_as_one_does(tmp_path):
    """What one saved two restore, and the other way round; errors are the same on both."""
    jaxmem.save(tmp_path / "one", {str(n): W for n in range(7)}, step=0, wait=True)
    outs = cluster.run(HERE / "several_processes.py", str(tmp_path))
    assert [out.count("holds") for out in outs] == [5, 5]
    like = {
        "split": [np.zeros_like(W)] * 7,
        "key": jax.random.key_data(jax.random.key(0)),
        "empty": np.zeros((0, 4), np.float32),
        "alone": np.zeros(5, np.float32),
        "weak": np.zeros((), np.float32),
        "numpy": np.zeros(3),
        "scalar": np.float32(0),
        "epoch": 0,
        "name": "",
    }
    found = jaxmem.restore(tmp_path / "several", like)
    for n, array in enumerate(found["split"]):
        np.testing.assert_array_equal(array, W + n)
    assert found["epoch"] == 3
    np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(7)))


@pytest.mark.parametrize("timeout", [0, -1.0, True, "10", None])
def test_a_timeout_is_a_positive_number(tmp_path, timeout):
    with pytest.raises(jaxmem.ArgumentError, match="timeout="):
        jaxmem.save(tmp_path, {"w": np.ones(3)}, step=0, timeout=timeout)
    with pytest.raises(jaxmem.ArgumentError, match="timeout="):
        jaxmem.restore(tmp_path, {"w": np.ones(3)}, timeout=timeout)
