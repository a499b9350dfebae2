"""What a checkpoint holds of a tree: arrays and plain values by name, and how they are put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.errors import CheckpointError
from jaxmem.program import leaves, nnx

# What is written as it is, into the list of what a checkpoint holds.
_PLAIN = (bool, int, float, str)
# The dtypes of which Orbax writes arrays.
_STORED = frozenset(
    {
        "bool",
        *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (16, 32, 64)),
        *("int2", "int4", "int8", "uint8", "bfloat16", "complex64", "complex128"),
        *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)
# What makes random keys of each dtype, as jax.random.key(impl=) takes it.
_IMPLEMENTATIONS = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}


@dataclass(frozen=True, eq=False)
class Contents:
    """The leaves of a tree by name.

    NNX objects count by the arrays in their variables; one that is shared has one set of names.

    Attributes:
        arrays: arrays, and what has only a shape; of random keys their data.
        keys: for each of them that is random keys the dtype of those.
        values: numbers and texts.
    """

    arrays: Mapping[str, Any]
    keys: Mapping[str, str]
    values: Mapping[str, Any]
    _rebuild: Callable[[Mapping[str, Any]], Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.size * jnp.dtype(a.dtype).itemsize for a in self.arrays.values())

    def rebuilt(self, found: Mapping[str, Any]) -> Any:
        """The tree with these arrays and values; NNX objects in it are given theirs in place."""
        whole = dict(found)
        for name, dtype in self.keys.items():
            whole[name] = jax.random.wrap_key_data(whole[name], impl=_IMPLEMENTATIONS[dtype])
        return self._rebuild(whole)


def contents_of(tree: Any) -> Contents:
    """What a checkpoint holds of ``tree``.

    Raises:
        CheckpointError: a leaf is neither an array, nor a number, nor a text.

    >>> found = contents_of({"w": np.ones(3), "step": 7})
    >>> list(found.arrays), dict(found.values)
    (["['w']"], {"['step']": 7})
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=nnx.is_object)
    objects = {jax.tree_util.keystr(path): x for path, x in flat if nnx.is_object(x)}
    inner, rebuild_objects = _of_objects(objects)
    named = {jax.tree_util.keystr(path): x for path, x in flat if not nnx.is_object(x)}
    _check_names([*(jax.tree_util.keystr(path) for path, _ in flat), *inner])
    arrays: dict[str, Any] = {}
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, leaf in {**named, **inner}.items():
        if type(leaf) in _PLAIN:
            values[name] = leaf
        elif _is_key(leaf):
            arrays[name], keys[name] = _key_data(name, leaf), str(leaf.dtype)
        elif leaves.is_abstract(leaf) or _is_array(leaf):
            arrays[name] = leaf
        else:
            raise CheckpointError(
                f"{name or 'the state'} is a {type(leaf).__name__}{_dtype_of(leaf)} "
                f"({leaf!r:.80}), which no checkpoint holds. {_instead(leaf)}"
            )

    def rebuild(found: Mapping[str, Any]) -> Any:
        rebuild_objects(found)
        back = [x if nnx.is_object(x) else found[jax.tree_util.keystr(path)] for path, x in flat]
        return jax.tree_util.tree_unflatten(structure, back)

    return Contents(arrays, keys, values, rebuild)


def _instead(leaf: Any) -> str:
    if isinstance(leaf, jax.sharding.Sharding):
        return "Give an array, or jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
    return "Save arrays, numbers and texts; leave functions and configuration to the code."


def _check_names(names: Sequence[str]) -> None:
    """Keys of a user's own may look the same: one leaf would be written over another."""
    if len(names) != len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(
            f"two leaves are called {twice}: their keys differ and look the same. Give them keys "
            "that do not."
        )


def _of_objects(
    objects: Mapping[str, Any],
) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], None]]:
    """The arrays of NNX objects by name, and what gives them others in place."""
    if not objects:
        return {}, lambda found: None
    state = nnx.state_of(tuple(objects.values()))
    flat, structure = jax.tree_util.tree_flatten_with_path(state)
    outer = list(objects)
    names = [outer[path[0].key] + jax.tree_util.keystr(path[1:]) for path, _ in flat]

    def rebuild(found: Mapping[str, Any]) -> None:
        changed = jax.tree_util.tree_unflatten(structure, [found[name] for name in names])
        nnx.update(tuple(objects.values()), changed)

    _check_names(names)
    return {name: x for name, (_, x) in zip(names, flat, strict=True)}, rebuild


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return leaf.dtype.name in _STORED
    # Masks and the like are more than an array.
    plain = isinstance(leaf, np.generic) or type(leaf) in (np.ndarray, np.memmap)
    return plain and leaf.dtype.isnative and leaf.dtype.name in _STORED


def _dtype_of(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    return "" if dtype is None else f" of {dtype}"


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _key_data(name: str, keys: Any) -> Any:
    if str(keys.dtype) not in _IMPLEMENTATIONS:
        known = ", ".join(_IMPLEMENTATIONS)
        raise CheckpointError(f"{name} is random keys of {keys.dtype}; checkpoints hold {known}.")
    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys)
    data = jax.eval_shape(jax.random.key_data, keys)
    # They have one more dimension, along which nothing is split.
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=keys.sharding)
