"""Lines of a notebook's cell are named as Jupyter numbers it, not by a hash of its text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxmem

CELL = """def loss(x):
    return jnp.tanh(x @ x).sum()
"""


def test_a_line_of_a_cell():
    shell_of = pytest.importorskip("IPython.core.interactiveshell")
    shell = shell_of.InteractiveShell.instance()
    try:
        shell.push({"jnp": jnp})
        assert shell.run_cell(CELL, store_history=True).success
        number = shell.execution_count - 1
        report = jaxmem.analyze(jax.grad(shell.user_ns["loss"]), jnp.ones((8, 8)))
        lines = {b.source for b in report.buffers if b.source}
        assert lines
        assert lines <= {f"In[{number}]:2 (loss)"}
    finally:
        shell_of.InteractiveShell.clear_instance()
