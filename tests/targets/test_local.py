"""This machine as a target; GPUs are stood in for by what JAX says of them."""

import os
from types import SimpleNamespace

import jax
import pytest

from jaxmem import _before_jax
from jaxmem.errors import TargetError
from jaxmem.targets import Target, local, table


def gpu(
    kind="NVIDIA H200",
    limit=100 * 2**30,
    cores=132,
    capability="9.0",
    platform="gpu",
    runtime="cuda",
):
    memories = [SimpleNamespace(kind=kind) for kind in ("device", "pinned_host")]
    return SimpleNamespace(
        addressable_memories=lambda: memories,
        client=SimpleNamespace(platform_version=f"PJRT C API\n{runtime} 13000"),
        device_kind=kind,
        platform=platform,
        core_count=cores,
        compute_capability=capability,
        memory_stats=lambda: {"bytes_limit": limit} if limit else None,
    )


def test_the_processor_has_no_more_memory_than_the_machine():
    target = Target("cpu")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    devices = len(jax.local_devices(backend="cpu"))
    assert target.platform == "cpu" and target.model == "" and target.devices_per_host == devices
    assert 2**28 < target.host_bytes <= physical
    assert target.device_bytes == target.host_bytes // devices
    assert any("rates assumed" in source for source in target.sources)
    if jax.default_backend() == "cpu":
        assert Target.local() == target


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/job/step\n", {"job/memory.max": "max", "job/step/memory.max": "1000"}, [1000]),
        ("0::/job/step\n", {"memory.max": "4000", "job/memory.max": "2000"}, [2000, 4000]),
        ("5:cpu,memory:/pod\n", {"memory/pod/memory.limit_in_bytes": "3000"}, [3000]),
        ("5:cpu:/pod\n", {"memory/memory.limit_in_bytes": "900"}, [900]),
        ("0::/\n", {}, []),
        (None, {}, []),
    ],
)
def test_cgroup_limits_of_both_versions_count(tmp_path, membership, files, limits):
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    if membership is not None:
        (tmp_path / "self").write_text(membership)
    (tmp_path / "memory.max").write_text("1\n")  # above the root: not ours
    assert sorted(set(_before_jax._cgroup_limits(tmp_path / "self", root))) == limits


def test_a_known_gpu_has_the_rates_of_the_table_and_the_memory_jax_may_use():
    fields = local._gpu(gpu())
    assert fields["model"] == "h200" and fields["device_bytes"] == 100 * 2**30
    assert fields["flops"] == Target("h200").flops
    assert fields["host_bytes"] == local.host_bytes()
    assert Target(**fields).name.endswith("h200")


def test_without_memory_figures_the_table_counts():
    assert local._gpu(gpu(limit=None))["device_bytes"] == Target("h200").device_bytes


def test_a_gpu_that_the_table_lacks_is_scaled_from_its_nearest_and_says_assumed():
    fields = local._gpu(gpu("NVIDIA GeForce RTX 4080", 12 * 2**30, cores=76, capability="8.9"))
    like = table.gpu("l4")  # the entry of capability 8.9 nearest in size
    assert fields["model"] == "" and fields["device_bytes"] == 12 * 2**30
    assert fields["flops"]["bfloat16"] == pytest.approx(like["flops"]["bfloat16"] * 76 / 58)
    assert any("assumed: l4's scaled" in source for source in fields["sources"])


def test_a_gpu_nothing_is_known_of_is_refused():
    with pytest.raises(TargetError, match=r"RTX X is not in the table.*one of v100-32"):
        local._gpu(gpu("RTX X", cores=None))


def test_other_accelerators_are_refused_by_name(monkeypatch):
    tpu = gpu("TPU v5p", platform="tpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [tpu])
    with pytest.raises(TargetError, match=r'is a tpu \(TPU v5p\).*target="h200"'):
        Target.local()
    amd = gpu("AMD Instinct MI300X", runtime="rocm")
    monkeypatch.setattr(jax, "devices", lambda *_: [amd])
    with pytest.raises(TargetError, match=r"is a gpu \(AMD Instinct MI300X\)"):
        Target.local()


@pytest.mark.gpu
def test_the_real_gpu_is_in_reach():
    target = Target.local()
    stats = jax.devices()[0].memory_stats()
    assert target.platform == "gpu" and target.device_bytes == stats["bytes_limit"]
    assert "cuda" in jax.devices()[0].client.platform_version.lower()
