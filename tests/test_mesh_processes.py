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


def test_a_mesh_without_devices_of_some_processes_is_refused_at_once(tmp_path):
    script = tmp_path / "some.py"
    script.write_text(
        "import jax, numpy as np, jaxmem\n"
        "from jax.sharding import Mesh\n"
        "from tests import cluster\n"
        "me = cluster.initialize()\n"
        "mesh = Mesh(np.array([d for d in jax.devices() if d.process_index < 2]), ('data',))\n"
        "step = jaxmem.fit(lambda w: w * 2, mesh=mesh, shard='zero3', budget='1GiB')\n"
        "try:\n"
        "    me == 2 or step(np.ones(8, np.float32))\n"
        "except jaxmem.ProcessError as error:\n"
        "    assert error.processes == (2,)\n"
        "    print(error)\n"
    )
    outs = cluster.run(script, count=3, devices=1)
    assert ["those of process 2. jaxmem plans" in out for out in outs] == [True, True, False]
