"""Gradient accumulation: a gradient function over microbatches, one after the other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jaxmem.errors import MicrobatchError
from jaxmem.program import nnx
from jaxmem.program.batch import BatchCall, has_explicit_axes, is_key
from jaxmem.program.combining import Combined, Subtree, check_dtype, combined, subtrees
from jaxmem.program.microbatches import AUTO, Auto, chosen

Argnums = int | str | Sequence[int | str]

# What the loop does is shown at the line of the user's that calls it, not in this file.
source_info_util.register_exclusion(__file__)


def accumulate(
    grad_fun: Callable[..., Any],
    microbatches: int | Auto,
    *,
    argnums: Argnums | None = None,
    key_argnums: Argnums = (),
    reduce: Any = "mean",
    dtype: Any = None,
) -> Callable[..., Any]:
    """A function like ``grad_fun`` that goes through its batch in parts, so in less memory.

    For what ``jax.grad``, ``jax.value_and_grad`` and ``nnx.value_and_grad`` return. The parts run
    one after the other in a ``jax.lax.scan``: memory is the activations of one microbatch and one
    sum of the gradients. It returns what ``grad_fun`` returns for the whole batch, up to rounding,
    for losses that are means (or sums) over the rows of the batch.

    A mean of means is the mean only where every microbatch weighs the same. For a loss over the
    tokens that a mask leaves, return the sum and the number of tokens, use ``reduce="sum"``, and
    divide loss and gradients by the number afterwards.

    Microbatch ``i`` of ``n`` takes rows ``i, i + n, i + 2 n, ...``: where the batch is sharded
    over devices and ``n`` divides the rows of each, every row stays on its device.

    State goes from one microbatch to the next, and so differs from what the whole batch gives:

    - Flax NNX objects among the arguments are changed in place. ``nnx.BatchNorm`` normalises with
      the statistics of each microbatch and moves its averages once for each, in order; streams of
      ``nnx.Rngs`` go on, so dropout draws anew in each.
    - A result that an argument number in ``reduce`` stands for becomes that argument of the next
      microbatch: batch statistics of Flax Linen, for instance. The last one is returned.

    Args:
        grad_fun: called with each microbatch; it must not change with the number of rows.
        microbatches: how many parts; it must divide the batch. ``jaxmem.AUTO`` leaves the number
            to the planner of the fitted step it is called in. With 1 ``grad_fun`` is called as
            it is.
        argnums: numbers or names of the arguments to split along the leading axis of every leaf.
            By default all but the first, except NNX objects, arguments that ``key_argnums`` or
            ``reduce`` name, and values that are no arrays (``True``, ``None``, ``"train"``).
        key_argnums: arguments with random keys; each microbatch gets them folded in with its
            number (``jax.random.fold_in``). Other leaves of these arguments stay as they are.
        reduce: ``"mean"``, ``"sum"``, ``"last"`` or the number or name of an argument, or a tree
            of these that is a prefix of the result. Results that grow with the batch (one row for
            each example) are put together in the order of the batch, whatever it says.
        dtype: what means and sums of floats are added up in. By default float32, or the dtype of
            the result where that is wider: bfloat16 sums lose the low bits of each addend. The
            result is cast back to the dtype of ``grad_fun``'s.

    Returns:
        A function of the same arguments. Call it under ``jax.jit`` or in a fitted step.

    Raises:
        MicrobatchError: the batch does not split into ``microbatches``, or a result cannot be put
            together from its parts.
        AutoOutsideFitError: ``jaxmem.AUTO`` outside of a fitted step.

    Cost:
        ``grad_fun`` is traced three times. The kernels are smaller, which a GPU may use less
        well.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w, x, y):
    ...     return ((x @ w - y) ** 2).mean()
    >>> w, x, y = jnp.ones(3), jnp.arange(24.0).reshape(8, 3), jnp.ones(8)
    >>> value, grads = jaxmem.accumulate(jax.value_and_grad(loss), 4)(w, x, y)
    >>> bool(jnp.allclose(grads, jax.grad(loss)(w, x, y)))
    True
    """
    if not callable(grad_fun):
        raise MicrobatchError(
            f"accumulate needs a function such as jax.value_and_grad(loss), got {grad_fun!r}."
        )
    check_dtype(dtype)
    number = _checked_number(microbatches)
    asked = {"argnums": argnums, "key_argnums": key_argnums}
    options = {name: _listed(name, given) for name, given in asked.items()}
    name = getattr(grad_fun, "__name__", type(grad_fun).__name__)

    @functools.wraps(grad_fun)
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        call = BatchCall.take(grad_fun, name, args, kwargs, reduce=reduce, **options)
        size = call.check_batch()
        count = chosen(size, name) if number is AUTO else number
        call.check_divisible(size, count)
        if count == 1:
            return grad_fun(*args, **kwargs)
        return _Fold(call, count, reduce, dtype).run(size)

    return accumulated


def _checked_number(microbatches: Any) -> Any:
    if microbatches is AUTO:
        return AUTO
    try:
        number = operator.index(microbatches)
    except TypeError:
        number = 0
    if number < 1 or isinstance(microbatches, bool):
        raise MicrobatchError(
            f"microbatches is {microbatches!r}: it takes a number from 1 up, or jaxmem.AUTO inside "
            "of a fitted step."
        )
    return number


def _listed(option: str, given: Argnums | None) -> tuple[int | str, ...] | None:
    if given is None:
        return None
    several: tuple[Any, ...] = (given,)
    if isinstance(given, Sequence) and not isinstance(given, str):
        several = tuple(given)
    if not all(isinstance(n, int | str) and not isinstance(n, bool) for n in several):
        raise MicrobatchError(
            f"{option} is {given!r}: it takes the number or name of an argument, or several, such "
            f"as {option}=(1, 2)."
        )
    return several


@dataclass
class _Fold:
    """One pass over the microbatches of a call.

    The rows go to the microbatches as with ``optax.microbatch``, and results are added up alike,
    but the loop is our own. In that of optax 0.2.8 a microbatch sees neither what an earlier one
    left (batch statistics, the state of NNX objects) nor its own number (keys); sums are of the
    dtype of the results; the batch is copied into the order of its microbatches, which for images
    is what one wanted to save; and explicit mesh axes fail, because versions are compared as text
    and jax 0.10 is taken for older than 0.7.
    """

    call: BatchCall
    count: int
    reduce: Any
    dtype: Any

    def __post_init__(self):
        self.objects = _Objects(self.call)
        self.prefix = jax.tree.structure(self.reduce)
        self.pieces: list[Subtree] = []
        self.combining: list[list[Combined]] = []

    def run(self, size: int) -> Any:
        """The result for the whole batch of ``size`` rows."""
        each = size // self.count
        rows = {n: self.call.values[n] for n in self.call.batch}
        rows = jax.tree.map(lambda x: _in_rows(jnp.asarray(x), each, self.count), rows)

        def part(index: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, False), rows)

        def body(carry: Any, index: Any) -> tuple[Any, Any]:
            return self.update(carry, part(index), index)

        start = self.start(jax.eval_shape(part, 0))
        result, state = self.finish(*jax.lax.scan(body, start, jnp.arange(self.count)))
        self.objects.put_back(state)
        return result

    def start(self, rows: Any) -> Any:
        """The carry before the first microbatch; the shapes of results are found out here."""
        call, state = self.call, self.objects.given
        whole = {n: call.values[n] for n in call.batch}
        carried = {n: jax.tree.map(jnp.asarray, call.values[n]) for n in call.carried}
        part, full = (
            jax.eval_shape(self.microbatch, r, state, carried, 0)[0] for r in (rows, whole)
        )
        self.pieces = subtrees(self.reduce, part, full, list(call.values))
        for piece in self.pieces:
            if piece.becomes:
                _check_carried(call.name, piece, carried[piece.rule])
        self.combining = [
            [] if p.becomes else combined(p, self.count, self.dtype) for p in self.pieces
        ]
        return [[c.start() for c in several] for several in self.combining], state, carried

    def microbatch(self, rows: Any, state: Any, carried: Any, index: Any) -> tuple[Any, Any]:
        """The result of one microbatch, and the state of the objects after it."""
        values = self.call.values
        keys = {n: jax.tree.map(lambda k: _folded(k, index), values[n]) for n in self.call.keys}
        objects = self.objects.merged(state)
        result = self.call.again({**rows, **carried, **keys, **objects})
        return result, self.objects.state(objects)

    def update(self, carry: Any, rows: Any, index: Any) -> tuple[Any, Any]:
        """The carry after one more microbatch, and what it has for each row."""
        sums, state, carried = carry
        result, state = self.microbatch(rows, state, carried, index)
        values = self.prefix.flatten_up_to(result)
        added, each = [], []
        for piece, several, held, value in zip(
            self.pieces, self.combining, sums, values, strict=True
        ):
            if piece.becomes:
                carried = {**carried, piece.rule: jax.tree.map(_strong, value)}
            leaves = jax.tree.leaves(value) if several else []
            added.append([c.add(h, x) for c, h, x in zip(several, held, leaves, strict=True)])
            each.append(
                [x if c.rule == "rows" else None for c, x in zip(several, leaves, strict=True)]
            )
        return (added, state, carried), each

    def finish(self, carry: Any, stacked: Any) -> Any:
        """The result for the whole batch, and the state that the objects are left in."""
        sums, state, carried = carry
        results = []
        for n, (piece, several) in enumerate(zip(self.pieces, self.combining, strict=True)):
            together = zip(several, sums[n], stacked[n], strict=True)
            leaves = [c.finish(held, rows) for c, held, rows in together]
            tree = jax.tree.structure(piece.whole)
            results.append(carried[piece.rule] if piece.becomes else tree.unflatten(leaves))
        return self.prefix.unflatten(results), state


def _in_rows(x: jax.Array, each: int, count: int) -> jax.Array:
    """``[each, count, ...]``: microbatch ``i`` is ``[:, i]``, and nothing is copied or moved."""
    shape = (each, count, *x.shape[1:])
    if not has_explicit_axes(x):
        return jnp.reshape(x, shape)
    mesh, (axis, *others) = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    out = jax.NamedSharding(mesh, jax.P(axis, None, *others))
    return jnp.reshape(x, shape, out_sharding=out)


def _check_carried(fun: str, piece: Subtree, given: Any) -> None:
    """A carried argument must keep its structure, shapes and dtypes."""
    before = jax.tree.map(lambda x: (jnp.shape(x), x.dtype), given)
    after = jax.tree.map(lambda x: (x.shape, x.dtype), piece.part)
    if before != after:
        raise MicrobatchError(
            f"result{piece.path} of {fun} becomes argument {piece.rule} of the next microbatch, "
            f"but is {_shapes(piece.part)} and that is {_shapes(given)}."
        )


def _shapes(tree: Any) -> str:
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree))


def _strong(value: Any) -> Any:
    weak = getattr(value, "weak_type", False)
    return jax.lax.convert_element_type(value, value.dtype) if weak else value


def _folded(leaf: Any, index: Any) -> Any:
    """Random keys with the number of the microbatch folded in; anything else as it is."""
    legacy = getattr(leaf, "dtype", None) == jnp.uint32 and leaf.shape[-1:] == (2,)
    if not (is_key(leaf) or legacy):
        return leaf
    fold = jax.random.fold_in
    for _ in range(leaf.ndim - legacy):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(leaf, index)


class _Objects:
    """The NNX objects of a call: their arrays go through the loop, and back into them after it."""

    def __init__(self, call: BatchCall):
        self.call = call
        self.trees = {n: call.values[n] for n in call.objects}
        self.leaves, self.tree = jax.tree.flatten(self.trees, is_leaf=nnx.is_object)
        self.objects = tuple(leaf for leaf in self.leaves if nnx.is_object(leaf))
        self.given: Any = ()
        if self.objects:
            self.graphdef, self.given = nnx.pure(self.objects)

    def merged(self, state: Any) -> dict[str, Any]:
        """The arguments that hold objects, with new objects of these arrays."""
        fresh = iter(nnx.objects_of(self.graphdef, state) if self.objects else ())
        leaves = [next(fresh) if nnx.is_object(leaf) else leaf for leaf in self.leaves]
        return self.tree.unflatten(leaves)

    def state(self, trees: dict[str, Any]) -> Any:
        """The arrays of the objects after a microbatch.

        Raises:
            MicrobatchError: the objects hold other things than before.
        """
        if not self.objects:
            return ()
        leaves = jax.tree.leaves(trees, is_leaf=nnx.is_object)
        graphdef, state = nnx.pure(tuple(leaf for leaf in leaves if nnx.is_object(leaf)))
        if graphdef != self.graphdef:
            raise MicrobatchError(
                f"{self.call.name} changes the structure of an NNX object ({self.call.objects[0]}) "
                "in a microbatch, by adding, removing or setting an attribute (nnx.sow does that). "
                "Make it before, or return the value instead."
            )
        return state

    def put_back(self, state: Any) -> None:
        """Update the caller's own objects."""
        if self.objects:
            nnx.update(self.objects, state)
