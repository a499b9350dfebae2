"""Skips tests marked `gpu`, with the reason, where jax has no NVIDIA GPU."""

from __future__ import annotations

import jax
import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            pytest.skip(f"no NVIDIA GPU that jax can use: {error}")
