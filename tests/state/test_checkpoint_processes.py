"""Checkpoints of several real processes, which reach each other over loopback."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmem
from tests import cluster
from tests.state.lost_process import W as LOST_W
from tests.state.several_processes import W

HERE = Path(__file__).parent


def test_several_processes_save_and_restore_as_one_does(tmp_path):
    """What one saved two restore, and the other way round; errors are the same on both."""
    jaxmem.save(tmp_path / "one", {str(n): W for n in range(7)}, step=0, wait=True)
    outs = cluster.run(HERE / "several_processes.py", str(tmp_path))
    assert [out.count("holds") for out in outs] == [7, 7]
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


@pytest.mark.parametrize(
    "lost, signal, when",
    [
        (1, "SIGKILL", "before"),
        pytest.param(1, "SIGSTOP", "before", marks=pytest.mark.wide),
        (1, "SIGKILL", "writing"),
        pytest.param(1, "SIGSTOP", "restoring", marks=pytest.mark.wide),
        (0, "SIGSTOP", "before"),
        pytest.param(0, "SIGKILL", "before", marks=pytest.mark.wide),
    ],
)
def test_a_lost_process_is_named_and_the_checkpoint_before_it_is_there(
    tmp_path, lost, signal, when
):
    runs = tmp_path / "runs"
    with cluster.started(HERE / "lost_process.py", str(runs), str(lost), signal, when) as processes:
        out, err = cluster.ended(processes[1 - lost], timeout=60)
    if (lost, signal) == (0, "SIGKILL"):
        # The coordinator was in it: JAX may end those that are left before they can say anything.
        assert "ProcessError" in out or processes[1].returncode != 0, err
    else:
        assert out.startswith("ProcessError: "), (out, err)
        assert f"process {lost}" in out, out
    assert [p.name for p in sorted(runs.iterdir()) if p.name.isdecimal()] == ["0"]
    like = {"w": np.zeros_like(LOST_W), "step": 0}
    np.testing.assert_array_equal(jaxmem.restore(runs, like)["w"], LOST_W)
    jaxmem.save(runs, {"w": LOST_W + 5, "step": 5}, step=5, wait=True)
    assert sorted(p.name for p in runs.iterdir()) == ["0", "5"], "leftovers"
    np.testing.assert_array_equal(jaxmem.restore(runs, like)["w"], LOST_W + 5)
