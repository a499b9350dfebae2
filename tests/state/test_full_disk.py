"""A disk that is really full: a small one in memory, which only the script under test sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# A mount of its own needs no rights where the kernel lets users have namespaces.
MOUNT = 'mount -t tmpfs -o size=24m small "$1" && shift && exec "$@"'
UNSHARE = ("unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT, "sh")


def on_small_disk(path: Path, *command: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    return subprocess.run(
        [*UNSHARE, str(path), *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("script, count", [("full_disk.py", 1), ("full_disk_processes.py", 2)])
def test_on_a_full_disk_the_checkpoint_before_stays_and_training_goes_on(tmp_path, script, count):
    """With what was needed and what was free; nothing half-written takes room from others."""
    try:
        probe = on_small_disk(tmp_path, "true")
    except FileNotFoundError as error:
        pytest.skip(f"no small disk can be made: {error}")
    if probe.returncode:
        pytest.skip(f"no small disk can be made: {probe.stderr.strip()}")
    ended = on_small_disk(tmp_path, sys.executable, str(HERE / script), str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("holds") == 3 * count
