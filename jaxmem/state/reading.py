"""Read the arrays of a checkpoint, each to where it belongs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import _compat, processes
from jaxmem.state import ondisk
from jaxmem.state.contents import Contents

# Orbax reads about so much at a time, or one leaf if that is larger.
_READ_BYTES = 2**30


def arrays_of(place: Path, contents: Contents) -> dict[str, Any]:
    """All arrays of a checkpoint, where those of ``contents`` are.

    Raises:
        CheckpointError: some cannot be read, by name.
    """
    wanted = {name: a for name, a in contents.arrays.items() if a.size}
    try:
        found = _read(place, wanted)
    except Exception as error:
        alone = [name for name, a in wanted.items() if not _is_readable(place, name, a)]
        if not alone:
            raise
        raise ondisk.damaged(place, alone) from error
    empty = {name: a for name, a in contents.arrays.items() if not a.size}
    found.update((name, np.zeros(a.shape, a.dtype)) for name, a in empty.items())
    return {name: _placed(found[name], a) for name, a in contents.arrays.items()}


def _is_readable(place: Path, name: str, like: Any) -> bool:
    try:
        _read(place, {name: like})
    except Exception:  # Whatever it was, it is said by who asked.
        return False
    return True


def _read(place: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    ocp = ondisk.orbax()
    largest = max(a.size * jnp.dtype(a.dtype).itemsize for a in wanted.values())
    most = math.ceil(max(_READ_BYTES, largest) / 10**9) + 1
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=most)
    return handler.restore(
        place / ondisk.ARRAYS,
        args=ocp.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0),
            restore_args={name: _restoring(a) for name, a in wanted.items()},
            partial_restore=True,
        ),
    )


def _restoring(like: Any) -> Any:
    ocp = ondisk.orbax()
    sharding = _sharding(like)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=like.shape, dtype=like.dtype)


def _sharding(like: Any) -> Any:
    """Where a leaf must be; ``None`` for NumPy's, and for those that JAX may put anywhere."""
    committed = not isinstance(like, jax.Array) or like.committed
    return getattr(like, "sharding", None) if committed else None


def _placed(found: Any, like: Any) -> Any:
    """What was read as ``like`` is."""
    if isinstance(like, np.generic):
        return np.asarray(found).astype(like.dtype)[()]
    if isinstance(like, np.ndarray):
        return np.asarray(found)
    sharding = _sharding(like)
    if not isinstance(found, jax.Array):
        found = jnp.asarray(found) if sharding is None else processes.put(found, sharding)
    is_weak = getattr(like, "weak_type", False)
    return _compat.weakly_typed(found) if is_weak else found
