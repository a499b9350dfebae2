"""Lay a state out over a mesh by rules: FSDP, ZeRO, and specs by patterns of paths."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmem.errors import ShardingError
from jaxmem.runtime.asked import FEWEST_BYTES
from jaxmem.state.leaves import StateLeaf, leaves_of, specs_like
from jaxmem.state.rules import NAMED, Layout, Patterns, check_name, matches
from jaxmem.state.sharded import Sharded, ShardedLeaf
from jaxmem.units import format_bytes

# A smaller leaf is not worth a collective of its own.
_SMALLEST = 64 * 2**10
# Of a leaf that no rule is for so many bytes are worth a word.
_LARGE = 2**20
_WARNED = 8

Rules = str | Mapping[str, Any]


def shard(
    tree: Any,
    mesh: Mesh | AbstractMesh,
    rules: Rules | Sequence[Rules] = (),
    *,
    specs: Any = None,
    axis: str | tuple[str, ...] | None = None,
    logical: Mapping[str, str | tuple[str, ...] | None] | None = None,
    host: str | Sequence[str] = (),
) -> Sharded:
    """How each leaf of a state is split over a mesh, and what it costs on each device.

    For ``jax.device_put(state, shard(...).shardings)`` and ``jax.jit(in_shardings=...)``; nothing
    is moved by this alone. Specs come first: ``specs``, or those that leaves carry (boxes of
    ``flax.linen``, variables of ``flax.nnx``). Rules then split what is left, in order.

    Args:
        tree: arrays, ``jax.ShapeDtypeStruct``, NNX objects or states.
        mesh: devices, or ``jax.sharding.AbstractMesh`` for those of a cluster that is not there.
        rules: ``"fsdp"`` or ``"zero3"`` splits each leaf of 64 KiB and more along its largest
            dimension that divides; ``"zero1"`` only the optimizer's state. A mapping of patterns of
            paths has a ``PartitionSpec``, such a name or ``None`` (whole) for the leaves of which
            it is the first that matches: tensor parallelism is ``{"*up*": PartitionSpec(None,
            "model")}``. Of several rules each splits dimensions that those before it left.
        specs: a tree of ``PartitionSpec`` like ``tree``, or a prefix of it; ``None`` for none.
        axis: what named rules split over; by default the only axis of the mesh, or its axes
            ``"data"`` and ``"fsdp"``.
        logical: for names in specs that are no axes of the mesh the axes that they stand for, or
            ``None``.
        host: patterns of leaves that wait in pinned host memory, as of ``fit(host=...)``; those of
            less than 1 MiB stay on the device, as there.

    Returns:
        Shardings and a row for each leaf. Leaves that are whole on each device though a rule was to
        split them, and large ones that no rule is for, are named by ``warnings.warn`` as well.

    Raises:
        ShardingError: an axis or a rule does not exist, a spec does not fit its leaf, a pattern
            matches nothing.

    Rules are named after ZeRO (Rajbhandari et al., arXiv:1910.02054) and PyTorch's FSDP.

    >>> import jax.numpy as jnp
    >>> state = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32), "step": jnp.int32(0)}
    >>> found = shard(state, jax.sharding.AbstractMesh((8,), ("data",)), "fsdp")
    >>> tuple(found.shardings["w"].spec), found.device_bytes
    ((None, 'data'), 262148)
    """
    leaves, structure, opened = leaves_of(tree)
    sharder = _Sharder(leaves, dict(mesh.shape), axis)
    given = [leaf.own for leaf in leaves] if specs is None else specs_like(specs, opened)
    sharder.take(given, logical or {})
    for rule in [rules] if isinstance(rules, str | Mapping) else rules:
        sharder.apply(rule)
    patterns = [host] if isinstance(host, str) else list(host)
    Patterns(dict.fromkeys(patterns)).check([leaf.path for leaf in leaves])
    hosted = {
        leaf.path
        for leaf in leaves
        if leaf.nbytes >= FEWEST_BYTES and any(matches(leaf.path, p) for p in patterns)
    }
    found = Sharded(
        jax.tree_util.tree_unflatten(structure, sharder.shardings(mesh, hosted)),
        sharder.rows(hosted),
        sharder.sizes,
    )
    if found.warnings:
        rest = len(found.warnings) - _WARNED
        lines = [*found.warnings[:_WARNED], *([f"and {rest} more"] if rest > 0 else [])]
        warnings.warn("jaxmem.shard: " + "\n  ".join(lines), UserWarning, stacklevel=2)
    return found


class _Sharder:
    """Splits leaves.

    Attributes:
        leaves: what is split, and ``layouts`` how, so far.
        sizes: of the axes of the mesh.
        axis: what named rules split over.
        ruled: paths of leaves that something was said about.
        undivided: what would have to be for those to be split that were to be.
    """

    def __init__(
        self,
        leaves: Sequence[StateLeaf],
        sizes: Mapping[str, int],
        axis: str | tuple[str, ...] | None,
    ):
        self.leaves, self.sizes, self.axis = leaves, sizes, axis
        self.layouts = {leaf.path: Layout(leaf.path, leaf.shape, sizes) for leaf in leaves}
        self.ruled: set[str] = set()
        self.undivided: dict[str, str] = {}

    def take(
        self,
        given: Sequence[PartitionSpec | None],
        logical: Mapping[str, str | tuple[str, ...] | None],
    ) -> None:
        """Split leaves as specs say."""
        for leaf, spec in zip(self.leaves, given, strict=True):
            # An empty one is what Flax says of leaves without any.
            if spec is not None and (len(spec) or not leaf.shape):
                self.ruled.add(leaf.path)
                self.layouts[leaf.path].take(self._physical(spec, logical))

    def _physical(
        self, spec: PartitionSpec, logical: Mapping[str, str | tuple[str, ...] | None]
    ) -> PartitionSpec:
        def axes(entry: Any) -> Any:
            if isinstance(entry, tuple):
                return tuple(a for e in entry for a in _several(axes(e)))
            return logical[entry] if entry in logical and entry not in self.sizes else entry

        return PartitionSpec(*map(axes, spec))

    def apply(self, rule: Rules) -> None:
        """Split leaves by a rule."""
        if isinstance(rule, Mapping):
            self._apply_patterns(Patterns(rule))
            return
        check_name(rule)
        if NAMED[rule] and not any(leaf.is_optimizers for leaf in self.leaves):
            raise ShardingError(
                f"{rule!r} splits the optimizer's state, and no leaf is known as such: it is told "
                "by Optax's types and by paths with opt_state. Name it by a pattern: "
                '{"*your_state*": "fsdp", "*": None}.'
            )
        for leaf in self.leaves:
            self.ruled.add(leaf.path)
            self._spread(leaf, rule)

    def _apply_patterns(self, patterns: Patterns) -> None:
        patterns.check([leaf.path for leaf in self.leaves])
        for leaf in self.leaves:
            is_there, rule = patterns.find(leaf.path)
            if not is_there:
                continue
            self.ruled.add(leaf.path)
            if isinstance(rule, str):
                self._spread(leaf, rule)
            elif rule is not None:
                self.layouts[leaf.path].take(rule)

    def _spread(self, leaf: StateLeaf, rule: str) -> None:
        layout, over = self.layouts[leaf.path], self._over()
        if NAMED[rule] and not leaf.is_optimizers:
            return
        if leaf.nbytes >= _SMALLEST and not layout.used.intersection(over):
            if layout.spread(over):
                self.undivided.pop(leaf.path, None)
            else:
                self.undivided[leaf.path] = layout.nearest(over)

    def _over(self) -> tuple[str, ...]:
        """The axes that named rules split over."""
        there = ", ".join(self.sizes)
        if self.axis is None:
            usual = tuple(name for name in self.sizes if name in ("data", "fsdp"))
            if len(self.sizes) > 1 and not usual:
                raise ShardingError(f'the mesh has the axes {there}: say which with axis="...".')
            return usual or tuple(self.sizes)
        axes = (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)
        for name in axes:
            if name not in self.sizes:
                raise ShardingError(
                    f"axis={self.axis!r}: the mesh has no axis {name!r}; it has {there}."
                )
        return axes

    def shardings(self, mesh: Any, hosted: set[str]) -> list[NamedSharding]:
        """The sharding of each leaf."""
        return [
            NamedSharding(
                mesh,
                self.layouts[leaf.path].spec,
                memory_kind="pinned_host" if leaf.path in hosted else None,
            )
            for leaf in self.leaves
        ]

    def rows(self, hosted: set[str]) -> tuple[ShardedLeaf, ...]:
        """What each leaf costs."""
        return tuple(
            ShardedLeaf(
                path=leaf.path,
                shape=leaf.shape,
                dtype=leaf.dtype,
                spec=self.layouts[leaf.path].spec,
                nbytes=leaf.nbytes,
                device_bytes=leaf.nbytes // self.layouts[leaf.path].parts,
                on_host=leaf.path in hosted,
                note=self._note(leaf),
            )
            for leaf in self.leaves
        )

    def _note(self, leaf: StateLeaf) -> str:
        why = self.undivided.get(leaf.path, "")
        if not why and leaf.path not in self.ruled and leaf.nbytes >= _LARGE:
            why = "no rule is for it"
        what = "stays" if self.layouts[leaf.path].used else "is whole on each device"
        return f"{format_bytes(leaf.nbytes)} {what}: {why}" if why else ""


def _several(axes: Any) -> tuple[str, ...]:
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)
