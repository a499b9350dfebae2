"""How the results of the microbatches become the result of the whole batch, leaf by leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.errors import MicrobatchError

Rule = str | int
_ADDED = ("mean", "sum")
_RULES = (*_ADDED, "last")


@dataclass(frozen=True)
class Subtree:
    """A part of the result under one rule.

    Attributes:
        rule: ``"mean"``, ``"sum"``, ``"last"``, or the name of the argument it becomes.
        becomes: whether the rule names an argument.
        path: where it sits in the result, as it is printed.
        part: shapes and dtypes that a microbatch gives; ``whole`` those of the whole batch.
    """

    rule: str
    becomes: bool
    path: str
    part: Any
    whole: Any


def subtrees(reduce: Any, part: Any, whole: Any, arguments: Sequence[str]) -> list[Subtree]:
    """The parts of the result that ``reduce`` tells apart, in order.

    Raises:
        MicrobatchError: ``reduce`` is no prefix of the result or holds no rule.
    """
    if jax.tree.structure(part) != jax.tree.structure(whole):
        raise MicrobatchError(
            "accumulate needs results of one tree structure; a microbatch gives "
            f"{jax.tree.structure(part)}, the whole batch {jax.tree.structure(whole)}."
        )
    rules, prefix = jax.tree.flatten(reduce)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(reduce)[0]]
    try:
        parts, wholes = prefix.flatten_up_to(part), prefix.flatten_up_to(whole)
    except (ValueError, TypeError) as error:
        raise MicrobatchError(
            f"reduce={reduce!r} does not have the structure of what the function returns, "
            f"{jax.tree.structure(part)}: {error}"
        ) from error
    found = []
    for rule, path, a, b in zip(rules, paths, parts, wholes, strict=True):
        name = argument_of(rule, arguments)
        found.append(Subtree(name or rule, name is not None, path, a, b))
    return found


def argument_of(rule: Rule, arguments: Sequence[str]) -> str | None:
    """The name of the argument that a rule stands for; ``None`` for a mean, sum or last value.

    Raises:
        MicrobatchError: it stands for nothing.
    """
    if rule in _RULES:
        return None
    if isinstance(rule, int) and not isinstance(rule, bool) and 0 <= rule < len(arguments):
        return arguments[rule]
    if rule in arguments:
        return str(rule)
    raise MicrobatchError(
        f'reduce holds {rule!r}: it takes "mean", "sum", "last", or the number or name of the '
        f"argument that a result becomes for the next microbatch ({', '.join(arguments)})."
    )


@dataclass(frozen=True)
class Combined:
    """One leaf of the result: from an empty carry over the microbatches to the final value.

    Attributes:
        rule: ``"mean"``, ``"sum"``, ``"last"`` or ``"rows"``.
        count: the number of microbatches.
        part: shape and dtype of one microbatch's value; ``whole`` those of the final value.
        dtype: what it is added up in.
        axis: for ``"rows"`` the axis that grows with the batch.
    """

    rule: str
    count: int
    part: Any
    whole: Any
    dtype: Any
    axis: int = 0

    def start(self) -> Any:
        """What the carry is before the first microbatch; ``None`` where nothing is carried."""
        if self.rule == "rows" or self.part.dtype == jax.dtypes.float0:
            return None
        sharding = explicit_sharding(self.part)
        return jnp.zeros(self.part.shape, self.dtype, out_sharding=sharding)

    def add(self, carry: Any, value: Any) -> Any:
        """The carry after one more microbatch."""
        if carry is None:
            return None
        if value.dtype != self.dtype or getattr(value, "weak_type", False):
            value = jax.lax.convert_element_type(value, self.dtype)
        return carry + value if self.rule in _ADDED else value

    def finish(self, carry: Any, stacked: Any) -> Any:
        """The final value, of the dtype that the function gives.

        Args:
            carry: after the last microbatch.
            stacked: for ``"rows"`` the values of all microbatches, ``[microbatches, ...]``.
        """
        if self.rule == "rows":
            # Row k of microbatch i is row k * count + i of the batch.
            rows = jnp.moveaxis(stacked, 0, self.axis + 1)
            return jnp.reshape(rows, self.whole.shape, out_sharding=explicit_sharding(self.whole))
        if carry is None:
            return np.zeros(self.whole.shape, self.whole.dtype)
        if self.rule == "mean":
            carry = carry / self.count
        return carry if carry.dtype == self.whole.dtype else carry.astype(self.whole.dtype)


def explicit_sharding(shape: Any) -> Any:
    """How a result is laid out where mesh axes are explicit, else ``None``."""
    sharding = getattr(shape, "sharding", None)
    return sharding if sharding is not None and sharding.mesh.are_all_axes_explicit else None


def combined(subtree: Subtree, count: int, dtype: Any) -> list[Combined]:
    """How each leaf of a part of the result is combined.

    Raises:
        MicrobatchError: a leaf that cannot be combined so.
    """
    parts = jax.tree.flatten_with_path(subtree.part)[0]
    found = []
    for (path, part), whole in zip(parts, jax.tree.leaves(subtree.whole), strict=True):
        where = f"result{subtree.path}{jax.tree_util.keystr(path)}"
        axis = _growing(part.shape, whole.shape, count, where)
        rule = subtree.rule if axis is None else "rows"
        if rule in _ADDED:
            _check_added(rule, part, where)
        wide = _wide(part.dtype, dtype) if rule in _ADDED else part.dtype
        found.append(Combined(rule, count, part, whole, wide, axis or 0))
    return found


def _growing(part: tuple[int, ...], whole: tuple[int, ...], count: int, where: str) -> int | None:
    """The axis on which the whole batch has ``count`` times the rows; ``None`` for equal shapes."""
    if part == whole:
        return None
    if len(part) == len(whole):
        grown = [n for n, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b]
        if len(grown) == 1 and part[grown[0]] * count == whole[grown[0]]:
            return grown[0]
    raise MicrobatchError(
        f"{where} is {list(whole)} for the whole batch and {list(part)} for one of {count} "
        "microbatches: such results cannot be put together. Leave it out of what the function "
        "returns, or reduce it there."
    )


def _check_added(rule: str, part: Any, where: str) -> None:
    number = jnp.issubdtype(part.dtype, jnp.number) or part.dtype == jax.dtypes.float0
    if number and (rule == "sum" or not jnp.issubdtype(part.dtype, jnp.integer)):
        return
    what = "keys" if jnp.issubdtype(part.dtype, jax.dtypes.extended) else part.dtype.name
    raise MicrobatchError(
        f"{where} is {what}{list(part.shape)}, which has no {rule} of its own dtype. Say what it "
        'is in reduce, for instance reduce=(("mean", "sum"), "mean") for the ((loss, count), '
        'gradients) of value_and_grad(has_aux=True), or "last".'
    )


def _wide(dtype: Any, asked: Any) -> Any:
    """What values of ``dtype`` are added up in."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    if asked is not None:
        return jnp.dtype(asked)
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def check_dtype(dtype: Any) -> None:
    """Whether sums can be kept in ``dtype``."""
    try:
        good = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        good = False
    if not good:
        raise MicrobatchError(
            f"dtype is {dtype!r}: gradients are added up in a floating dtype, such as jnp.float32."
        )
