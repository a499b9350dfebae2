"""Pinned host memory that runs out in the middle of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def ran(room_bytes: int) -> dict:
    script = Path(__file__).parent / "pinned_out.py"
    done = subprocess.run(
        [sys.executable, str(script), str(room_bytes)],
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
        env={**os.environ, LIMIT: "8"},
    )
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["moments_in"] == ["pinned_host"]
    assert found["largest_difference"] < 1e-6
    return found


@pytest.mark.gpu
def test_with_room_for_a_few_copies_a_step_warns_and_is_completed():
    found = ran(2**28)
    assert found["error"] is None
    assert any("worked with nothing else under way" in text for text in found["warned"])


@pytest.mark.gpu
def test_without_room_a_step_says_so_and_is_completed_when_there_is():
    found = ran(0)
    assert "failed twice" in found["error"]
    assert "jaxmem doctor" in found["error"]
    assert "resumed_without_room" not in found
