"""The leaves of a state: their paths and bytes, the specs they carry, and whose they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.errors import ShardingError
from jaxmem.program import nnx

# Paths of optimizer states that are no types of Optax.
_OPTIMIZER = re.compile(r"opt_state|optimizer|(\.|\[')(mu|nu)\b")


@dataclass(frozen=True, eq=False)
class StateLeaf:
    """A leaf of a state.

    Attributes:
        path: where it is in the tree.
        inner: where it is in its argument, if the tree is that of the arguments of a step.
        shape: of the whole array, and ``dtype``.
        nbytes: its bytes; those of the data of random keys.
        own: the spec that it carries; ``None`` for none.
        is_optimizers: whether it is part of an optimizer's state.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    own: PartitionSpec | None
    is_optimizers: bool
    inner: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What patterns of paths may call it."""
        return (self.path, self.inner) if self.inner else (self.path,)


def leaves_of(tree: Any) -> tuple[list[StateLeaf], Any, Any]:
    """The leaves of a tree, their structure, and the tree with NNX objects as their states."""
    tree = leaves_opened(tree)
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    carried, states = list(_own(tree)), list(_of_optax(tree))
    found = []
    for (path, leaf), own, of_optax in zip(flat, carried, states, strict=True):
        name = jax.tree_util.keystr(path)
        aval = _aval(name, leaf)
        found.append(
            StateLeaf(
                path=name,
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                nbytes=bytes_of(aval),
                own=own,
                is_optimizers=of_optax or bool(_OPTIMIZER.search(name)),
            )
        )
    return found, structure, tree


def _aval(name: str, leaf: Any) -> Any:
    """The shape and dtype of a leaf.

    Raises:
        ShardingError: it is no array.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jax.typeof(leaf)
    except TypeError as error:
        raise ShardingError(
            f"{name or 'the state'} is a {type(leaf).__name__} ({leaf!r:.80}), which cannot be "
            "split. Give arrays, numbers, or jax.ShapeDtypeStruct; keep functions and texts apart."
        ) from error


def leaves_opened(tree: Any) -> Any:
    """The tree with NNX objects as their states."""
    return jax.tree_util.tree_map(_opened, tree, is_leaf=nnx.is_object)


def specs_like(specs: Any, tree: Any, said: str = "specs") -> list[PartitionSpec | None]:
    """For each leaf of a tree its spec, from a tree of specs that is a prefix of it.

    ``said`` is the argument in which the user gave them.

    Raises:
        ShardingError: it is no prefix, or there is something else in it.
    """

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | NamedSharding)

    flat, structure = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    for path, x in flat:
        if not is_spec(x):
            where = jax.tree_util.keystr(path) or "it"
            rules = ', or a rule such as "zero3"' if said == "shard" and not path else ""
            raise ShardingError(
                f"{said}=: {where} is {x!r:.80}. Give a PartitionSpec, or None{rules}."
            )
    try:
        below = structure.flatten_up_to(tree)
    except ValueError as error:
        raise ShardingError(f"{said}= is no prefix of the state: {error}") from error
    found: list[PartitionSpec | None] = []
    for (_, x), subtree in zip(flat, below, strict=True):
        spec = x.spec if isinstance(x, NamedSharding) else x
        found += [spec] * len(jax.tree_util.tree_leaves(subtree))
    return found


def _opened(leaf: Any) -> Any:
    """An NNX object as its state; anything else, variables too, as it is."""
    is_node = nnx.is_object(leaf) and nnx.is_node(leaf)
    return nnx.state_of((leaf,))[0] if is_node else leaf


def _own(tree: Any) -> Iterator[PartitionSpec | None]:
    """The specs that Flax's variables and boxes carry, for each leaf."""
    meta = sys.modules.get("flax.core.meta")

    def is_marked(x: Any) -> bool:
        if meta is not None and isinstance(x, meta.AxisMetadata):
            return True
        return nnx.is_object(x) and nnx.is_variable(x)

    for x in jax.tree_util.tree_leaves(tree, is_leaf=is_marked):
        spec = None
        if meta is not None and isinstance(x, meta.AxisMetadata):
            spec = x.get_partition_spec()
        elif nnx.is_object(x):
            names = x.get_metadata().get("out_sharding")
            spec = None if names is None else PartitionSpec(*names)
        for _ in jax.tree_util.tree_leaves(x):
            yield spec


def _of_optax(tree: Any) -> Iterator[bool]:
    """For each leaf whether it is in a state of Optax."""

    def is_state(x: Any) -> bool:
        return isinstance(x, tuple) and type(x).__module__.split(".")[0] == "optax"

    for x in jax.tree_util.tree_leaves(tree, is_leaf=is_state):
        for _ in jax.tree_util.tree_leaves(x):
            yield is_state(x)


def bytes_of(aval: Any) -> int:
    """Bytes of an array; of random keys those of their data."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return aval.size * aval.dtype.itemsize
