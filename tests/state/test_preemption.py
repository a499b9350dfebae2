"""SIGTERM: all processes save the same step and exit well; a second one ends them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests import cluster

SCRIPT = Path(__file__).parent / "preempted.py"


def begun(process) -> None:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "training\n":
            return
    raise AssertionError(f"{lines}\n{process.stderr.read()}")


@pytest.mark.parametrize("count, told", [(1, 0), (2, 0), (2, 1)])
def test_all_save_the_same_step_and_exit_when_one_is_told(tmp_path, count, told):
    with cluster.started(SCRIPT, str(tmp_path), count=count) as processes:
        for process in processes:
            begun(process)
        processes[told].send_signal(signal.SIGTERM)
        said = {}
        for process in processes:
            out, err = cluster.ended(process, timeout=60)
            assert process.returncode == 0, err
            said[out.splitlines()[-1]] = err
    steps = [int(p.name) for p in tmp_path.iterdir()]
    assert list(said) == [f"stopped after {steps[0]}"], said
    found = jaxmem.restore(tmp_path, {"w": np.zeros(3), "step": 0})
    assert found["step"] == steps[0]


def test_the_second_signal_ends_a_process(tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(
        "import os, signal, jaxmem, numpy\n"
        "assert not jaxmem.preempted(0)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert jaxmem.preempted(1) and jaxmem.preempted(numpy.int64(2))\n"
        "print('told', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('still here')\n"
    )
    with cluster.started(script, count=1) as (process,):
        out, _ = cluster.ended(process, timeout=60)
    assert out == "told\n"
    assert process.returncode == -signal.SIGTERM


def test_a_signal_before_the_first_call_of_a_resumed_run_is_heard(tmp_path):
    with cluster.started(SCRIPT, str(tmp_path), "100") as processes:
        for process in processes:
            assert process.stdout.readline() == "starting\n"
        processes[1].send_signal(signal.SIGTERM)
        for process in processes:
            out, err = cluster.ended(process, timeout=60)
            assert (process.returncode, out.splitlines()[-1:]) == (0, ["stopped after 100"]), err


@pytest.mark.parametrize("step", [True, "3", None, 1.0, np.float32(1), jnp.float32(1)])
def test_a_step_is_a_number(step):
    with pytest.raises(jaxmem.ArgumentError, match="step="):
        jaxmem.preempted(step)


def test_the_first_call_is_in_the_main_thread(monkeypatch):
    from jaxmem.state import preemption

    monkeypatch.setattr(preemption, "_listener", None)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            jaxmem.preempted(0)
        except jaxmem.ArgumentError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])
