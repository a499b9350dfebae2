"""Flax NNX objects as arguments: taken apart before the step, put back together after it.

``nnx.update_context`` keeps track of which object is which, so that what a step changes in a
module or optimizer, its structure included, is changed in the caller's own objects.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

_TAG = "jaxmem"
# Whether the call going on has objects: others need not be searched for them again.
_expected: ContextVar[bool] = ContextVar("jaxmem_objects", default=False)


def has_objects(tree: Any) -> bool:
    """Whether a pytree holds NNX objects; never imports flax."""
    if not is_imported():
        return False
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_object)
    return any(is_object(leaf) for leaf in leaves)


def is_object(x: Any) -> bool:
    return is_imported() and _kind(x) is not _Kind.OTHER


def is_imported() -> bool:
    """Whether there can be NNX objects."""
    return "flax.nnx" in sys.modules


def any_variable(leaves: Iterable[Any]) -> bool:
    """Whether one of the leaves is an NNX variable."""
    return any(map(is_variable, {type(leaf): leaf for leaf in leaves}.values()))


def variables_in(tree: Any) -> list[Any]:
    """The variables in a pytree that belong to no module in it, as in an ``nnx.State``."""
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_object)
    return [leaf for leaf in leaves if is_variable(leaf)]


def is_variable(x: Any) -> bool:
    """Whether ``x`` is an NNX variable; only to be asked where NNX is imported."""
    return _kind(x) is _Kind.VARIABLE


def is_node(x: Any) -> bool:
    """Whether ``x`` is an NNX object that is no variable; to be asked where NNX is imported."""
    return _kind(x) is _Kind.NODE


class Opened:
    """Says of what a pytree is flattened to its NNX objects: variables, and objects met before.

    An object that is there twice is opened once, so that shared ones cost no more than others and
    cycles end.

    Attributes:
        met: the objects that were opened, by their ``id``.
        again: of those that were met again, in order, the number of the first time.
    """

    def __init__(self) -> None:
        self.met: dict[int, tuple[int, Any]] = {}
        self.again: list[int] = []

    def __call__(self, x: Any) -> bool:
        kind = _kind(x)
        if kind is not _Kind.NODE:
            return kind is _Kind.VARIABLE
        if id(x) not in self.met:
            self.met[id(x)] = len(self.met), x  # Held, or another could get its id.
            return False
        self.again.append(self.met[id(x)][0])
        return True


def has_modules(tree: Any) -> bool:
    """Whether a pytree holds NNX objects that are no variables."""
    return any(map(is_node, jax.tree_util.tree_leaves(tree, is_leaf=is_object)))


class _Kind(enum.Enum):
    VARIABLE = enum.auto()
    NODE = enum.auto()
    OTHER = enum.auto()


# What the classes that were met are: NNX's own ``isinstance`` takes ten times as long.
_kinds: dict[type, _Kind] = {}


def _kind(x: Any) -> _Kind:
    kind = _kinds.get(type(x))
    if kind is not None:
        return kind
    nnx = sys.modules["flax.nnx"]
    if isinstance(x, nnx.Variable):
        kind = _Kind.VARIABLE
    else:
        kind = _Kind.NODE if isinstance(x, nnx.Pytree | nnx.Module) else _Kind.OTHER
    # Of tracers each may be the stand-in for something else.
    if not isinstance(x, Tracer):
        _kinds[type(x)] = kind
    return kind


def _objects_only(tree: Any, left_out: Collection[int]) -> Any:
    """Arguments that the step may have changed; plain arrays are no results of it.

    Args:
        tree: the arguments.
        left_out: the ``id`` of each variable that it has not changed. They would take memory
            beside what a step makes of a donated ``nnx.State``; under ``jax.jit`` they are gone.
    """

    def kept(x: Any) -> Any:
        return x if is_object(x) and id(x) not in left_out else None

    return jax.tree_util.tree_map(kept, tree, is_leaf=is_object)


def context(args: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which a call with NNX objects must happen; a no-op for all others."""
    return _with_objects() if has_objects(args) else contextlib.nullcontext()


@contextlib.contextmanager
def _with_objects() -> Iterator[None]:
    token = _expected.set(True)
    try:
        with sys.modules["flax.nnx"].update_context(_TAG):
            yield
    finally:
        _expected.reset(token)


def put_back(pure_out: Any) -> Any:
    """What the step returned, with its NNX objects being the caller's own, updated."""
    if not isinstance(pure_out, Split):
        return pure_out
    _, out = _merge(pure_out, inner=False)
    return out


class _Here:
    """The path entry of what stands in an object's place: it adds nothing to the printed path."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class _Slot:
    """The place of one object in a pytree: its number, and those arrays of it seen first here."""

    number: int
    state: Any

    def tree_flatten_with_keys(self):
        return [(_Here(), self.state)], self.number

    @classmethod
    def tree_unflatten(cls, number: int, children: Any):
        return cls(number, *children)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Split:
    """A pytree whose NNX objects are taken apart: how they hang together, and slots for them."""

    graphdef: Any
    tree: Any

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("tree"), self.tree)], self.graphdef

    @classmethod
    def tree_unflatten(cls, graphdef: Any, children: Any):
        return cls(graphdef, *children)


def split(tree: Any) -> Any:
    """The pytree with its NNX objects taken apart; itself where it has none.

    Only the objects go through NNX, which would take a number or a ``ShapeDtypeStruct`` beside
    them for a part of the program.
    """
    return _split(tree) if _expected.get() and has_objects(tree) else tree


def update_arrays(obj: Any, change: Callable[[Any], Any]) -> None:
    """Replace every array that an NNX object holds by what ``change`` makes of it, in place."""
    nnx = sys.modules["flax.nnx"]
    # In a tuple, as a variable alone has no path to its value.
    nnx.update((obj,), jax.tree_util.tree_map(change, nnx.state((obj,))))


def pure(objects: tuple[Any, ...]) -> tuple[Any, Any]:
    """How objects hang together, and their arrays; outside of any update context."""
    return sys.modules["flax.nnx"].split(objects)


def state_of(objects: tuple[Any, ...]) -> Any:
    """The arrays of objects, as a pytree; those of shared ones once."""
    return sys.modules["flax.nnx"].state(objects)


def objects_of(graphdef: Any, state: Any) -> tuple[Any, ...]:
    """New objects from what :func:`pure` made of others."""
    return sys.modules["flax.nnx"].merge(graphdef, state)


def update(objects: tuple[Any, ...], state: Any) -> None:
    """Give objects the arrays of the objects that were made of them."""
    sys.modules["flax.nnx"].update(objects, state)


def merged(pure: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Inside the trace: the arguments as objects, and what to do with the result."""
    if not isinstance(pure, Split):
        return pure, lambda out, _: out
    given = _merge(pure, inner=True)
    values = {id(variable): _values(variable) for variable in variables_in(given)}

    def finish(out: Any, now: Any) -> Any:
        same = {id(v) for v in variables_in(now) if _values(v) == values.get(id(v))}
        return _split((_objects_only(now, same), out))

    return given, finish


def _values(variable: Any) -> list[int]:
    """Which arrays a variable holds."""
    return [id(leaf) for leaf in jax.tree_util.tree_leaves(variable)]


def _split(tree: Any) -> Split:
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_object)
    objects = tuple(leaf for leaf in leaves if is_object(leaf))
    with sys.modules["flax.nnx"].split_context(_TAG) as context:
        graphdef, state = context.split(objects)
    numbers = itertools.count()
    filled = []
    for leaf in leaves:
        if is_object(leaf):
            number = next(numbers)
            leaf = _Slot(number, state[number] if number in state else None)
        filled.append(leaf)
    return Split(graphdef, jax.tree_util.tree_unflatten(treedef, filled))


def _merge(pure: Split, *, inner: bool) -> Any:
    nnx = sys.modules["flax.nnx"]
    leaves, treedef = jax.tree_util.tree_flatten(pure.tree, is_leaf=_is_slot)
    slots = [leaf for leaf in leaves if _is_slot(leaf)]
    state = nnx.State({slot.number: slot.state for slot in slots if slot.state is not None})
    with nnx.merge_context(_TAG, inner=inner) as context:
        objects = context.merge(pure.graphdef, state)
    filled = [objects[leaf.number] if _is_slot(leaf) else leaf for leaf in leaves]
    return jax.tree_util.tree_unflatten(treedef, filled)


def _is_slot(x: Any) -> bool:
    return isinstance(x, _Slot)
