"""Where each leaf of a tree is, and what it takes there: device, pinned host, host, disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmem.displayed import Displayed
from jaxmem.state.leaves import bytes_of, leaves_opened

DEVICE, PINNED, HOST, DISK = "device", "pinned host", "host", "disk"
GONE, SHAPE = "donated", "not allocated"


@dataclass(frozen=True, eq=False)
class PlacedLeaf:
    """One leaf.

    Attributes:
        dtype: its dtype, and ``shape`` that of the whole array; of what is no array the name of
            its type, and nothing.
        nbytes: bytes of the whole array, and ``device_bytes`` those that one device, or its host,
            has of it.
        tier: ``"device"``, ``"pinned host"``, ``"host"`` (NumPy, Python), ``"disk"`` (memory-mapped
            files); ``"donated"`` for what is gone, ``"not allocated"`` for shapes alone.
        split: the axes that it is split over, ``""`` where one device has all of it.
        copies: how many devices have each part of it.
        is_array: whether it takes memory at all.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device_bytes: int
    tier: str
    split: str = ""
    copies: int = 1
    is_array: bool = True


@dataclass(frozen=True, eq=False)
class PlacedTree(Displayed):
    """A tree with :class:`PlacedLeaf` in place of its leaves; it shows itself as a tree.

    Attributes:
        tree: the tree; NNX objects are their states.
    """

    tree: Any

    @property
    def leaves(self) -> dict[str, PlacedLeaf]:
        """The leaves by their paths, in the order of the tree."""
        flat = jax.tree_util.tree_leaves_with_path(self.tree)
        return {jax.tree_util.keystr(path): leaf for path, leaf in flat}

    @property
    def device_bytes(self) -> Mapping[str, int]:
        """Bytes that one device, or its host, has in each tier."""
        return sums(list(self.leaves.values()))


def sums(leaves: list[PlacedLeaf]) -> dict[str, int]:
    """Bytes in each tier, of one device or its host.

    >>> leaf = PlacedLeaf("float32", (4,), 16, 16, DEVICE)
    >>> sums([leaf, leaf])
    {'device': 32}
    """
    found: dict[str, int] = {}
    for leaf in leaves:
        if leaf.is_array:
            found[leaf.tier] = found.get(leaf.tier, 0) + leaf.device_bytes
    return found


def placed(tree: Any) -> PlacedTree:
    """Where each leaf of a tree is, and what it takes there. Nothing is moved or computed.

    Args:
        tree: arrays, ``jax.ShapeDtypeStruct`` (by their shardings, where they have any), NumPy
            arrays and memory-mapped files, NNX objects; anything else is listed with its type.

    >>> import numpy as np
    >>> found = placed({"w": np.zeros((256, 256), np.float32), "name": "net"})
    >>> found.leaves["['w']"].tier, found.device_bytes
    ('host', {'host': 262144})
    """
    return PlacedTree(jax.tree_util.tree_map(_placed, leaves_opened(tree)))


def _placed(leaf: Any) -> PlacedLeaf:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return _of_jax(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        tier = DISK if _is_mapped(leaf) else HOST
        return PlacedLeaf(str(leaf.dtype), leaf.shape, leaf.nbytes, leaf.nbytes, tier)
    return PlacedLeaf(type(leaf).__name__, (), 0, 0, "", is_array=False)


def _of_jax(leaf: Any) -> PlacedLeaf:
    """An array of JAX's, also where it is not there any more or not yet."""
    dtype, shape, nbytes = str(leaf.dtype), tuple(leaf.shape), bytes_of(leaf)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return PlacedLeaf(dtype, shape, nbytes, 0, GONE)
    sharding = leaf.sharding
    if sharding is None:
        return PlacedLeaf(dtype, shape, nbytes, nbytes, SHAPE)
    return with_sharding(dtype, shape, nbytes, sharding)


def with_sharding(dtype: str, shape: tuple[int, ...], nbytes: int, sharding: Any) -> PlacedLeaf:
    """An array that is laid out so."""
    part = math.prod(sharding.shard_shape(shape)) / max(1, math.prod(shape))
    parts = round(1 / part) if part else 1
    spec = getattr(sharding, "spec", None)
    split = _axes(spec) if spec is not None else f"{parts} parts" if parts > 1 else ""
    copies = max(1, sharding.num_devices // parts)
    tier = PINNED if sharding.memory_kind == "pinned_host" else DEVICE
    return PlacedLeaf(dtype, shape, nbytes, round(nbytes * part), tier, split, copies)


def _axes(spec: Any) -> str:
    """The axes of a spec by dimension, for instance ``"data, -"``; ``""`` where there is none."""
    entries = ["-" if e is None else "+".join(e) if isinstance(e, tuple) else e for e in spec]
    return ", ".join(entries) if any(e not in ("-", "") for e in entries) else ""


def _is_mapped(leaf: Any) -> bool:
    """Whether an array, or what it is a view of, is a file."""
    while isinstance(leaf, np.ndarray):
        if isinstance(leaf, np.memmap):
            return True
        leaf = leaf.base
    return False
