"""How a state is laid out over a mesh: a sharding for each leaf, and what each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmem.displayed import Displayed
from jaxmem.state.tiers import PlacedTree, with_sharding


@dataclass(frozen=True)
class ShardedLeaf:
    """What a leaf costs.

    Attributes:
        path: where it is in the tree.
        shape: of the whole array, and ``dtype``.
        spec: the axes of the mesh that its dimensions are split over.
        nbytes: bytes of the whole array, and ``device_bytes`` of what each device has of it.
        on_host: whether that is in pinned host memory.
        note: why it is whole on each device where that was probably not meant, or "".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    nbytes: int
    device_bytes: int
    on_host: bool
    note: str = ""


@dataclass(frozen=True, eq=False)
class Sharded(Displayed):
    """How a state is laid out over a mesh; it prints as a table.

    Attributes:
        shardings: for each leaf of the state its ``NamedSharding``, in the same structure; in place
            of an NNX object that of ``nnx.state`` of it.
        leaves: what each leaf costs, in the order of the tree.
        axes: the axes of the mesh and their sizes.
        data_axes: those that the rows of a batch are split over.
    """

    shardings: Any
    leaves: tuple[ShardedLeaf, ...]
    axes: Mapping[str, int]
    data_axes: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes in the memory of each device."""
        return sum(leaf.device_bytes for leaf in self.leaves if not leaf.on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes in pinned host memory for each device."""
        return sum(leaf.device_bytes for leaf in self.leaves if leaf.on_host)

    @property
    def replicated(self) -> tuple[ShardedLeaf, ...]:
        """The leaves that every device has as a whole."""
        return tuple(leaf for leaf in self.leaves if leaf.device_bytes == leaf.nbytes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is probably not as it was meant."""
        return tuple(f"{leaf.path}: {leaf.note}" for leaf in self.leaves if leaf.note)

    def tree(self) -> PlacedTree:
        """The state as a tree, each leaf with its bytes, its memory and how it is split."""
        flat = [
            with_sharding(leaf.dtype, leaf.shape, leaf.nbytes, sharding)
            for leaf, sharding in zip(self.leaves, jax.tree.leaves(self.shardings), strict=True)
        ]
        return PlacedTree(jax.tree.unflatten(jax.tree.structure(self.shardings), flat))
