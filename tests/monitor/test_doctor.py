"""The doctor says what works, lists what does not with its fix, and never raises."""

import dataclasses

import jax
import pytest

from jaxmem import _compat
from jaxmem.errors import MissingPluginError, TargetError
from jaxmem.monitor import doctor
from jaxmem.targets import topology


def test_this_machine_is_well():
    found = doctor.diagnose()
    assert found.problems == []
    assert found.backend == jax.default_backend()
    assert len(found.devices) == jax.local_device_count()
    assert 2**28 < found.host_bytes and 2**28 < found.device_bytes
    assert found.pinned_host_works and "pinned_host" in found.memory_kinds
    assert set(found.wheels.values()) == {found.jaxlib}
    assert found.absent_gpu_seconds is not None and 0 < found.absent_gpu_seconds < 60
    text = str(found)
    assert f"{found.jax}, {found.jaxlib}" in text and text.endswith("no problems found")
    assert dataclasses.asdict(found)["wheels"] == found.wheels


def with_compile_error(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(doctor, "compile_for", fail)
    return doctor.diagnose()


def test_missing_wheels_are_a_note_and_half_installed_ones_a_problem(monkeypatch):
    missing = MissingPluginError("cannot compile for a GPU: ... pip install --no-deps ...")
    monkeypatch.setattr(topology, "wheel_versions", dict)
    found = with_compile_error(monkeypatch, missing)
    assert found.absent_gpu_seconds is None and found.problems == []
    assert [note.fix for note in found.notes if "absent" in note.what] == [str(missing)]
    monkeypatch.setattr(topology, "wheel_versions", lambda: {"jax-cuda13-pjrt": "0.1"})
    found = with_compile_error(monkeypatch, missing)
    assert [problem.fix for problem in found.problems] == [str(missing)]
    assert "problem: planning for absent GPUs does not work\n    fix: cannot" in str(found)


def test_a_failing_compiler_is_a_problem(monkeypatch):
    found = with_compile_error(monkeypatch, RuntimeError("INTERNAL: broken\nmore"))
    assert [p.what for p in found.problems] == ["compiling for a GPU fails: INTERNAL: broken"]
    assert "pip install" in found.problems[0].fix


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize\nx"), AssertionError()])
def test_a_backend_that_does_not_start_is_a_problem(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(topology, "initialize_default_backend", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    found = doctor.diagnose()
    assert found.backend == "" and found.devices == ()
    assert "JAX does not start with JAX_PLATFORMS=cuda: " in found.problems[0].what
    assert found.problems[0].fix == "unset JAX_PLATFORMS"
    assert "does not start" in str(found)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="stands for a GPU that JAX misses")
def test_a_gpu_that_jax_does_not_use_is_a_problem(monkeypatch):
    monkeypatch.setattr(_compat, "has_nvidia_gpu", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert doctor.diagnose().problems[0].fix == "unset JAX_PLATFORMS (it is cpu)"
    monkeypatch.delenv("JAX_PLATFORMS")
    assert doctor.diagnose().problems[0].fix == 'pip install -U "jax[cuda13]"'


def test_versions_known_to_be_wrong_are_problems(monkeypatch):
    monkeypatch.setattr(doctor, "jaxlib_version", "0.11.0")
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 0))
    whats = [problem.what for problem in doctor.diagnose().problems]
    assert "is older than 0.10.2" in whats[0] and "openxla/xla#46231" in whats[1]


def test_an_accelerator_jaxmem_does_not_know_is_a_problem(monkeypatch):
    def fail():
        raise TargetError("the default JAX device is a tpu")

    monkeypatch.setattr(doctor.local, "default_device", fail)
    assert doctor.diagnose().problems[0].what == "the default JAX device is a tpu"


def test_gpu_limits_are_notes(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    found = doctor.Diagnosis(device_bytes=60 * 2**30, host_bytes=512 * 2**30)
    doctor._check_gpu_limits(found)
    fixes = [note.fix for note in found.notes]
    assert fixes == ["XLA_PYTHON_CLIENT_MEM_FRACTION=.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=384"]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    quiet = doctor.Diagnosis(host_bytes=32 * 2**30)
    doctor._check_gpu_limits(quiet)
    assert quiet.notes == []
