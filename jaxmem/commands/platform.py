"""Which platform JAX starts on, decided before anything imports it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pkgutil


def choose() -> None:
    """Keeps JAX quiet where only the wheels that plan for absent GPUs are installed.

    Without an NVIDIA driver JAX would still start their CUDA plugin and print its traceback
    before it falls back to the CPU. Only this process is told to use the CPU, only when the user
    has not chosen, and only when no other accelerator could be meant.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu"):
        return
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins else None
    names = {module.name for module in pkgutil.iter_modules(folders)} if folders else set()
    if names and names <= {"xla_cuda12", "xla_cuda13"} and not has_nvidia_driver():
        os.environ["JAX_PLATFORMS"] = "cpu"


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver is here."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return False
