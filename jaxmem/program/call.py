"""One call of a step, taken apart into arrays and the rest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxmem.program.ir import in_host_memory

# Where in the key of a call the signatures of its leaves are, and what comes after them.
_SIGNATURES, _REST = 3, 4


@dataclass(frozen=True)
class Call:
    """One call taken apart.

    Attributes:
        leaves: arrays, ``ShapeDtypeStruct``s or Python numbers, in order.
        paths: where each leaf sits, such as ``state.params['w']``.
        donated: whether the leaf belongs to a donated argument.
        key: equal for calls that can share a compiled step.
        layouts: the sharding of each leaf over the mesh of the step; empty where it has none, and
            leaves stay as they are given.
        state: with layouts, which leaves are state: results that replace them keep theirs.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    donated: tuple[bool, ...]
    key: Hashable
    treedef: Any = field(repr=False)
    fixed: dict[int, Any] = field(repr=False)
    static: tuple[tuple[int | str, Any], ...] = field(repr=False)
    layouts: tuple[Any, ...] = ()
    state: frozenset[int] | None = None


def differ_only_in_memory(one: Any, other: Any, positions: frozenset[int]) -> bool:
    """Whether two keys of calls are equal but for the memory that some leaves are in."""
    if one[:_SIGNATURES] != other[:_SIGNATURES] or one[_REST:] != other[_REST:]:
        return False
    return all(
        a == b
        or (n in positions and a[:-1] == b[:-1] and in_host_memory(a[-1]) == in_host_memory(b[-1]))
        for n, (a, b) in enumerate(zip(one[_SIGNATURES], other[_SIGNATURES], strict=True))
    )


def laid_out(call: Call, layouts: Sequence[Any], state: frozenset[int]) -> Call:
    """``call`` for a step that has its leaves in these layouts, wherever they come from."""
    key: Any = call.key
    signatures = tuple(
        (*signature[:-1], layout)
        for signature, layout in zip(key[_SIGNATURES], layouts, strict=True)
    )
    key = (*key[:_SIGNATURES], signatures, *key[_REST:])
    return replace(call, key=key, layouts=tuple(layouts), state=state)
