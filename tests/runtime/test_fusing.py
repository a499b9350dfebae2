"""Fusion reports: what is fused, what is not, and how often."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import ReportError


def held(x):
    """Two element-wise kernels that a barrier keeps apart."""
    y = jax.lax.optimization_barrier(jnp.sin(x))
    return jnp.cos(y)


def test_what_a_fusion_would_remove_is_found():
    report = jaxmem.analyze(held, jnp.ones((512, 64)), target="h100")
    (found,) = report.fusions().unfused
    line = held.__code__.co_firstlineno + 2
    assert found.source == f"test_fusing.py:{line} (held)"
    assert found.readers == (f"test_fusing.py:{line + 1} (held)",)
    assert (found.nbytes, found.reads, found.times) == (4 * 512 * 64, 1, 1)
    assert found.traffic_bytes == 2 * found.nbytes
    assert not found.at_peak, "it waits in the memory of the result"


def test_what_is_one_kernel_is_not_in_the_list():
    report = jaxmem.analyze(lambda x: jnp.cos(jnp.sin(x)), jnp.ones((512, 64)), target="h100")
    fusions = report.fusions()
    assert fusions.unfused == ()
    (one,) = fusions.fusions
    assert one.saved_bytes == one.read_bytes == one.written_bytes == 4 * 512 * 64
    assert {"sin", "cos"} <= set(one.primitives)


def test_matrix_products_are_no_element_wise_work():
    report = jaxmem.analyze(lambda x: jnp.sin(x @ x) @ x, jnp.ones((128, 128)), target="h100")
    assert report.fusions().unfused == ()


def test_loops_count_their_turns():
    def step(x):
        return jax.lax.scan(lambda x, _: (held(x), None), x, length=5)[0]

    fusions = jaxmem.analyze(step, jnp.ones((512, 64)), target="h100").fusions()
    assert {u.times for u in fusions.unfused if u.nbytes > 1000} == {5}


def test_it_is_shown_and_written(tmp_path):
    fusions = jaxmem.analyze(held, jnp.ones((512, 64)), target="h100").fusions()
    text = str(fusions)
    assert "what a fusion would remove" in text
    assert "sin" in text
    assert "256.0KiB" in text, "written and read"
    assert "<script" not in fusions._repr_html_()
    assert json.loads(fusions.to_json())["unfused"][0]["primitive"] == "sin"
    for table in ("unfused", "fusions"):
        fusions.to_csv(tmp_path / f"{table}.csv", table)
        assert (tmp_path / f"{table}.csv").read_text().startswith("name,")
    with pytest.raises(ReportError, match="no table is called 'x': there are unfused, fusions"):
        fusions.to_csv(tmp_path / "x.csv", "x")
