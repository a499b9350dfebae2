"""The doctor says what works, lists what does not with its fix, and never raises."""

import dataclasses

import jax
import pytest

from jaxmem import _compat
from jaxmem.errors import MissingPluginError, TargetError
from jaxmem.monitor import doctor
from jaxmem.targets import Target, measured, topology
from tests.targets.made import MADE


def test_this_machine_is_well():
    found = doctor.diagnose()
    assert found.problems == []
    assert found.backend == jax.default_backend()
    assert len(found.devices) == jax.local_device_count()
    assert 2**28 < found.host_bytes and 2**28 < found.device_bytes
    assert found.pinned_host_works and "pinned_host" in found.memory_kinds
    assert 0 < found.pinned_host_bytes <= found.host_bytes
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

    monkeypatch.setattr(doctor.local, "assumed_device", fail)
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


def with_rates(monkeypatch, known: measured.Found) -> doctor.Diagnosis:
    """What is said of an H200 with these rates."""
    monkeypatch.setattr(doctor.local, "found_rates", lambda *_, **__: known)
    found = doctor.Diagnosis(backend="gpu")
    target = Target("h200")
    fields = {f.name: getattr(target, f.name) for f in dataclasses.fields(Target)}
    doctor._check_rates(found, fields, False)
    return found


def test_measured_rates_are_shown_with_their_age_and_what_is_not_measured(monkeypatch):
    found = with_rates(monkeypatch, measured.Found("cached", MADE, path="/cache/rates-1.json"))
    assert found.notes == []
    lines = str(found).splitlines()
    start = lines.index(
        "rates          measured 2026-11-22T00:30Z in 2.50s, cached in /cache/rates-1.json"
    )
    shown = [line.strip() for line in lines[start + 1 : start + 12]]
    assert "bfloat16         600 TFLOP/s" in shown
    assert "float8           1979 TFLOP/s, assumed" in shown
    assert "device memory    4000 GB/s" in shown
    assert "both ways, each  46 GB/s" in shown
    assert "device to device 450 GB/s, assumed" in shown
    assert dataclasses.asdict(found)["rates"]["h2d_bytes_per_second"] == 54e9
    assert set(found.rates_assumed) == {"float16", "float64", "float8", "int8"} | {
        "d2d_bytes_per_second"
    }


def test_a_rate_that_no_idle_device_has_is_noted(monkeypatch):
    busy = dataclasses.replace(MADE, flops={"bfloat16": 100e12}, h2d_bytes_per_second=3e9)
    whats = [note.what for note in with_rates(monkeypatch, measured.Found("measured", busy)).notes]
    assert whats == [
        "bfloat16 was measured at 100 TFLOP/s, 10% of the table's: was the device busy?",
        "host to device was measured at 3 GB/s, 6% of the table's: was the device busy?",
    ]


def test_rates_that_could_not_be_measured_or_kept_are_noted(monkeypatch):
    found = with_rates(monkeypatch, measured.Found("assumed", why="measuring failed: no room"))
    assert found.rates_from == "assumed: measuring failed: no room"
    assert found.notes[0].what == "the rates are those of the table: measuring failed: no room"
    assert "jaxmem doctor --measure" in found.notes[0].fix
    assert found.rates["bfloat16"] == Target("h200").flops["bfloat16"]
    unkept = measured.Found("measured", MADE, why="not kept for the next process: read-only")
    (note,) = with_rates(monkeypatch, unkept).notes
    assert "read-only" in note.what and "JAXMEM_CACHE_DIR" in note.fix


def test_a_crowded_device_is_to_be_measured_while_it_is_free(monkeypatch):
    crowded = dataclasses.replace(MADE, crowded=True, notes=("float32 was not measured: ...",))
    unkept = measured.Found("measured", crowded, why="not kept, as too little was free")
    ways = [note.fix for note in with_rates(monkeypatch, unkept).notes]
    assert measured.WHEN_FREE in ways and not any("JAXMEM_CACHE_DIR" in way for way in ways)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU is measured")
def test_a_processor_is_measured_only_when_asked(monkeypatch):
    asked = []

    def rates_of(device, fields, *, again):
        asked.append(again)
        return measured.Found("measured", MADE)

    monkeypatch.setattr(measured, "rates_of", rates_of)
    found = doctor.diagnose()
    assert asked == [] and found.rates_from.startswith("rates assumed: 30 GFLOP/s")
    found = doctor.diagnose(measure=True)
    assert asked == [True] and found.rates_from.startswith("measured 2026-11-22")
    assert "where Target.local(measure=True) asks for that" in found.rates_from


def test_windows_and_missing_pinned_memory_are_notes(monkeypatch):
    monkeypatch.setattr(doctor, "in_wsl", lambda: True)
    found = doctor.Diagnosis(device_bytes=60 * 2**30, host_bytes=512 * 2**30)
    doctor._check_gpu_limits(found)
    assert any("Windows lets Linux pin little memory" in note.what for note in found.notes)

    class Bare:
        device_kind = "abacus"

        def addressable_memories(self):
            return []

    monkeypatch.setattr(jax, "local_devices", lambda: [Bare()])
    doctor._check_pinned_host(found)
    assert found.notes[-1].what == "abacus has no pinned host memory: nothing can be offloaded"
