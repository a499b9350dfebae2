"""This machine: what JAX's default device has, and its rates, assumed or measured."""

from __future__ import annotations

import os
from typing import Any

import jax

from jaxmem._before_jax import host_bytes
from jaxmem.errors import TargetError
from jaxmem.targets import measured, table, topology
from jaxmem.targets.pinned import pinned
from jaxmem.targets.target import USABLE_SHARE, from_table

# One core with 256-bit FMA at 2.5 GHz peaks at 80 GFLOP/s in float32; GEMMs get near half of it.
_CORE_FLOPS = {"float32": 30e9, "float64": 15e9, "bfloat16": 15e9, "float16": 15e9, "int8": 15e9}
_CPU_MEMORY_BYTES_PER_SECOND = 20e9
_CPU_COPY_BYTES_PER_SECOND = 10e9


def default_device(measure: bool | None = None) -> dict[str, Any]:
    """Fields of the target that is JAX's default device here, with the rates that it has."""
    fields = assumed_device()
    return measured.applied(fields, found_rates(fields, measure))


def assumed_device() -> dict[str, Any]:
    """Fields of the same target with rates of the table, or assumed ones."""
    topology.initialize_default_backend()
    device = jax.devices()[0]
    if device.platform == "cpu":
        return processor()
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        raise TargetError(
            f"the default JAX device is a {device.platform} ({device.device_kind}); jaxmem knows "
            'CPUs and NVIDIA GPUs. Name one to plan for, such as target="h200".'
        )
    return _gpu(device)


def found_rates(
    fields: dict[str, Any], measure: bool | None = None, *, again: bool = False
) -> measured.Found:
    """Where the rates of JAX's default device come from; measures it if that is wanted.

    Args:
        fields: of its target, with assumed rates.
        measure: as for ``Target.local``.
        again: measure even if it was measured before.
    """
    device = jax.local_devices()[0]
    if measure is False or (measure is None and device.platform == "cpu"):
        return measured.Found("assumed")
    if measure is None and jax.process_count() > 1:
        reason = f"{jax.process_count()} processes have to plan alike, each would measure its own"
        return measured.Found("assumed", why=reason)
    return measured.rates_of(device, fields, again=again)


def processor() -> dict[str, Any]:
    """Fields of the target that is this machine's processor."""
    topology.initialize_default_backend()
    processors, cores = jax.local_devices(backend="cpu"), os.cpu_count() or 1
    devices, memory_bytes = len(processors), host_bytes()
    pool = pinned(processors[0], memory_bytes)
    return {
        "name": "cpu",
        "platform": "cpu",
        "model": "",
        "device_bytes": memory_bytes // devices,
        "host_bytes": memory_bytes,
        "pinned_host_bytes": pool.limit_bytes,
        "flops": {name: rate * cores / devices for name, rate in _CORE_FLOPS.items()},
        "hbm_bytes_per_second": _CPU_MEMORY_BYTES_PER_SECOND / devices,
        "h2d_bytes_per_second": _CPU_COPY_BYTES_PER_SECOND,
        "d2h_bytes_per_second": _CPU_COPY_BYTES_PER_SECOND,
        "duplex_bytes_per_second": _CPU_COPY_BYTES_PER_SECOND,
        # All of them send at once, through one memory.
        "d2d_bytes_per_second": _CPU_COPY_BYTES_PER_SECOND / devices,
        "devices_per_host": devices,
        "hosts": jax.process_count("cpu"),
        "sources": (
            "memory: operating system and cgroup limit",
            pool.source,
            f"rates assumed: {_CORE_FLOPS['float32'] / 1e9:.0f} GFLOP/s on each of {cores} cores",
        ),
    }


def _gpu(device: Any) -> dict[str, Any]:
    model = table.by_device_kind(device.device_kind)
    fields = from_table(model) if model else _like_another(device)
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    local_count = jax.local_device_count()
    name = model or device.device_kind
    memory_bytes = host_bytes()
    pool = pinned(device, memory_bytes)
    memory = "memory: what JAX may allocate here" if limit else "memory: the table"
    return {
        **fields,
        "name": f"{local_count}x{name}" if local_count > 1 else name,
        "device_bytes": limit or fields["device_bytes"],
        "host_bytes": memory_bytes,
        "pinned_host_bytes": pool.limit_bytes,
        "devices_per_host": local_count,
        "hosts": jax.process_count(),
        "sources": (*fields["sources"], memory, pool.source),
    }


def _like_another(device: Any) -> dict[str, Any]:
    """A GPU that the table lacks: rates of the nearest one it has, scaled by multiprocessors."""
    capability = str(getattr(device, "compute_capability", "0"))
    cores = getattr(device, "core_count", None)
    if not cores:
        raise TargetError(
            f"{device.device_kind} is not in the table and JAX does not say how large it is. "
            f"Name the nearest GPU instead, one of {', '.join(table.models())}."
        )
    model = min(
        table.models(),
        key=lambda name: (
            abs(float(table.gpu(name)["compute_capability"]) - float(capability)),
            abs(table.gpu(name)["sm_count"] - cores),
        ),
    )
    like, share = from_table(model), cores / table.gpu(model)["sm_count"]
    return {
        **like,
        "model": "",
        "device_bytes": int(table.gpu(model)["memory_bytes"] * share * USABLE_SHARE),
        "flops": {name: rate * share for name, rate in like["flops"].items()},
        "hbm_bytes_per_second": like["hbm_bytes_per_second"] * share,
        "sources": (f"rates assumed: {model}'s scaled by multiprocessors",),
    }
