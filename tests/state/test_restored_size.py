"""Restoring goes leaf by leaf: host memory never holds a state twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "restored_size.py"


def told(directory: Path, what: str, devices: int = 1) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(SCRIPT.parent.parent.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_host_memory_never_holds_a_state_twice(tmp_path):
    """Of 3 GiB: beside them about 1 GiB on the way to devices or pinned memory, 2 as NumPy's."""
    told(tmp_path, "save")
    for what, devices in (("device", 1), ("device", 8), ("pinned_host", 2), ("numpy", 1)):
        beside = float(told(tmp_path, what, devices))
        assert beside < (0.9 if what == "numpy" else 0.5), (what, devices, beside)
