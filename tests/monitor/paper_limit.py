"""A limit in place of a GPU's, and failures where it would fail: for a machine without one."""

from __future__ import annotations

from typing import Any

import jax

from jaxmem.monitor import arrays, figures

LIMIT_BYTES = 2**28
POOL_BYTES = LIMIT_BYTES
_known: dict[str, Any] = {"fails_at_scalars": 0, "peak": 0}


def stats(device: Any) -> dict[str, int]:
    """What XLA's BFC allocator would say, of the live arrays."""
    kept = [array for array in arrays.alive() if not arrays.has_failed(array)]
    used = arrays.live_now(kept).on(figures.name_of(device))
    _known["peak"] = max(_known["peak"], used)
    return {
        "bytes_in_use": used,
        "peak_bytes_in_use": _known["peak"],
        "bytes_limit": LIMIT_BYTES,
        "pool_bytes": POOL_BYTES,
        "bytes_reserved": 0,
        "largest_free_block_bytes": 0,
    }


def exhausted(nbytes: int) -> Exception:
    """The error of an allocation that fails."""
    text = f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {nbytes} bytes."
    return jax.errors.JaxRuntimeError(text)


def of_a_library(fun: Any) -> Any:
    """The function as if it were in a library, for those who look for the user's own frames."""
    fun.__code__ = fun.__code__.replace(co_filename="<jaxlib>")
    return fun


def put_in_place() -> None:
    """Have the device say that it has so little, and waiting for results fail beyond it.

    A result of a step, a scalar, fails when it is waited for with half of the device taken by
    something else, once for each such time.
    """
    wait = jax.block_until_ready
    failed_with: list[int] = []

    def waiting(tree: Any) -> Any:
        (device,) = jax.local_devices()[:1]
        used = stats(device)["bytes_in_use"]
        if used > LIMIT_BYTES:
            raise exhausted(used - LIMIT_BYTES)
        scalars = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "shape", None) == ()]
        taken = id(next((a for a in arrays.alive() if a.nbytes >= LIMIT_BYTES // 2), None))
        if scalars and used > LIMIT_BYTES // 2 and taken not in failed_with:
            failed_with.append(taken)
            raise exhausted(LIMIT_BYTES - LIMIT_BYTES // 4)
        return wait(tree)

    figures.stats_of = stats
    jax.block_until_ready = of_a_library(waiting)
