"""XLA may pin most of a host's memory, unless somebody has said how much."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxmem import _before_jax
from jaxmem._before_jax import LIMIT_VARIABLE

GIB = 2**30


@pytest.fixture
def host(monkeypatch):
    """A process before JAX has started, on a host of so many bytes."""
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(_before_jax, "raised", False)
    monkeypatch.setattr(_before_jax, "_has_started", lambda: False)
    return lambda nbytes: monkeypatch.setattr(_before_jax, "host_bytes", lambda: nbytes)


def limit() -> str | None:
    _before_jax.raise_limit()
    return _before_jax.os.environ.get(LIMIT_VARIABLE)


def test_a_large_host_may_pin_four_fifths(host):
    host(1000 * GIB)
    assert limit() == "800" and _before_jax.raised


@pytest.mark.parametrize("gib", [8, 64, 79])
def test_a_host_that_has_no_more_than_xla_allows_is_left_alone(host, gib: int):
    host(gib * GIB)
    assert limit() is None and not _before_jax.raised


def test_what_the_user_said_stays(host, monkeypatch):
    host(1000 * GIB)
    monkeypatch.setenv(LIMIT_VARIABLE, "32")
    assert limit() == "32" and not _before_jax.raised


def test_nothing_is_said_that_jax_would_not_read(host, monkeypatch):
    host(1000 * GIB)
    monkeypatch.setattr(_before_jax, "_has_started", lambda: True)
    assert limit() is None and not _before_jax.raised


def test_an_import_does_not_fail_for_it(host, monkeypatch):
    def unreadable():
        raise OSError("no such file")

    monkeypatch.setattr(_before_jax, "host_bytes", unreadable)
    assert limit() is None and not _before_jax.raised


def test_only_linux_has_such_a_pool(host, monkeypatch):
    host(1000 * GIB)
    monkeypatch.setattr(_before_jax.sys, "platform", "win32")
    assert limit() is None


@pytest.mark.parametrize("start", [False, True])
def test_a_backend_that_has_started_is_seen(start: bool):
    said = "import jax; " + ("jax.devices(); " if start else "")
    said += "from jaxmem import _before_jax; print(_before_jax._has_started())"
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == str(start)
