"""``fit`` over devices of several real processes, which reach each other over loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import cluster

SCRIPT = Path(__file__).parent / "several_planning.py"


@pytest.mark.wide
def test_two_processes_plan_alike_and_compute_what_one_device_does(tmp_path):
    outs = cluster.run(SCRIPT, str(tmp_path), devices=4, timeout=300)
    assert [out.count("holds") for out in outs] == [5, 5]


@pytest.mark.slow
def test_two_processes_compute_what_one_device_does_under_every_rule(tmp_path):
    outs = cluster.run(SCRIPT, str(tmp_path), "rules", devices=4, timeout=300)
    assert [out.count("holds") for out in outs] == [1, 1]


def test_processes_without_devices_of_a_mesh_or_that_are_stopped_are_named(tmp_path):
    """The first at once, the others after a timeout, by all that wait for them."""
    script = tmp_path / "some.py"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "import jax, numpy as np, jaxmem\n"
        "from jax.sharding import Mesh\n"
        "from jaxmem.runtime import agreed\n"
        "from tests import cluster\n"
        "me = cluster.initialize()\n"
        "agreed._ARRIVE_SECONDS = 6.0\n"
        "stopped = pathlib.Path(sys.argv[4])\n"
        "devices = jax.devices()\n"  # All make themselves known to all.
        "if me == 2:\n"
        "    stopped.write_text(str(os.getpid()))\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    sys.exit()\n"
        "for number in (2, 3):\n"
        "    mesh = Mesh(np.array(devices[:number]), ('data',))\n"
        "    step = jaxmem.fit(lambda w: w * 2, mesh=mesh, shard='zero3', budget='1GiB')\n"
        "    try:\n"
        "        step(np.ones(6, np.float32))\n"
        "    except jaxmem.ProcessError as error:\n"
        "        assert error.processes == (2,)\n"
        "        print(error)\n"
        "if me == 0:\n"
        "    os.kill(int(stopped.read_text()), signal.SIGCONT)\n"
    )
    outs = cluster.run(script, str(tmp_path / "stopped"), count=3, devices=1)
    for said in (
        "those of process 2. jaxmem plans",
        "process 2 of 3 did not come within 6 s to plan",
    ):
        assert [said in out for out in outs] == [True, True, False]
