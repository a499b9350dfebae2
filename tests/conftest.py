"""Fixtures of several test files; skips tests marked `gpu` where jax has no NVIDIA GPU."""

from __future__ import annotations

import jax
import pytest

import jaxmem
from tests.fitted_steps import DEEP_ARGS, DEEP_BUDGET, deep


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            pytest.skip(f"no NVIDIA GPU that jax can use: {error}")


@pytest.fixture(scope="module")
def planned_deep():
    """``deep`` fitted into less than it keeps as written; planned once for all tests."""
    fitted = jaxmem.fit(deep, budget=DEEP_BUDGET, progress=False)
    assert fitted.plan(*DEEP_ARGS).recomputed()
    return fitted
