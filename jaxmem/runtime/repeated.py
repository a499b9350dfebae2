"""Calls that look like an earlier one: their arrays go to the compiled step as they are.

Taking any call apart (NNX's graph of objects, the key of a signature, errors that name a leaf) is
10 to 60 us of Python for each leaf. A ResNet-152 of 1244 leaves, which computes for 159 ms on an
H200, took 191 with it. So a call that went the whole way leaves behind what it looked like, which
argument each array was, and where its results came from; one that looks the same in all of that
only repeats it, and takes what ``jax.jit`` takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmem import _compat
from jaxmem.program import leaves, nnx
from jaxmem.program.calling import Call, Caller
from jaxmem.runtime.step import Ran, Step, as_array, rebuilding

# Looks of one structure that are remembered: a state is given uncommitted, placed, and returned.
_MOST_LOOKS = 8
# Structures whose calls could not be repeated so often are not tried again.
_MOST_FAILURES = 3


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments of one call, flat, with NNX variables as leaves.

    Attributes:
        key: structure, static arguments and settings.
        leaves: arrays, numbers, variables and what else the structure holds.
        arrays: the same, with what it holds in place of each variable.
        looks: equal for calls that may share a compiled step.
        sharing: for each leaf the first that is the same object; empty without variables.
    """

    key: Hashable
    leaves: list[Any]
    arrays: list[Any]
    looks: tuple[list[Any], ...]
    sharing: list[int]


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
            bool(given.leaves[n] == value) for n, value in self.fixed
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
    _failed: dict[Hashable, int] = field(default_factory=dict)

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """What a call looks like; ``None`` where that cannot be told.

        Such a call goes the whole way, on which what is wrong with it is found and named.
        """
        dynamic, named, static = self.caller.apart(args, kwargs)
        try:
            flat, tree = jax.tree_util.tree_flatten(
                (tuple(dynamic.values()), named), is_leaf=nnx.variable_test()
            )
            fixed = tuple([(n, type(v), v) for n, v in static])
            key = (tree, tuple(dynamic), fixed, self.caller.settings())
            hash(key)
            return _looks(key, flat)
        except (TypeError, ValueError, RecursionError):
            return None

    def find(self, given: Given | None) -> Callable[[], Any] | None:
        """Runs the call, if it can be repeated."""
        if given is None:
            return None
        for known in self._known.get(given.key, ()):
            if known.takes(given):
                ready = known.ready(given)
                return None if ready is None else functools.partial(known, given, ready)
        return None

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
        if given is None or self._failed.get(given.key, 0) >= _MOST_FAILURES:
            return
        now = self.look(*again) if given.sharing else given
        known = None
        if now is not None:
            known = _learned(given, now, call, step, ran, returned)
        if known is None:
            self._failed[given.key] = self._failed.get(given.key, 0) + 1
            return
        others = self._known.get(given.key, [])
        self._known[given.key] = [known, *others][:_MOST_LOOKS]


def _looks(key: Hashable, flat: list[Any]) -> Given | None:
    """``None`` where a leaf is nothing that a call could be known by."""
    types = list(map(type, flat))
    arrays, metadata, sharing = flat, [], []
    if nnx.any_variable(flat):
        variables = [leaf if nnx.is_variable(leaf) else None for leaf in flat]
        arrays = [
            leaf if variable is None else variable.get_raw_value()
            for leaf, variable in zip(flat, variables, strict=True)
        ]
        metadata = [None if v is None else v.get_metadata() for v in variables]
        first: dict[int, int] = {}
        sharing = [first.setdefault(id(leaf), n) for n, leaf in enumerate(flat)]
    if _compat.are_concrete(arrays):
        avals = [a.aval for a in arrays]
        shardings = [a.sharding for a in arrays]
        committed = [a.committed for a in arrays]
    else:
        avals = [_look(a) for a in arrays]
        if any(a is None for a in avals):
            return None
        concrete = [a if _compat.is_concrete(a) else None for a in arrays]
        shardings = [None if a is None else a.sharding for a in concrete]
        committed = [None if a is None else a.committed for a in concrete]
    looks = (types, avals, shardings, committed, metadata, sharing)
    return Given(key, flat, arrays, looks, sharing)


def _look(leaf: Any) -> Any:
    """What must be equal of one leaf."""
    if _compat.is_concrete(leaf):
        return leaf.aval
    if isinstance(leaf, np.ndarray | np.generic):
        return type(leaf), leaf.shape, leaf.dtype
    if isinstance(leaf, Tracer) or leaves.is_abstract(leaf):
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
    if order is None or updates is None or len(made) < len(ran.made):
        return None
    numbers = []
    for n, (leaf, used) in enumerate(zip(call.leaves, ran.ready, strict=True)):
        if not isinstance(leaf, jax.Array):
            numbers.append(n)
        elif used is not leaf:
            return None  # It was copied, or moved to where the plan has it.
    ids = [*map(id, ran.made), *map(id, ran.ready)]
    if len(set(ids)) < len(ids):
        return None
    returning = _returning(given, ran, returned)
    if returning is None:
        return None
    fixed = tuple(sorted(call.fixed.items()))
    return Repeated(given.looks, step, order, tuple(numbers), fixed, updates, *returning)


def _order(given: Given, call: Call) -> tuple[int, ...] | None:
    """The leaf that each argument of the compiled step is."""
    if not given.sharing:
        return tuple([n for n in range(len(given.leaves)) if n not in call.fixed])
    firsts = [n for n, first in enumerate(given.sharing) if n == first]
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
    types, *_, metadata, sharing = given.looks
    same = (
        now.key == given.key
        and list(map(id, now.leaves)) == list(map(id, given.leaves))
        and now.looks[0] == types
        and now.looks[-2:] == (metadata, sharing)
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
    own = {id(leaf) for leaf in given.leaves} if given.sharing else set()
    is_variable = nnx.variable_test()
    if given.sharing and nnx.has_modules(returned):
        return None  # One of the caller's own, perhaps, and not a copy of it.

    def is_own(x: Any) -> bool:
        return is_variable is not None and is_variable(x) and id(x) in own

    flat, tree = jax.tree_util.tree_flatten(returned, is_leaf=is_own)
    parts = [*ran.made, *ran.ready, *given.leaves]
    at: dict[int, int] = {}
    for n, part in enumerate(parts):
        at.setdefault(id(part), n)
    picks, constants = [], []
    for leaf in flat:
        if not (isinstance(leaf, jax.Array | np.ndarray | np.generic) or is_own(leaf)):
            picks.append(len(parts) + len(constants))
            constants.append(leaf)
        elif id(leaf) in at:
            picks.append(at[id(leaf)])
        else:
            return None
    return tuple(picks), tuple(constants), tree
