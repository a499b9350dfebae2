"""Doctor: what is installed, what works here, and how to fix the rest."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxlib.version import __version__ as jaxlib_version

from jaxmem import _compat
from jaxmem.errors import JaxmemError, MissingPluginError
from jaxmem.targets import compile_for, local, measured, topology
from jaxmem.targets.pinned import DEFAULT_BYTES, LIMIT_VARIABLE, WSL_BYTES, in_wsl
from jaxmem.units import GIB, format_bytes, format_seconds

_OLDEST_JAX = (0, 10, 2)
# A rate below this share of the table's is a device that is busy, throttled or wrongly connected.
_SUSPICIOUS = 0.2
_RATE_NAMES = {
    "hbm_bytes_per_second": "device memory",
    "h2d_bytes_per_second": "host to device",
    "d2h_bytes_per_second": "device to host",
    "duplex_bytes_per_second": "both ways, each",
    "d2d_bytes_per_second": "device to device",
}


@dataclass(frozen=True)
class Problem:
    """Something that does not work, or could work better.

    Attributes:
        what: what was found.
        fix: what to do about it, as a command or setting.
    """

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n    fix: {self.fix}"


@dataclass
class Diagnosis:
    """What :func:`diagnose` found.

    Attributes:
        python: version of Python.
        jax: version of jax.
        jaxlib: version of jaxlib.
        backend: JAX's default backend, ``""`` if it does not start.
        devices: kinds of its devices.
        device_bytes: bytes of each device that JAX may allocate.
        host_bytes: bytes of host memory that this process may use.
        memory_kinds: memory kinds of the first device.
        pinned_host_works: whether an array went to pinned host memory and back unchanged.
        pinned_host_bytes: the most pinned host memory that this process may have.
        rates: FLOP/s by dtype, and bytes a second of device memory and links.
        rates_from: whether they were measured, when and in which file they are kept, or assumed.
        rates_assumed: those of them that were not measured, where others were.
        wheels: versions of the wheels with XLA's GPU compiler.
        absent_gpu_seconds: time a small program took to compile for an absent H200; ``None`` if
            it could not be.
        problems: what does not work.
        notes: what works, but could work better or be missed later.
    """

    python: str = platform.python_version()
    jax: str = jax.__version__
    jaxlib: str = jaxlib_version
    backend: str = ""
    devices: tuple[str, ...] = ()
    device_bytes: int = 0
    host_bytes: int = 0
    memory_kinds: tuple[str, ...] = ()
    pinned_host_works: bool = False
    pinned_host_bytes: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    rates_from: str = ""
    rates_assumed: tuple[str, ...] = ()
    wheels: dict[str, str] = field(default_factory=dict)
    absent_gpu_seconds: float | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    def __str__(self) -> str:
        absent = self.absent_gpu_seconds
        rows = {
            "python": self.python,
            "jax, jaxlib": f"{self.jax}, {self.jaxlib}",
            "backend": self.backend or "does not start",
            "devices": f"{len(self.devices)} x {self.devices[0]}" if self.devices else "none",
            "device memory": f"{format_bytes(self.device_bytes)} on each device",
            "host memory": format_bytes(self.host_bytes),
            "memory kinds": ", ".join(self.memory_kinds) or "none",
            "pinned host": self._pinned(),
            "GPU compiler": ", ".join(f"{w} {v}" for w, v in self.wheels.items()) or "missing",
            "absent GPUs": f"compiled for in {format_seconds(absent)}" if absent else "no",
        }
        lines = [f"{name:<14} {value}" for name, value in rows.items()]
        if self.rates:
            lines.append(f"{'rates':<14} {self.rates_from}")
            for name, rate in self.rates.items():
                assumed = ", assumed" if name in self.rates_assumed else ""
                lines.append(f"  {_RATE_NAMES.get(name, name):<16} {_rate(name, rate)}{assumed}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines if self.problems else [*lines, "no problems found"])

    def _pinned(self) -> str:
        if not self.pinned_host_works:
            return "does not work"
        return f"works, at most {format_bytes(self.pinned_host_bytes)} in one process"


def diagnose(*, measure: bool = False) -> Diagnosis:
    """Returns what is installed and what works here; compiles one small program to find out.

    Nothing is changed, and nothing found wrong raises: it is listed with its fix.

    Args:
        measure: measure the device's rates now, even if they were measured before or it is a CPU.
            On a GPU, plans that are made from then on go by them.

    Cost:
        About one second: JAX's start and two small compiles. Measuring takes a few more, which a
        GPU that was never measured does anyway.

    >>> diagnosis = diagnose()
    >>> diagnosis.backend in ("cpu", "gpu"), diagnosis.host_bytes > 2**28
    (True, True)
    """
    found = Diagnosis(host_bytes=local.host_bytes(), wheels=topology.wheel_versions())
    _check_versions(found)
    try:
        topology.initialize_default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that some backend started
        wanted = os.environ.get("JAX_PLATFORMS", "")
        fix = "unset JAX_PLATFORMS" if wanted else "JAX_PLATFORMS=cpu, to go on without it"
        asked = f" with JAX_PLATFORMS={wanted}" if wanted else ""
        found.problems.append(Problem(f"JAX does not start{asked}: {_first_line(error)}", fix))
        return found
    _check_devices(found, measure)
    _check_pinned_host(found)
    _check_absent_gpu(found)
    return found


def _check_versions(found: Diagnosis) -> None:
    oldest = ".".join(map(str, _OLDEST_JAX))
    if jax.__version_info__ < _OLDEST_JAX:
        found.problems.append(
            Problem(f"jax {jax.__version__} is older than {oldest}", "pip install --upgrade jax")
        )
    if jaxlib_version == "0.11.0":
        found.problems.append(
            Problem(
                "jaxlib 0.11.0 computes wrong gradients from scan residuals offloaded to the host "
                "(openxla/xla#46231)",
                "pip install --upgrade jax jaxlib",
            )
        )


def _check_devices(found: Diagnosis, measure: bool) -> None:
    found.backend = jax.default_backend()
    found.devices = tuple(device.device_kind for device in jax.local_devices())
    try:
        fields = local.assumed_device()
        found.device_bytes = fields["device_bytes"]
        found.pinned_host_bytes = fields["pinned_host_bytes"]
        _check_rates(found, fields, measure)
    except JaxmemError as error:
        found.problems.append(Problem(str(error), 'pass target="h200" or another known name'))
    if found.backend == "cpu" and _compat.has_nvidia_gpu():
        forced = os.environ.get("JAX_PLATFORMS")
        fix = f"unset JAX_PLATFORMS (it is {forced})" if forced else 'pip install -U "jax[cuda13]"'
        found.problems.append(Problem("there is an NVIDIA GPU that JAX does not use", fix))
    if found.backend == "gpu":
        _check_gpu_limits(found)


def _check_gpu_limits(found: Diagnosis) -> None:
    if not os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):
        found.notes.append(
            Problem(
                f"JAX may allocate {format_bytes(found.device_bytes)} on each device, 75% of it",
                "XLA_PYTHON_CLIENT_MEM_FRACTION=.95",
            )
        )
    if in_wsl():
        found.notes.append(
            Problem(
                f"Windows lets Linux pin little memory, {format_bytes(WSL_BYTES)} are assumed",
                "run on Linux itself to offload more",
            )
        )
    elif found.host_bytes > DEFAULT_BYTES and not os.environ.get(LIMIT_VARIABLE):
        found.notes.append(
            Problem(
                f"pinned host memory is limited to {format_bytes(DEFAULT_BYTES)}, and the host has "
                f"{format_bytes(found.host_bytes)}",
                f"{LIMIT_VARIABLE}={found.host_bytes // GIB * 3 // 4}",
            )
        )


def _check_rates(found: Diagnosis, fields: dict[str, Any], measure: bool) -> None:
    """Note the rates that plans go by, and those that no idle device would have."""
    known = local.found_rates(fields, measure or None, again=measure)
    has = measured.applied(fields, known)
    found.rates = {**has["flops"], **{name: has[name] for name in _RATE_NAMES}}
    if (made := known.measurement) is None:
        found.rates_from = f"assumed: {known.why}" if known.why else fields["sources"][-1]
        if found.backend == "gpu":
            again = "jaxmem doctor --measure, while nothing else runs on the device"
            found.notes.append(Problem(f"the rates are those of the table: {known.why}", again))
        return
    took = format_seconds(made.seconds)
    kept = f", {'kept' if known.how == 'measured' else 'cached'} in {known.path}"
    found.rates_from = f"measured {made.when} in {took}{kept if known.path else ''}"
    found.rates_assumed = tuple(
        n for n in found.rates if n not in made.flops and n not in made.rates
    )
    if found.backend == "cpu":
        found.rates_from += "; plans go by them where Target.local(measure=True) asks for that"
    if known.why:
        way = measured.WHEN_FREE if made.crowded else "JAXMEM_CACHE_DIR=a directory"
        found.notes.append(Problem(f"the rates are {known.why}", way))
    found.notes += [Problem(note, "the table's rate is used for it") for note in made.notes]
    for name, rate in {**made.flops, **made.rates}.items():
        expected = fields["flops"].get(name) or fields.get(name)
        if found.backend == "gpu" and expected and rate < _SUSPICIOUS * expected:
            found.notes.append(
                Problem(
                    f"{_RATE_NAMES.get(name, name)} was measured at {_rate(name, rate)}, "
                    f"{rate / expected:.0%} of the table's: was the device busy?",
                    "jaxmem doctor --measure, while nothing else runs on it",
                )
            )


def _rate(name: str, rate: float) -> str:
    unit = "GB/s" if name in _RATE_NAMES else "GFLOP/s" if rate < 1e12 else "TFLOP/s"
    return f"{rate / (1e12 if unit == 'TFLOP/s' else 1e9):.4g} {unit}"


def _check_pinned_host(found: Diagnosis) -> None:
    device = jax.local_devices()[0]
    found.memory_kinds = tuple(memory.kind for memory in device.addressable_memories())
    if "pinned_host" not in found.memory_kinds:
        found.notes.append(
            Problem(
                f"{device.device_kind} has no pinned host memory: nothing can be offloaded",
                "plans here recompute; another JAX backend may have it",
            )
        )
        return
    there = SingleDeviceSharding(device, memory_kind="pinned_host")
    data = jnp.arange(1024.0)
    back = jax.device_put(jax.device_put(data, there), data.sharding)
    found.pinned_host_works = bool((back == data).all())
    if not found.pinned_host_works:
        found.problems.append(
            Problem("an array came back changed from pinned host memory", "do not offload here")
        )


def _check_absent_gpu(found: Diagnosis) -> None:
    """Compile for a GPU that no machine has sixty-four of, so that it is absent everywhere."""
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    start = time.perf_counter()
    try:
        compile_for("64xh200", lambda x: jnp.tanh(x @ x), [x])
    except MissingPluginError as error:
        where = found.problems if found.wheels else found.notes
        where.append(Problem("planning for absent GPUs does not work", str(error)))
    except (RuntimeError, NotImplementedError, JaxmemError) as error:
        fix = topology.install_command()
        found.problems.append(Problem(f"compiling for a GPU fails: {_first_line(error)}", fix))
    else:
        found.absent_gpu_seconds = time.perf_counter() - start


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no platform came up"])[0]
