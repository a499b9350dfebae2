"""Read the arrays of a checkpoint, each to where it belongs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jaxmem import _compat, processes
from jaxmem.errors import CheckpointError
from jaxmem.state import ondisk
from jaxmem.state.contents import Contents

# Orbax reads about so much at a time, or one leaf if that is larger.
_READ_BYTES = 2**30
# Characters of what Orbax says; it says the same thing in several ways.
_SHOWN = 400


def arrays_of(place: Path, contents: Contents, changed: Callable[[], list[str]]) -> dict[str, Any]:
    """All arrays of a checkpoint, where those of ``contents`` are.

    Args:
        place: the checkpoint.
        contents: what it holds.
        changed: the files of it that are not as they were written.

    Raises:
        CheckpointError: some cannot be read, or not put where they are to go, by name.
    """
    for name, a in contents.arrays.items():
        _check_place(name, a)
    wanted = {name: a for name, a in contents.arrays.items() if a.size}
    try:
        found = _read(place, wanted)
    except Exception as error:
        raise _unread(place, wanted, error, changed()) from error
    empty = {name: a for name, a in contents.arrays.items() if not a.size}
    found.update((name, np.zeros(a.shape, a.dtype)) for name, a in empty.items())
    return {name: _placed(found[name], a) for name, a in contents.arrays.items()}


def _check_place(name: str, like: Any) -> None:
    """Check that there is a place for a leaf before anything is read."""
    sharding = _sharding(like)
    if sharding is None:
        return
    where = f"{name or 'the state'} {list(like.shape)}"
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        raise CheckpointError(
            f"{where} is to go to an AbstractMesh, which has no devices. Give a sharding over a "
            "jax.sharding.Mesh, or a shape without one."
        )
    try:
        sharding.shard_shape(like.shape)
    except ValueError as error:
        raise CheckpointError(
            f"{where} cannot be split as it is to be: {error}. Give a sharding whose parts divide "
            "it, as jaxmem.shard makes them."
        ) from error


def _unread(
    place: Path, wanted: Mapping[str, Any], error: Exception, changed: list[str]
) -> CheckpointError:
    """Why arrays could not be read: what is damaged, or has no room where it is to go."""
    alone = {name: why for name, a in wanted.items() if (why := _why_not(place, name, a))}
    as_numpy = {n: jax.ShapeDtypeStruct(wanted[n].shape, wanted[n].dtype) for n in alone}
    whole = {name: why for name, a in as_numpy.items() if (why := _why_not(place, name, a))}
    names, why = ([*alone], next(iter(alone.values()))) if alone else ([*wanted], str(error))
    if whole or changed:
        names, why = ([*whole], next(iter(whole.values()))) if whole else (names, why)
        return ondisk.damaged(place, names, changed, f"cannot be read ({why})")
    return CheckpointError(
        f"{place} is not damaged, and {names[0] or 'the state'} cannot be put where it is to go: "
        f"{why}"
    )


def _why_not(place: Path, name: str, like: Any) -> str:
    """Why one array cannot be read; "" if it can."""
    try:
        _read(place, {name: like})
    except Exception as error:
        # TensorStore adds its whole configuration.
        said = str(error).partition(" [tensorstore_spec=")[0]
        return said[:_SHOWN] or type(error).__name__
    return ""


def _read(place: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    ocp = ondisk.orbax()
    largest = max(a.size * jnp.dtype(a.dtype).itemsize for a in wanted.values())
    most = math.ceil(max(_READ_BYTES, largest) / 10**9) + 1
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=most)
    found = handler.restore(
        place / ondisk.ARRAYS,
        args=ocp.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0),
            restore_args={name: _restoring(a) for name, a in wanted.items()},
            partial_restore=True,
        ),
    )
    for name, a in wanted.items():
        # What Orbax does not find it leaves as it was in `item`.
        if np.shape(found[name]) != a.shape:
            raise ValueError(f"Orbax finds no {name or 'such array'} of shape {list(a.shape)}")
    return found


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
