"""Calls that look like an earlier one: their arrays go to the compiled step as they are.

Taking any call apart (NNX's graph of objects, the key of a signature, errors that name a leaf) is
10 to 60 us of Python for each leaf. Of a ResNet-152 with 1244 of them the kernels of a step take
159 ms on an H200, and steps took 191. So a call that went the whole way leaves behind what it
looked like, which argument each array was, and where its results came from; one that looks the same
in all of that only repeats it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmem import _compat
from jaxmem.program import leaves, nnx
from jaxmem.program.call import Call
from jaxmem.program.calling import Caller
from jaxmem.runtime.step import Ran, Step, as_array, rebuilding

# So many of the looks are of objects; what follows is of the arrays that they hold.
_OF_OBJECTS = 4
# Looks of one structure that are remembered, those used last.
_MOST_LOOKS = 16


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments of one call, flat, with NNX variables as leaves.

    Attributes:
        key: structure, static arguments and settings.
        leaves: arrays, numbers, variables and what else the structure holds; where an NNX object
            is there again, the object.
        arrays: the same, with what it holds in place of each variable.
        looks: equal for calls that may share a compiled step.
        sharing: for each leaf the first that is the same array or object.
        objects: whether there are NNX objects among the arguments.
    """

    key: Hashable
    leaves: list[Any]
    arrays: list[Any]
    looks: tuple[list[Any], ...]
    sharing: list[int]
    objects: bool


@dataclass(frozen=True, eq=False)
class Repeated:
    """How calls of one look are run.

    Attributes:
        looks: what such a call looks like.
        step: runs it.
        order: the leaf that each argument of the step is.
        numbers: arguments of the step that were no arrays of JAX's.
        fixed: leaves that are part of the program, such as an Equinox module's functions.
        updates: leaves that are variables, and the result that each holds afterwards.
        picks: the leaves of what is returned, as places in what the step made, what it was
            given, the leaves of the call, and ``constants``, one after the other.
        constants: what is returned without being an array.
        tree: the structure of what is returned.
    """

    looks: tuple[list[Any], ...]
    step: Step
    order: tuple[int, ...]
    numbers: tuple[int, ...]
    fixed: tuple[tuple[int, Any], ...]
    updates: tuple[tuple[int, int], ...]
    picks: tuple[int, ...]
    constants: tuple[Any, ...]
    tree: Any

    def takes(self, given: Given) -> bool:
        """Whether a call of the same structure looks the same."""
        return self.looks == given.looks and all(
            given.leaves[n] is value or bool(given.leaves[n] == value) for n, value in self.fixed
        )

    def ready(self, given: Given) -> list[Any] | None:
        """The arguments of the step; ``None`` where one is gone, or there twice."""
        ready = [given.arrays[n] for n in self.order]
        if self.numbers:
            for n in self.numbers:
                ready[n] = as_array(ready[n])
        consts = self.step.traced.program.consts
        if len({*map(id, ready), *map(id, consts)}) < len(ready) + len(consts):
            return None
        return None if _compat.any_deleted(ready) else ready

    def __call__(self, given: Given, ready: list[Any]) -> Any:
        def finish(made: Sequence[Any]) -> Any:
            for leaf, result in self.updates:
                given.leaves[leaf].set_raw_value(made[result])
            parts = [*made, *ready, *given.leaves, *self.constants]
            return jax.tree_util.tree_unflatten(self.tree, [parts[n] for n in self.picks])

        with rebuilding(finish):
            return finish(self.step.local([*self.step.traced.program.consts, *ready]))


@dataclass(eq=False)
class Repeats:
    """The calls of one function that can be repeated."""

    caller: Caller
    _known: dict[Hashable, list[Repeated]] = field(default_factory=dict)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """What a call looks like; ``None`` where that cannot be told.

        Such a call goes the whole way, on which what is wrong with it is found and named.
        """
        dynamic, named, static = self.caller.apart(args, kwargs)
        opened = nnx.Opened() if nnx.is_imported() else None
        try:
            flat, tree = jax.tree_util.tree_flatten(
                (tuple(dynamic.values()), named), is_leaf=opened
            )
            fixed = tuple([(n, type(v), v) for n, v in static])
            key = (tree, tuple(dynamic), fixed, self.caller.settings())
            hash(key)
            return _given(key, flat, opened)
        except (TypeError, ValueError):
            return None

    def find(self, given: Given | None) -> Callable[[], Any] | None:
        """Runs the call, if it can be repeated."""
        if given is None:
            return None
        try:
            all_known = self._known.get(given.key, [])
            known = next((k for k in all_known if k.takes(given)), None)
        except ValueError:
            return None  # Arrays where JAX compares: the whole way says where.
        ready = None if known is None else known.ready(given)
        if known is None or ready is None:
            return None
        if known is not all_known[0]:
            self._remember(given.key, known)
        return functools.partial(known, given, ready)

    def _remember(self, key: Hashable, known: Repeated) -> None:
        others = [k for k in self._known.get(key, []) if k is not known]
        self._known[key] = [known, *others][:_MOST_LOOKS]

    def learn(
        self,
        given: Given | None,
        again: tuple[tuple[Any, ...], dict[str, Any]],
        call: Call,
        step: Step,
        ran: Ran,
        returned: Any,
    ) -> None:
        """Remember how a call that went the whole way is repeated, if it can be.

        Args:
            given: what the call looked like before it ran.
            again: its arguments, positional and by name.
            call: the call taken apart.
            step: what it ran.
            ran: what that was given and made.
            returned: what the caller gets.
        """
        if given is None:
            return
        # The step has run and its arguments may be gone: nothing that comes of comparing what the
        # caller's classes compare may lose its results. Such a call is not repeated.
        with contextlib.suppress(Exception):
            now = self.given(*again) if given.objects else given
            known = now and _learned(given, now, call, step, ran, returned)
            if known:
                self._remember(given.key, known)


def _given(key: Hashable, flat: list[Any], opened: nnx.Opened | None) -> Given | None:
    """``None`` where a leaf is nothing that a call could be known by."""
    types = list(map(type, flat))
    metadata, sharing, again = [], [], []
    arrays: list[Any] = flat
    objects = opened is not None and (bool(opened.met) or nnx.any_variable(flat))
    if opened is not None and objects:
        nodes = [nnx.is_node(leaf) for leaf in flat]
        again = opened.again
        if sum(nodes) != len(again):
            return None  # An object that JAX does not open.
        variables = [leaf if nnx.is_variable(leaf) else None for leaf in flat]
        arrays = [
            (None if node else leaf) if variable is None else variable.get_raw_value()
            for leaf, variable, node in zip(flat, variables, nodes, strict=True)
        ]
        metadata = [None if v is None else v.get_metadata() for v in variables]
        sharing = _sharing(flat)
    avals: list[Any]
    if _compat.are_concrete(arrays):
        avals = [a.aval for a in arrays]
        shardings = [a.sharding for a in arrays]
        committed = [a.committed for a in arrays]
    else:
        avals = [_of_leaf(a) for a in arrays]
        if any(a is None for a in avals):
            return None
        concrete = [a if _compat.is_concrete(a) else None for a in arrays]
        shardings = [None if a is None else a.sharding for a in concrete]
        committed = [None if a is None else a.committed for a in concrete]
    looks = (types, metadata, sharing, again, avals, shardings, committed)
    return Given(key, flat, arrays, looks, sharing, objects)


def _sharing(flat: list[Any]) -> list[int]:
    """Equal numbers are one object in Python, and mean nothing."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(leaf), n) if isinstance(leaf, jax.Array) or nnx.is_object(leaf) else n
        for n, leaf in enumerate(flat)
    ]


def _of_leaf(leaf: Any) -> Any:
    """What must be equal of one leaf; ``None`` where nothing can be said."""
    if _compat.is_concrete(leaf):
        return leaf.aval
    if isinstance(leaf, np.ndarray | np.generic):
        return type(leaf), leaf.shape, leaf.dtype
    if isinstance(leaf, Tracer) or leaves.is_abstract(leaf) or nnx.is_object(leaf):
        return None
    if isinstance(leaf, jax.Array):
        return leaf.aval, leaf.sharding, leaf.committed  # Keys of random numbers.
    if leaves.is_arraylike(leaf):
        return type(leaf)
    hash(leaf)
    return type(leaf), leaf


def _learned(
    given: Given, now: Given, call: Call, step: Step, ran: Ran, returned: Any
) -> Repeated | None:
    order = _order(given, call)
    made = {id(array): n for n, array in enumerate(ran.made)}
    updates = _updates(given, now, made)
    if order is None or updates is None:
        return None
    numbers = []
    for n, (leaf, used) in enumerate(zip(call.leaves, ran.ready, strict=True)):
        if not isinstance(leaf, jax.Array) and not isinstance(used, jax.Array):
            numbers.append(n)
        elif used is not leaf:
            return None  # It was copied, or moved to where the plan has it.
    ids = [id(array) for array in (*step.traced.program.consts, *ran.made, *ran.ready)]
    if len(set(ids)) < len(ids):
        return None
    returning = _returning(given, ran, returned)
    if returning is None:
        return None
    fixed = tuple(sorted(call.fixed.items()))
    return Repeated(given.looks, step, order, tuple(numbers), fixed, updates, *returning)


def _order(given: Given, call: Call) -> tuple[int, ...] | None:
    """The leaf that each argument of the compiled step is."""
    if not given.objects:
        found = [n for n in range(len(given.leaves)) if n not in call.fixed]
        return tuple(found) if len(found) == len(call.leaves) else None
    firsts = [
        n
        for n, (first, leaf) in enumerate(zip(given.sharing, given.leaves, strict=True))
        if n == first and not nnx.is_node(leaf)
    ]
    at = {id(given.arrays[n]): n for n in firsts}
    # NNX has an order of its own; leaves are told apart by what they are.
    if call.fixed or not (len(at) == len(firsts) == len(call.leaves)):
        return None
    if any(id(leaf) not in at for leaf in call.leaves):
        return None
    return tuple([at[id(leaf)] for leaf in call.leaves])


def _updates(given: Given, now: Given, made: dict[int, int]) -> tuple[tuple[int, int], ...] | None:
    """Variables that hold a result now; ``None`` where something else has changed in them."""
    if now is given:
        return ()
    same = (
        now.key == given.key
        and list(map(id, now.leaves)) == list(map(id, given.leaves))
        and now.looks[:_OF_OBJECTS] == given.looks[:_OF_OBJECTS]
    )
    if not same:
        return None
    found = []
    for n, (was, is_now) in enumerate(zip(given.arrays, now.arrays, strict=True)):
        if given.sharing[n] != n or is_now is was:
            continue
        if id(is_now) not in made:
            return None
        found.append((n, made[id(is_now)]))
    return tuple(found)


def _returning(
    given: Given, ran: Ran, returned: Any
) -> tuple[tuple[int, ...], tuple[Any, ...], Any] | None:
    """Picks, constants and structure of what was returned; ``None`` where they cannot be told."""
    own = {id(leaf) for leaf in given.leaves if nnx.is_object(leaf)}
    if given.objects:
        if nnx.has_modules(returned):
            return None  # One of the caller's own, perhaps, and not a copy of it.
        new = [v for v in nnx.variables_in(returned) if id(v) not in own]
        if len({*map(id, new)}) < len(new):
            return None  # One new variable in two places.

    def is_own(x: Any) -> bool:
        return id(x) in own

    flat, tree = jax.tree_util.tree_flatten(returned, is_leaf=is_own if own else None)
    parts = [*ran.made, *ran.ready, *given.leaves]
    at: dict[int, int] = {}
    for n, part in enumerate(parts):
        at.setdefault(id(part), n)
    picks, constants = [], []
    for leaf in flat:
        if not (isinstance(leaf, jax.Array | np.ndarray | np.generic) or nnx.is_object(leaf)):
            picks.append(len(parts) + len(constants))
            constants.append(leaf)
        elif id(leaf) in at:
            picks.append(at[id(leaf)])
        else:
            return None
    return tuple(picks), tuple(constants), tree
