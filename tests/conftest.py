"""Fixtures of several test files; skips tests marked `gpu` where jax has no NVIDIA GPU."""

from __future__ import annotations

import gc
import os
import signal
import zlib

import jax
import pytest

import jaxmem
from tests.fitted_steps import DEEP_ARGS, DEEP_BUDGET, deep, optimising_less


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "run one third of the tests; each is in the same one, whatever else is collected"
    parser.addoption("--third", type=int, choices=(1, 2, 3), help=said)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    third = config.getoption("third")
    if third is None:
        return
    parts: list[list[pytest.Item]] = [[], [], []]
    for item in items:
        parts[zlib.crc32(item.nodeid.encode()) % 3].append(item)
    items[:] = parts.pop(third - 1)
    config.hook.pytest_deselected(items=[item for part in parts for item in part])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            pytest.skip(f"no NVIDIA GPU that jax can use: {error}")


def pytest_configure() -> None:
    """Ctrl-C is tested; a shell that starts tests in the background has them ignore it.

    Tables are as wide as the terminal: whatever it is, tests have the same one.
    """
    os.environ["COLUMNS"] = "100"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays: looking for garbage in it took 5% of all tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def quick_code(request: pytest.FixtureRequest):
    """Compiles in half the time, except in files marked `default_code`.

    XLA's passes, schedule and buffers are the same (tests/targets/test_compiling.py holds that);
    only LLVM optimises less.
    """
    with optimising_less(request.node.get_closest_marker("default_code") is None):
        yield


@pytest.fixture(scope="session")
def planned_deep():
    """``deep`` fitted into less than it keeps as written; planned once for all tests.

    Its code is that of what these tests compile beside it, whichever of them is the first.
    """
    fitted = jaxmem.fit(deep, budget=DEEP_BUDGET, progress=False)
    with optimising_less():
        assert fitted.plan(*DEEP_ARGS).recomputed()
    return fitted
