"""What may be a leaf of an argument, and what makes two of them the same to a compiled step."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from jaxmem import _compat
from jaxmem.errors import ArgumentError


def is_arraylike(leaf: Any) -> bool:
    """Whether ``jax.jit`` takes ``leaf`` as an array."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def is_abstract(leaf: Any) -> bool:
    """Whether ``leaf`` has a shape and no data."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def is_whole(leaf: Any) -> bool:
    """Whether a leaf of an Equinox module is part of the program: a function, a number, a flag."""
    return not (isinstance(leaf, jax.Array | np.ndarray | np.generic) or is_abstract(leaf))


def module_leaves(tree: Any) -> tuple[int, ...]:
    """Positions of the leaves of Equinox modules among all leaves of a pytree."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return ()

    def is_module(x: Any) -> bool:
        return isinstance(x, equinox.Module)

    found: list[int] = []
    position = 0
    for leaf in jax.tree_util.tree_leaves(tree, is_leaf=is_module):
        count = len(jax.tree_util.tree_leaves(leaf)) if is_module(leaf) else 1
        if is_module(leaf):
            found.extend(range(position, position + count))
        position += count
    return tuple(found)


def check_leaf(leaf: Any, where: str, function: str) -> None:
    """Raise ``ArgumentError`` unless ``leaf`` can be given to a compiled step."""
    if isinstance(leaf, Tracer):
        raise ArgumentError(
            f"{function} is fitted and was called inside another JAX transformation ({where} is a "
            "tracer). A fitted step is compiled on its own: transform the plain function, then fit "
            "the result."
        )
    usable = not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "OSUMm"
    if not (is_abstract(leaf) or (is_arraylike(leaf) and usable)):
        hint = "Pass arrays, numbers or pytrees of them, or name the argument in static_argnums."
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            hint = "jax.tree_util.register_dataclass makes a dataclass a pytree of arrays."
        raise ArgumentError(
            f"argument {where} of {function} is a {type(leaf).__name__} ({leaf!r:.80}), not an "
            f"array. {hint}"
        )


def abstract(leaf: Any) -> Any:
    """Shape, dtype and weak type of a leaf; its sharding too where that is part of its type."""
    if is_abstract(leaf):
        return leaf
    aval = jax.typeof(leaf)
    weak = getattr(aval, "weak_type", False)
    # On a mesh with explicit axes the sharding is part of an array's type.
    typed = getattr(aval, "sharding", None) is not None and not aval.sharding.mesh.empty
    sharding = leaf.sharding if typed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def laid_out(leaf: Any, sharding: Any) -> Any:
    """Shape, dtype and weak type of a leaf, with the layout that it gets."""
    aval = leaf if is_abstract(leaf) else jax.typeof(leaf)
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def signature(leaf: Any, device: Any) -> Hashable:
    """Equal for leaves that one compiled step can take, arrays or not; asked at every call."""
    aval = leaf if _compat.is_concrete(leaf) else abstract(leaf)
    return aval.shape, aval.dtype, bool(aval.weak_type), layout(leaf, device)


def layout(leaf: Any, device: Any) -> Any:
    """The sharding of a leaf that is not simply on ``device``, where JAX puts arrays by itself."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or (isinstance(leaf, jax.Array) and not leaf.committed):
        return None
    return _unusual(sharding, device)


@functools.lru_cache(maxsize=1024)
def _unusual(sharding: Any, device: Any) -> Any:
    explicit = isinstance(sharding, NamedSharding) and any(
        kind == AxisType.Explicit for kind in sharding.mesh.axis_types
    )
    if sharding.num_devices > 1 or explicit:
        return sharding
    default = jax.sharding.SingleDeviceSharding(device)
    same = sharding.device_set == default.device_set and (
        sharding.memory_kind in (None, default.memory_kind)
    )
    return None if same else sharding


def default_device() -> Any:
    """Where JAX puts arrays by itself."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]
