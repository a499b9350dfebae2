"""Steps over several devices: what a fitted step does there is what jit does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sharded_steps import CHECKS


def test_over_four_devices():
    """All checks in one process with four CPU devices; what fails tells its traceback."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    script = Path(__file__).with_name("sharded_steps.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # As in the fixture `quick_code`.
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lacking = set(CHECKS) - set(done.stdout.splitlines())
    assert not lacking, (sorted(lacking), done.stderr[-4000:])
