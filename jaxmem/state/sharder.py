"""Split the leaves of a state by specs and by rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.errors import ShardingError
from jaxmem.state.leaves import StateLeaf
from jaxmem.state.rules import NAMED, Layout, Patterns, check_name
from jaxmem.state.sharded import ShardedLeaf
from jaxmem.units import format_bytes

# A smaller leaf is not worth a collective of its own.
_SMALLEST = 64 * 2**10
# Of a leaf that no rule is for so many bytes are worth a word.
_LARGE = 2**20

Rules = str | Mapping[str, Any]


class Sharder:
    """Splits leaves.

    Attributes:
        leaves: what is split, and ``layouts`` how, so far.
        sizes: of the axes of the mesh.
        axis: what named rules split over.
        ruled: paths of leaves that something was said about.
        named: whether a rule was applied by its name.
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
        self.named = False
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
        patterns.check([leaf.names for leaf in self.leaves])
        for leaf in self.leaves:
            is_there, rule = patterns.find(leaf.names)
            if not is_there:
                continue
            self.ruled.add(leaf.path)
            if isinstance(rule, str):
                self._spread(leaf, rule)
            elif rule is not None:
                self.layouts[leaf.path].take(rule)

    def _spread(self, leaf: StateLeaf, rule: str) -> None:
        layout, over = self.layouts[leaf.path], self._over()
        self.named = True
        if NAMED[rule] and not leaf.is_optimizers:
            return
        if leaf.nbytes >= _SMALLEST and not layout.used.intersection(over):
            if layout.spread(over):
                self.undivided.pop(leaf.path, None)
            else:
                self.undivided[leaf.path] = layout.nearest(over)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that rows of a batch are split over: those of named rules.

        Without such rules the only axis of a mesh is for the batch only where no spec has it.
        """
        if self.axis is None and not any(name in ("data", "fsdp") for name in self.sizes):
            used = any(layout.used for layout in self.layouts.values())
            if len(self.sizes) > 1 or (used and not self.named):
                return ()
        return self._over()

    def _over(self) -> tuple[str, ...]:
        """The axes that named rules split over."""
        there = ", ".join(self.sizes)
        if self.axis is None:
            usual = tuple(name for name in self.sizes if name in ("data", "fsdp"))
            if len(self.sizes) > 1 and not usual:
                raise ShardingError(
                    f"the mesh has the axes {there}: say which with axis= of jaxmem.shard, or call "
                    'one "data" or "fsdp".'
                )
            return usual or tuple(self.sizes)
        axes = (self.axis,) if isinstance(self.axis, str) else self.axis
        if not isinstance(axes, tuple | list):
            raise ShardingError(f"axis={axes!r}: give the name of an axis, or several: {there}.")
        axes = tuple(axes)
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
