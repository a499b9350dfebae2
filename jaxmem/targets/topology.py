"""Devices of GPUs that are not there: XLA:GPU compiles for them, nothing can run on them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies
from jaxlib.version import __version__ as jaxlib_version

from jaxmem import _compat
from jaxmem.errors import MissingPluginError, TargetError
from jaxmem.targets import table
from jaxmem.targets.target import Target

_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_MODULES = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13")
_SKIP_VERSION_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_CUDNN = (9, 10)  # what absent GPUs have
_lock = threading.RLock()


def devices(target: Target) -> tuple[Any, ...]:
    """Returns compile-only devices of every GPU of a target, host by host.

    They can stand in a ``Mesh`` that a function is lowered and compiled for. The process's own
    backend is initialised first and stays what it was.

    Raises:
        TargetError: the target is not a GPU of the table.
        MissingPluginError: the compiler's wheels are missing or of another version than jaxlib.

    >>> devices(Target("2xh100"))[1].device_kind
    'NVIDIA H100 80GB HBM3'
    """
    if not target.model:
        raise TargetError(
            f"{target.name} cannot be compiled for from afar: it is not in the table. "
            f"Use one of {', '.join(table.models())}."
        )
    register_compiler()
    return _devices(target.model, target.hosts, target.devices_per_host)


def initialize_default_backend() -> None:
    """Initialise the process's own JAX backend, whatever it is.

    On a machine without an NVIDIA GPU the CUDA plugin's search for CUDA libraries fails and JAX
    logs a traceback; nothing there needs the libraries, so that check alone is left out, unless
    ``JAX_PLATFORMS`` asks for platforms by name.
    """
    chosen = getattr(jax.config, "jax_platforms", None)
    with _lock, _skip_version_check(when=not chosen and not _compat.has_nvidia_gpu()):
        jax.devices()


def register_compiler() -> None:
    """Make XLA:GPU's compiler known to JAX without touching the process's own backend.

    Raises:
        MissingPluginError: the wheels are missing or of another version than jaxlib.
    """
    with _lock:
        initialize_default_backend()
        if jax.default_backend() != "gpu":
            check_wheels()
        if _compat.has_topology("cuda"):
            return
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
        with _compat.registering_topology_only("cuda"), _skip_version_check(when=True):
            plugin.initialize()
        if not _compat.has_topology("cuda"):
            raise MissingPluginError(
                f"{plugin.__name__} is installed but did not load its library. {install_command()}"
            )


def check_wheels() -> None:
    """Check that XLA's GPU compiler is installed whole and belongs to this jaxlib.

    Raises:
        MissingPluginError: it does not; the message says what to install.
    """
    versions = wheel_versions()
    if not versions:
        problem = "the wheels with XLA's GPU compiler are not installed."
    elif missing := [wheel for wheel in _WHEELS if wheel not in versions]:
        problem = f"{next(iter(versions))} is installed, {missing[0]} is not."
    elif set(versions.values()) != {jaxlib_version}:
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        problem = f"found {found}, but jaxlib is {jaxlib_version}."
    else:
        return
    raise MissingPluginError(f"cannot compile for a GPU: {problem} {install_command()}")


def wheel_versions() -> dict[str, str]:
    """Versions of the wheels with XLA's GPU compiler, of those that are installed."""
    versions = {}
    for name, module in zip(_WHEELS, _MODULES, strict=True):
        if _importable(module):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    return versions


def explain_missing_toolchain(error: BaseException) -> None:
    """Raise the fix if a compile failed for want of NVIDIA's assembler or math library.

    XLA calls ``ptxas`` and reads ``libdevice``, from a CUDA toolkit or from two more wheels.

    Raises:
        MissingPluginError: it did.
    """
    signs = ("No PTX compilation provider", "libdevice not found", "Couldn't find ptxas")
    if any(sign in str(error) for sign in signs):
        raise MissingPluginError(
            "cannot compile for a GPU: XLA found no ptxas or no libdevice, which a CUDA toolkit "
            f"or two small wheels bring. {install_command()}"
        ) from error


def install_command() -> str:
    """The sentence that says how to install the compiler for this very jaxlib."""
    return (
        "Install what is needed, without the CUDA libraries, on Linux: pip install --no-deps "
        f"jax-cuda13-plugin=={jaxlib_version} jax-cuda13-pjrt=={jaxlib_version} "
        '"nvidia-cuda-nvcc==13.*" "nvidia-nvvm==13.*"'
    )


@contextlib.contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Within, JAX traces on this thread what a GPU of ``target`` can run, were it here.

    Calls of cuDNN are checked against the process's own GPU while they are traced. Where there is
    one, or the target is no GPU of the table, that stays so.
    """
    initialize_default_backend()
    if not target.model or jax.default_backend() == "gpu":
        yield
        return
    major, minor = table.gpu(target.model)["compiled_as"].split(".")
    libraries = _compat.GpuLibraries((int(major), int(minor)), _CUDNN[0] * 10000 + _CUDNN[1] * 100)
    with _compat.answering_for(libraries):
        yield


def target_config(model: str) -> str:
    """Text of XLA's ``GpuTargetConfigProto`` for a GPU of the table."""
    entry = table.gpu(model)
    limits = table.sm_limits(entry["compiled_as"])
    major, minor = entry["compiled_as"].split(".")
    feature = "ACCELERATED_FEATURES" if limits["accelerated"] else "NONE"
    name = entry["device_kinds"][0]
    return f"""gpu_device_info {{
threads_per_block_limit: 1024 threads_per_warp: 32 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
thread_dim_limit_z: 64 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
block_dim_limit_z: 65535 shared_memory_per_block: 49152 registers_per_core_limit: 65536
registers_per_block_limit: 65536 device_address_bits: 64 device_vendor: "NVIDIA Corporation"
shared_memory_per_core: {limits["shared_bytes_per_sm"]}
shared_memory_per_block_optin: {limits["shared_bytes_per_block_optin"]}
threads_per_core_limit: {limits["threads_per_sm"]} fpus_per_core: {limits["fpus_per_sm"]}
core_count: {entry["sm_count"]} clock_rate_ghz: {entry["clock_ghz"]}
memory_bandwidth: {entry["memory_bytes_per_second"]} l2_cache_size: {entry["l2_bytes"]}
device_memory_size: {entry["memory_bytes"]}
pcie_bandwidth: {table.link_bytes_per_second(model)}
cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
platform_version: "Compute Capability {major}.{minor}{"a" if limits["accelerated"] else ""}"
name: "{name}" driver_version: "13.0.0" runtime_version: "13.0.0"
compile_time_toolkit_version: "13.0.0" dnn_version: "{_CUDNN[0]}.{_CUDNN[1]}.0" }}
platform_name: "CUDA" dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: 0 }}
device_description_str: "{name}" """


@functools.cache
def _devices(model: str, hosts: int, devices_per_host: int) -> tuple[Any, ...]:
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=model,
        target_config=target_config(model),
        topology=f"1x{hosts}x{devices_per_host}",
    )
    return tuple(described.devices)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def _skip_version_check(*, when: bool) -> Iterator[None]:
    before: Any = os.environ.get(_SKIP_VERSION_CHECK)
    if when:
        os.environ[_SKIP_VERSION_CHECK] = "1"
    try:
        yield
    finally:
        if when and before is None:
            del os.environ[_SKIP_VERSION_CHECK]
        elif when:
            os.environ[_SKIP_VERSION_CHECK] = before
