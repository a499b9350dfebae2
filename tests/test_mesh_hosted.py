"""``fit(host=...)`` over a mesh: what waits in host memory stays split over the devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import jaxmem
from tests import cluster
from tests.hosted_mesh_steps import ALONE, TOGETHER

SCRIPT = Path(__file__).parent / "hosted_mesh_steps.py"
FEW = ["zero1", "wrong uses"]


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(FEW, id="few", marks=pytest.mark.wide),
        pytest.param([name for name in ALONE if name not in FEW], id="all", marks=pytest.mark.slow),
    ],
)
def test_steps_over_eight_devices_compute_what_one_does(checks, tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "alone", str(tmp_path), *checks],
        env={**os.environ, "XLA_FLAGS": flags.strip(), "PYTHONPATH": str(SCRIPT.parent.parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert sorted(run.stdout.splitlines()) == sorted(checks), run.stderr


@pytest.mark.slow
def test_two_processes_copy_their_own_parts_and_compute_what_one_device_does(tmp_path):
    script = tmp_path / "together.py"
    script.write_text(
        "import sys\n"
        "from tests import hosted_mesh_steps\n"
        "sys.argv = [sys.argv[0], 'together', *sys.argv[1:]]\n"
        "hosted_mesh_steps.main()\n"
    )
    outs = cluster.run(script, str(tmp_path), devices=4, timeout=580)
    lines = [[line for line in out.splitlines() if line in TOGETHER] for out in outs]
    assert lines == [[*TOGETHER]] * 2  # Gloo says more.


def test_optimizer_state_on_the_host_leaves_the_devices_without_it():
    """By the compiler's figures, for GPUs that are not there: arguments, and all of it."""
    tx, width = optax.adam(1e-3), 1024

    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    def first_state():
        params = [jnp.zeros((width, width))] * 4
        return {"params": params, "opt": tx.init(params)}

    state = jax.eval_shape(first_state)
    x = jax.ShapeDtypeStruct((1024, width), jnp.float32)
    part = 4 * width * width * 4 / 2
    settings = {"mesh": AbstractMesh((2,), ("data",)), "shard": "zero3", "target": "2xh200"}
    plans = [
        jaxmem.fit(step, donate_argnums=0, progress=False, host=host, **settings).plan(state, x)
        for host in (None, "*'opt'*")
    ]
    batch = 1024 * width * 4 / 2
    for plan, parts in zip(plans, (3, 1), strict=True):
        assert parts * part + batch <= plan.argument_bytes <= 1.01 * (parts * part + batch)
    assert plans[1].host_bytes >= 2 * part
    assert plans[1].streamed.fetched_bytes == 2 * part
