"""Memory that really runs out, or a limit on paper where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "oom_on_gpu.py"
SECONDS = 280


def checks(tmp_path: Path, **environment: str) -> dict[str, bool]:
    """What ``oom_on_gpu.py`` found in a process of its own."""
    path = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert path.is_file(), done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(path.read_text())
    cases = ("eager", "jitted", "fitted")
    return {f"{case}: {name}": ok for case in cases for name, ok in found[case]["checks"].items()}


@pytest.mark.gpu
def test_the_true_holders_are_named_and_the_first_fix_works(tmp_path: Path):
    found = checks(tmp_path)
    assert len(found) > 12
    assert [name for name, ok in found.items() if not ok] == []


@pytest.mark.slow
def test_the_same_with_a_limit_on_paper(tmp_path: Path):
    found = checks(tmp_path, JAX_PLATFORMS="cpu")
    assert len(found) > 12
    assert [name for name, ok in found.items() if not ok] == []
