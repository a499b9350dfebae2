"""Marks of tracked code in profiler traces: JAX's own, and NVTX ranges for Nsight Systems."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax

from jaxmem.errors import MissingExtraError

_DOMAIN = "jaxmem"


def nvtx_library(wanted: bool | None) -> Any:
    """The library that sets NVTX ranges; ``None`` where it is not wanted or not there.

    Args:
        wanted: ``None`` takes it where it is installed.

    Raises:
        MissingExtraError: it is wanted, and not installed.
    """
    if wanted is False:
        return None
    try:
        return importlib.import_module("nvtx")
    except ImportError as error:
        if wanted is None:
            return None
        raise MissingExtraError(
            "track(..., nvtx=True) needs the package nvtx, which is not installed: "
            'pip install "jaxmem[tracking]".'
        ) from error


def mark(name: str, nvtx: Any) -> AbstractContextManager[Any]:
    """A range of this name in the traces that are being taken."""
    range_of_jax = jax.profiler.TraceAnnotation(name)
    if nvtx is None:
        return range_of_jax
    ranges = ExitStack()
    ranges.enter_context(range_of_jax)
    ranges.enter_context(nvtx.annotate(name, domain=_DOMAIN))
    return ranges
