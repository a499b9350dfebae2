"""The arguments of a function that goes through its batch in parts: which are split, and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.errors import MicrobatchError
from jaxmem.program import nnx
from jaxmem.program.combining import argument_of
from jaxmem.program.microbatches import nearest_divisors


@dataclass(frozen=True)
class BatchCall:
    """The arguments of one call by name, and what happens to each.

    Attributes:
        fun: the function that is called with each microbatch; ``name`` names it.
        values: every argument; ``positional`` of them were given by position.
        batch: names of those that are split; ``keys``, ``carried`` and ``objects`` likewise.
    """

    fun: Callable[..., Any]
    name: str
    values: dict[str, Any]
    positional: int
    batch: tuple[str, ...]
    keys: tuple[str, ...]
    carried: tuple[str, ...]
    objects: tuple[str, ...]

    @classmethod
    def take(
        cls,
        fun: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        argnums: tuple[int | str, ...] | None,
        key_argnums: tuple[int | str, ...] | None,
        reduce: Any,
    ) -> BatchCall:
        parameters = _parameters(fun)
        known = parameters[: len(args)]
        names = [*known, *(f"args[{n}]" for n in range(len(known), len(args)))]
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        order = [p for p in parameters if p in values]
        order += [n for n in values if n not in order]
        every = parameters if len(parameters) > len(order) else order
        keys = _resolve(name, "key_argnums", key_argnums or (), every, order)
        becoming = [argument_of(rule, every) for rule in jax.tree.leaves(reduce)]
        carried = tuple(n for n in becoming if n is not None)
        objects = tuple(n for n in order if nnx.has_objects(values[n]))
        taken = {*keys, *carried, *objects}
        if argnums is not None:
            batch = _resolve(name, "argnums", argnums, every, order)
        else:
            batch = tuple(n for n in order[1:] if n not in taken and _has_arrays(values[n]))
        call = cls(fun, name, values, len(args), batch, keys, carried, objects)
        call._check_roles(order)
        return call

    def _check_roles(self, order: list[str]) -> None:
        roles = {
            "split": self.batch,
            "carried": self.carried,
            "given new keys": self.keys,
            "an NNX object": self.objects,
        }
        for name in order:
            held = [role for role, names in roles.items() for n in names if n == name]
            if len(held) > 1:
                raise MicrobatchError(
                    f"argument {name} of {self.name} cannot be both {' and '.join(held)}."
                )
        missing = [n for n in self.carried if n not in self.values]
        if missing:
            raise MicrobatchError(
                f"reduce carries argument {missing[0]} of {self.name}, which was not given."
            )
        fixed = [n for n in order if n not in (*self.batch, *self.keys, *self.objects)]
        for name in fixed:
            if name not in self.carried and any(map(is_key, jax.tree.leaves(self.values[name]))):
                raise MicrobatchError(
                    f"argument {name} of {self.name} holds a random key, which would draw the same "
                    f"numbers in every microbatch. Use key_argnums={self._number(name)!r} to fold "
                    "in the number of the microbatch, or close over the key if that is meant."
                )

    def _number(self, name: str) -> int | str:
        position = list(self.values).index(name)
        return position if position < self.positional else name

    def check_batch(self) -> int:
        """The number of rows of the batch.

        Raises:
            MicrobatchError: nothing to split, or leaves that differ in their rows.
        """
        leaves = {
            name + jax.tree_util.keystr(path): (name, leaf)
            for name in self.batch
            for path, leaf in jax.tree.flatten_with_path(self.values[name])[0]
        }
        if not leaves:
            raise MicrobatchError(
                f"{self.name} has no batch argument to split: its arguments are "
                f"{', '.join(self.values) or 'none'}. Name those with a leading batch axis in "
                "argnums."
            )
        for path, (name, leaf) in leaves.items():
            if getattr(leaf, "shape", ()):
                continue
            what, fix = f"{leaf!r}", "Name only the batch arguments in argnums"
            if is_key(leaf):
                what, fix = "a random key", f"Use key_argnums={self._number(name)!r}"
            elif hasattr(leaf, "dtype"):
                what = f"a scalar {leaf.dtype.name}"
            raise MicrobatchError(
                f"argument {path} of {self.name} is {what}: no leading axis to split. {fix}."
            )
        sizes = {path: leaf.shape[0] for path, (_, leaf) in leaves.items()}
        first, *others = sizes
        for path in others:
            if sizes[path] != sizes[first]:
                raise MicrobatchError(
                    f"the batch arguments of {self.name} differ in their leading axis: {first} has "
                    f"{sizes[first]} rows and {path} has {sizes[path]}. Name those that are split "
                    "in argnums."
                )
        return sizes[first]

    def check_divisible(self, size: int, count: int) -> None:
        """Whether equal parts are possible, and on each device too where axes are explicit."""
        first = self.batch[0]
        if not size or size % count:
            divisors = " or ".join(map(str, nearest_divisors(size, count))) or "none"
            raise MicrobatchError(
                f"argument {first} of {self.name} has {size} rows, which do not split into {count} "
                f"equal microbatches. Use microbatches={divisors}, or pad the batch."
            )
        for leaf in jax.tree.leaves([self.values[n] for n in self.batch]):
            rows = _local_rows(leaf)
            if rows and rows % count:
                divisors = " or ".join(map(str, nearest_divisors(rows, count)))
                raise MicrobatchError(
                    f"argument {first} of {self.name} has {rows} of its {size} rows on each "
                    f"device, which do not split into {count} equal microbatches. Use "
                    f"microbatches={divisors}."
                )

    def again(self, changed: dict[str, Any]) -> Any:
        """The function called with some arguments replaced."""
        values = list({**self.values, **changed}.items())
        named = dict(values[self.positional :])
        return self.fun(*(value for _, value in values[: self.positional]), **named)


def _resolve(
    fun: str, option: str, given: Sequence[int | str], every: Sequence[str], order: Sequence[str]
) -> tuple[str, ...]:
    """Names of the arguments that an option lists."""
    found = []
    for n in given:
        if isinstance(n, int) and -len(order) <= n < 0:
            found.append(order[n])
        elif isinstance(n, int) and 0 <= n < len(every) and every[n] in order:
            found.append(every[n])
        elif n in order:
            found.append(str(n))
        else:
            raise MicrobatchError(
                f"there is no argument {n!r} in this call of {fun}, see {option}: it was given "
                f"{', '.join(order) or 'none'}."
            )
    return tuple(dict.fromkeys(found))


def _parameters(fun: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters, as far as they are known."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def _has_arrays(value: Any) -> bool:
    return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value))


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def has_explicit_axes(leaf: Any) -> bool:
    """Whether the type of an array says how it is laid out over a mesh."""
    mesh = jax.typeof(leaf).sharding.mesh
    return mesh.are_all_axes_explicit and not mesh.empty


def _local_rows(leaf: Any) -> int:
    """Rows on each device where the mesh says so in the type of the array, else 0."""
    explicit = has_explicit_axes(leaf)
    return jax.typeof(leaf).sharding.shard_shape(leaf.shape)[0] if explicit else 0
