"""How rules say which axes of a mesh each dimension of a leaf is split over."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from jaxmem.errors import ShardingError

# Rules that have a name, and whether they split all leaves or the optimizer's state alone.
NAMED = {"fsdp": False, "zero3": False, "zero1": True}
# Rows are split unless the largest dimension is more than so many times as large.
_FAR_FEWER = 4
_EXAMPLE = 'shard(state, mesh, {"*up*": PartitionSpec(None, "model"), "*": "fsdp"})'


@dataclass
class Layout:
    """One leaf, and the axes of the mesh that each of its dimensions is split over so far.

    Attributes:
        path: where it is in the tree.
        shape: of the whole array.
        sizes: of the axes of the mesh.
        axes: for each dimension.
    """

    path: str
    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    axes: list[tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.axes = [()] * len(self.shape)

    @property
    def spec(self) -> PartitionSpec:
        """It as JAX writes it."""
        last = max((n for n, axes in enumerate(self.axes) if axes), default=-1)
        short = [axes[0] if len(axes) == 1 else axes or None for axes in self.axes]
        return PartitionSpec(*short[: last + 1])

    @property
    def used(self) -> set[str]:
        """The axes that it is split over."""
        return {axis for axes in self.axes for axis in axes}

    @property
    def parts(self) -> int:
        """In how many parts the array is."""
        return math.prod(self.sizes[axis] for axis in self.used)

    def take(self, spec: Any) -> None:
        """Split it as a spec says.

        Raises:
            ShardingError: the spec is not for this mesh, or not for this shape.
        """
        entries = [_entry(entry) for entry in spec]
        where = f"{PartitionSpec(*spec)} for {self.path} {list(self.shape)}"
        if len(entries) > len(self.shape):
            raise ShardingError(
                f"{where} has {len(entries)} entries for {len(self.shape)} dimensions. Give at "
                "most one for each."
            )
        for n, axes in enumerate(entries):
            for axis in axes:
                if axis not in self.sizes:
                    there = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
                    raise ShardingError(
                        f"{where}: the mesh has no axis {axis!r}; it has {there}. What logical "
                        f"axes stand for is said by jaxmem.shard(..., logical={{{axis!r}: ...}}), "
                        "which fit takes as shard=."
                    )
                if axis in self.used:
                    raise ShardingError(
                        f"{where}: the axis {axis!r} splits two dimensions, or one of them twice. "
                        "An axis can split one."
                    )
                self.axes[n] = (*self.axes[n], axis)
            parts = self._parts(n)
            if self.shape[n] % parts:
                raise ShardingError(
                    f"{where}: dimension {n} has {self.shape[n]}, which does not divide by {parts}"
                    f". Pad it to {_padded(self.shape[n], parts)}, or leave {axes[-1]!r} out there."
                )

    def spread(self, over: Sequence[str]) -> bool:
        """Split its rows over axes, or its largest dimension; whether one divides.

        Rows, the last dimension but one, are gathered as they lie in memory; XLA transposes whole
        stacks of layers to gather columns. They are taken unless they are far fewer. One that is
        split already is only taken where no other divides.
        """
        parts = math.prod(self.sizes[axis] for axis in over)
        fitting = [n for n, size in enumerate(self.shape) if size % (self._parts(n) * parts) == 0]
        fitting = [n for n in fitting if self.shape[n]]
        if not fitting:
            return False
        rows = len(self.shape) - 2
        enough = rows >= 0 and _FAR_FEWER * self.shape[rows] >= max(self.shape)
        chosen = max(
            fitting, key=lambda n: (not self.axes[n], n == rows and enough, self.shape[n], -n)
        )
        self.axes[chosen] = (*self.axes[chosen], *over)
        return True

    def nearest(self, over: Sequence[str]) -> str:
        """What its largest dimension would have to be for :meth:`spread`."""
        parts = math.prod(self.sizes[axis] for axis in over)
        n = max(range(len(self.shape)), key=lambda n: self.shape[n])
        wanted = _padded(self.shape[n], parts * self._parts(n))
        return (
            f"no dimension of {list(self.shape)} divides by {parts}; {wanted} in place of "
            f"{self.shape[n]} would"
        )

    def _parts(self, dimension: int) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes[dimension])


@dataclass(frozen=True)
class Patterns:
    """Rules by patterns of paths: the first that matches a leaf is its rule."""

    rules: Mapping[str, Any]

    def check(self, leaves: Collection[tuple[str, ...]]) -> None:
        """Check that every pattern is of use to leaves, of which each may have several paths.

        Raises:
            ShardingError: one matches nothing, or its rule is none.
        """
        for pattern, rule in self.rules.items():
            if not isinstance(pattern, str):
                raise ShardingError(
                    f"a rule is for {pattern!r:.80}. Give patterns of paths as text, such as "
                    '"*kernel*".'
                )
            if not any(matches(names, pattern) for names in leaves):
                some = ", ".join(names[0] for names in list(leaves)[:5])
                raise ShardingError(
                    f"the rule for {pattern!r} matches no leaf. There are {len(leaves)}, for "
                    f"instance {some}. A pattern matches a whole path; * stands for anything."
                )
            if isinstance(rule, str):
                check_name(rule)
            elif rule is not None and not isinstance(rule, PartitionSpec):
                raise ShardingError(
                    f"the rule for {pattern!r} is {rule!r}. Give a PartitionSpec, one of "
                    f"{', '.join(map(repr, NAMED))}, or None for a leaf that stays whole."
                )

    def find(self, names: Collection[str]) -> tuple[bool, Any]:
        """Whether there is a rule for a leaf of these paths, and which."""
        for pattern, rule in self.rules.items():
            if matches(names, pattern):
                return True, rule
        return False, None


def check_name(rule: Any) -> None:
    """Check that a rule of this name is there.

    Raises:
        ShardingError: it is not.
    """
    if not isinstance(rule, str):
        raise ShardingError(
            f"a rule is {rule!r:.80}. Give one of {', '.join(map(repr, NAMED))}, or a mapping of "
            'patterns, such as {"*": PartitionSpec("data")}.'
        )
    if rule == "zero2":
        raise ShardingError(
            "zero2 splits gradients, which are no leaves of a state: inside the step XLA splits "
            'them as what they update. Use "zero1" or "zero3".'
        )
    if rule == "tp":
        raise ShardingError(
            "tensor parallelism needs to know which products to split. Say it by patterns of paths"
            f": {_EXAMPLE}."
        )
    if rule not in NAMED:
        raise ShardingError(f"there is no rule {rule!r}; there are {', '.join(map(repr, NAMED))}.")


def matches(names: Collection[str], pattern: str) -> bool:
    """Whether a pattern is for a path of a leaf: ``*`` and ``?`` as in file names, ``[`` as it is.

    >>> matches(["['opt_state'][0].mu['w']"], "*.mu*")
    True
    """
    escaped = pattern.replace("[", "[[]")
    return any(fnmatch.fnmatchcase(name, escaped) for name in names)


def _entry(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple):
        return entry
    raise ShardingError(f"{entry!r} in a PartitionSpec names no axis of a mesh.")


def _padded(size: int, parts: int) -> int:
    return -(-size // parts) * parts
