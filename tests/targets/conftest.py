"""Measurements of tests go to directories of their own, and are forgotten again."""

from __future__ import annotations

import pytest

from jaxmem.targets import measured


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An own cache directory; what is known in memory is set aside."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "_known", measured._Known())
    return tmp_path / "cache"
