"""Nothing of these tests is published where the user looks, and points are always affordable."""

from __future__ import annotations

import pytest

from jaxmem.monitor import duty, holders, track


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(track, "AT_POINTS", duty.Duty(share=1.0, most=1e9))
    # However much else the machine does: who holds an array is found, not given up.
    monkeypatch.setattr(holders, "_MOST_SECONDS", 60.0)
