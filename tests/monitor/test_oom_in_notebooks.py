"""A cell of a notebook that ran out of memory leaves none of its arrays alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxmem.monitor.oom import release
from jaxmem.runtime.step import Step
from tests.monitor import paper_limit

IPython = pytest.importorskip("IPython", reason="IPython comes with the extra `notebook`")

SETUP = """
import weakref
import jax, jax.numpy as jnp, jaxmem

refs = []

def watched(*arrays):
    refs.extend(map(weakref.ref, arrays))
    return arrays

def loss(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return (x**2).mean()

@jaxmem.fit(budget="64MiB", progress=False)
def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x), x.sum()

def train():
    w, x, other = watched(jnp.eye(64) * 1.0, jnp.ones((128, 64)), jnp.ones((77, 77)))
    return step(w, x)

def jitted():
    (x,) = watched(jnp.ones((5, 5)))
    return jnp.ones((2**22, 2**22)) + x

@jaxmem.track
def tracked():
    return jitted()
"""


@pytest.fixture
def shell(monkeypatch) -> Iterator[Any]:
    """A shell of IPython, as a notebook's kernel has one."""
    from IPython.core.interactiveshell import InteractiveShell

    def run(self: Step, call: Any) -> Any:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8388608 bytes."
        )

    made = InteractiveShell.instance()
    assert made.run_cell(SETUP).success
    monkeypatch.setattr(Step, "__call__", paper_limit.of_a_library(run))
    yield made
    made.reset()
    InteractiveShell.clear_instance()


def alive(shell: Any) -> list[Any]:
    gc.collect()
    return [ref() for ref in shell.user_ns["refs"]]


@pytest.mark.parametrize("cell", ["train()", "tracked()"])
def test_the_cell_that_failed_keeps_nothing(shell: Any, cell: str, capsys):
    result = shell.run_cell(cell)
    assert type(result.error_in_exec).__name__ == "DeviceOutOfMemoryError"
    shown = capsys.readouterr().out
    assert "memory ran out" in shown and "asked for" in shown
    assert alive(shell) == [None] * len(shell.user_ns["refs"]) != []


def test_others_errors_keep_nothing_once_they_are_explained(shell: Any, capsys):
    shell.run_cell("jitted()")
    assert alive(shell) != [None], "the traceback should have kept it until now"
    shell.run_cell("why = jaxmem.explain_oom()")
    assert shell.user_ns["why"].requested_bytes == 2**46
    assert alive(shell) == [None]
    assert "out-of-memory" not in capsys.readouterr().err


def test_what_a_cell_named_stays(shell: Any, capsys):
    shell.run_cell(
        "mine = jnp.ones(3); watched(mine); step(jnp.eye(64) * 1.0, jnp.ones((128, 64)))"
    )
    assert [x is not None for x in alive(shell)] == [True]


def test_the_shell_is_told_once(shell: Any):
    for _ in range(3):
        release.after_cell()
    callbacks = shell.events.callbacks["post_run_cell"]
    assert sum(function is release._after for function in callbacks) == 1
