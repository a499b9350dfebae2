"""Compiling for an absent GPU leaves the process's own JAX as it was."""

import os
import subprocess
import sys

import jax
import pytest

from jaxmem.errors import MissingPluginError, TargetError
from jaxmem.targets import Target, topology

SCRIPT = """
import os, sys
import jax, jax.numpy as jnp
before = dict(os.environ)
from jaxmem.targets import compile_for

def state():
    names = [d.device_kind for d in jax.devices()], jax.default_backend(), jax.device_count()
    return *names, float(jax.jit(lambda x: (x @ x).sum())(jnp.full((8, 8), 2.0)))

used_before = sys.argv[1] == "used"
first = state() if used_before else None
x = jax.ShapeDtypeStruct((64, 64), "bfloat16")
compiled = compile_for("h200", lambda x: jnp.tanh(x @ x), [x])
assert not compiled.runs_here
assert compiled.memory.argument_bytes == 64 * 64 * 2
second = state()
assert first in (None, second), (first, second)
assert second == (["cpu"] * second[2], "cpu", second[2], 2048.0), second
assert dict(os.environ) == before
import jax.extend
jax.extend.backend.clear_backends()
assert state() == second
print("same", second[2])
"""


def run(used: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, used],
        env={**kept, **env}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("used", "env", "devices"),
    [
        ("fresh", {}, 1),
        ("used", {}, 1),
        ("fresh", {"JAX_PLATFORMS": "cpu"}, 1),
        ("used", {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, 4),
    ],
)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="stands for a machine without a GPU")
def test_backend_results_and_environment_are_the_same_before_and_after(used, env, devices):
    done = run(used, **env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same", str(devices)]
    if used == "fresh":
        assert "Traceback" not in done.stderr  # JAX's failed search for CUDA libraries


def test_devices_of_every_host():
    devices = topology.devices(Target("2x4xh100"))
    assert len(devices) == 8
    assert {d.platform for d in devices} == {"gpu"}
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4
    assert topology.devices(Target("2x4xh100")) is devices


def test_a_cpu_is_not_compiled_for_from_afar():
    with pytest.raises(TargetError, match=r"cpu cannot be compiled for from afar.*h200"):
        topology.devices(Target("cpu"))


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "the wheels with XLA's GPU compiler are not installed"),
        ({"jax-cuda13-pjrt": "?"}, "jax-cuda13-pjrt is installed, jax-cuda13-plugin is not"),
        (
            {"jax-cuda13-plugin": "0.1.0", "jax-cuda13-pjrt": "0.1.0"},
            "found jax-cuda13-plugin 0.1.0, jax-cuda13-pjrt 0.1.0, but jaxlib is",
        ),
    ],
)
def test_missing_wheels_are_named_with_the_command_that_installs_them(
    monkeypatch, versions, message
):
    monkeypatch.setattr(topology, "wheel_versions", lambda: versions)
    with pytest.raises(MissingPluginError, match=message) as caught:
        topology.check_wheels()
    version = topology.jaxlib_version
    assert (
        f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} "
        '"nvidia-cuda-nvcc==13.*" "nvidia-nvvm==13.*"'
    ) in str(caught.value)


def test_installed_wheels_pass_and_their_versions_are_jaxlibs():
    topology.check_wheels()
    assert set(topology.wheel_versions().values()) == {topology.jaxlib_version}


@pytest.mark.parametrize(
    "text",
    [
        "UNAVAILABLE: No PTX compilation provider is available. Neither ptxas/nvlink nor ...",
        "INTERNAL: libdevice not found at ./libdevice.10.bc",
    ],
)
def test_a_missing_assembler_is_explained(text):
    with pytest.raises(MissingPluginError, match=r"no ptxas or no libdevice.*nvidia-cuda-nvcc"):
        topology.explain_missing_toolchain(RuntimeError(text))


def test_other_compile_errors_are_left_alone():
    topology.explain_missing_toolchain(RuntimeError("RESOURCE_EXHAUSTED: out of memory"))


def test_the_version_check_is_only_left_out_while_registering(monkeypatch):
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    monkeypatch.delenv(name, raising=False)
    with topology._skip_version_check(when=True):
        assert os.environ[name] == "1"
    assert name not in os.environ
    monkeypatch.setenv(name, "mine")
    with pytest.raises(ZeroDivisionError), topology._skip_version_check(when=True):
        _ = 1 / 0
    assert os.environ[name] == "mine"
