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
