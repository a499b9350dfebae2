"""Limits of pinned host memory: what is read, what is assumed, and what plans may use of it."""

from __future__ import annotations

import dataclasses
import platform
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import BudgetError
from jaxmem.runtime.host import host_limit, host_memory
from jaxmem.targets import Target
from jaxmem.targets.pinned import LIMIT_VARIABLE, WSL_BYTES, pinned

GIB = 2**30


def device(*kinds: str, platform: str = "gpu"):
    memories = [SimpleNamespace(kind=kind) for kind in ("device", *kinds)]
    return SimpleNamespace(
        addressable_memories=lambda: memories, platform=platform, device_kind="NVIDIA T4"
    )


@pytest.fixture(autouse=True)
def plain_linux(monkeypatch):
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")


def test_xla_allows_64_gib_and_never_more_than_the_host_has():
    assert pinned(device("pinned_host"), 512 * GIB).limit_bytes == 64 * GIB
    assert "XLA's default" in pinned(device("pinned_host"), 512 * GIB).source
    assert pinned(device("pinned_host"), 32 * GIB).limit_bytes == 32 * GIB


def test_the_variable_raises_and_lowers_it(monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "200")
    found = pinned(device("pinned_host"), 512 * GIB)
    assert found.limit_bytes == 200 * GIB and LIMIT_VARIABLE in found.source
    assert pinned(device("pinned_host"), 100 * GIB).limit_bytes == 100 * GIB
    monkeypatch.setenv(LIMIT_VARIABLE, "8")
    assert pinned(device("pinned_host"), 512 * GIB).limit_bytes == 8 * GIB
    monkeypatch.setenv(LIMIT_VARIABLE, "96.5")  # XLA reads whole numbers, and keeps its default
    assert pinned(device("pinned_host"), 512 * GIB).limit_bytes == 64 * GIB


def test_windows_leaves_little(monkeypatch):
    monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    found = pinned(device("pinned_host"), 64 * GIB)
    assert found.limit_bytes == WSL_BYTES and "WSL" in found.source


def test_a_device_without_pinned_memory_says_so():
    assert pinned(device(), 64 * GIB) == (0, "pinned host memory: NVIDIA T4 has none")


def test_a_processor_has_no_other_memory():
    assert pinned(jax.devices("cpu")[0], 64 * GIB).limit_bytes == 64 * GIB
    assert Target("cpu").pinned_host_bytes == Target("cpu").host_bytes


def test_plans_use_no_more_than_can_be_pinned():
    eight = Target("8xh200")
    assert eight.pinned_host_bytes == 64 * GIB < 0.8 * eight.host_bytes
    assert host_memory(eight, None) == host_limit(eight) == 8 * GIB
    raised = dataclasses.replace(eight, pinned_host_bytes=eight.host_bytes)
    assert host_memory(raised, None) == int(0.8 * eight.host_bytes) // 8
    assert host_memory(dataclasses.replace(eight, pinned_host_bytes=0), None) == 0
    assert host_memory(eight, 123) == 123


def test_asking_for_more_than_can_be_pinned_is_refused_before_planning():
    fitted = jaxmem.fit(
        lambda x: x * 2, budget="1GiB", host_budget="100GiB", target="h200", progress=False
    )
    with pytest.raises(BudgetError, match=rf"pinned host memory \({LIMIT_VARIABLE} raises it\)"):
        fitted.plan(jax.ShapeDtypeStruct((8,), jnp.float32))
