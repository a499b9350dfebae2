"""``fit(mesh=..., shard=...)``: eight CPU devices take the place of one; all else stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.mesh_plans import CHECKS as PLANS
from tests.mesh_steps import CHECKS

ROOT = Path(__file__).parent.parent
LONG = {"named rules", "tensor parallel", "scanned", "unrolled", "linen", "nnx", "other uses"}
SHORT = [name for name in CHECKS if name not in LONG]


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(["named rules", *SHORT], id="default"),
        *(
            pytest.param([name], id=name, marks=pytest.mark.slow)
            for name in CHECKS
            if name in LONG - {"named rules"}
        ),
    ],
)
def test_steps_over_eight_devices_compute_what_one_does(checks):
    held("mesh_steps.py", checks)


@pytest.mark.parametrize(
    "check",
    [
        "bytes on paper",
        "split as compiled",
        "absent and real",
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*PLANS][3:]),
    ],
)
def test_plans_over_eight_devices(check):
    held("mesh_plans.py", [check])


def held(script: str, checks: list[str]) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / script), *checks],
        env={**os.environ, "XLA_FLAGS": flags.strip(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert sorted(run.stdout.splitlines()) == sorted(checks), run.stderr


def descend(w, x):
    return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


W, X = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"shard": "zero3"}, "Give a mesh as well"),
        ({"mesh": (8,)}, "Give a jax.sharding.Mesh"),
        ({"mesh": AbstractMesh((8,), ("data",))}, "which has no devices. Name"),
    ],
)
def test_what_is_no_mesh_is_refused(options, said):
    with pytest.raises(jaxmem.ArgumentError, match=said):
        jaxmem.fit(descend, **options)


def test_a_target_has_as_many_devices_as_the_mesh():
    with pytest.raises(jaxmem.errors.TargetError, match="has 8 devices, and target=4xh100 has 4"):
        jaxmem.fit(descend, mesh=AbstractMesh((8,), ("data",)), target="4xh100")


def test_a_step_over_an_absent_mesh_plans_and_does_not_run():
    fitted = jaxmem.fit(
        descend,
        mesh=AbstractMesh((8,), ("data",)),
        shard={"*": None},
        target="8xh100",
        donate_argnums=0,
        progress=False,
    )
    plan = fitted.plan(W, X)
    assert plan.mesh == (("data", 8),)
    assert [path for path, _ in plan.split] == ["x"]
    with pytest.raises(jaxmem.ArgumentError, match="no devices to run on"):
        fitted(W, X)


def test_typed_shapes_over_an_absent_mesh_are_refused():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rows = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("data")))
    fitted = jaxmem.fit(descend, mesh=mesh, target="8xh100", progress=False)
    with pytest.raises(jaxmem.ArgumentError, match="Explicit axes of an AbstractMesh"):
        fitted.plan(W, rows)
    assert jaxmem.fit(descend, mesh=mesh, shard={"*": None}, target="8xh100").plan(W, rows)
