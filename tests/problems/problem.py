"""What a problem is, and how to run any of them as one pure function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Step = Callable[..., Any]


@dataclass(frozen=True)
class Problem:
    """A whole train step with its example arguments.

    Attributes:
        name: key of the problem in ``PROBLEMS``.
        make: returns a fresh ``(step, args)``; called again wherever arguments were donated.
        donate: positions of the arguments that are state, safe to donate.
        tags: what the step contains (``"scan"``, ``"bf16"``, ...) and which library it is written
            with: exactly one of ``"plain"``, ``"linen"``, ``"nnx"``, ``"equinox"``.
    """

    name: str
    make: Callable[[], tuple[Step, tuple]]
    donate: tuple[int, ...] = ()
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PureStep:
    """A problem as a function from arrays to arrays, whatever library it is written with.

    Attributes:
        function: ``function(*args) -> (outputs, new_objects)``; ``new_objects`` is the state of the
            NNX objects after the step, ``None`` for every other library.
        args: pytrees whose leaves are all arrays.
        donate: positions in ``args`` that are state.
    """

    function: Step
    args: tuple
    donate: tuple[int, ...]

    def compile(self, **options) -> jax.stages.Compiled:
        """The keep-all program: compiled by XLA as it is, with the state donated.

        Args:
            **options: ``compiler_options``.
        """
        lowered = jax.jit(self.function, donate_argnums=self.donate).lower(*self.args)
        return lowered.compile(compiler_options=options)


def pure(problem: Problem) -> PureStep:
    """The problem as a pure function of arrays: the reference that transforms are compared to.

    NNX objects are split into their state, which comes back as the second output. Leaves of an
    Equinox module that are not arrays (activation functions) are closed over.
    """
    step, args = problem.make()
    if "nnx" in problem.tags:
        return _pure_nnx(step, args, problem.donate)
    arrays, static = eqx.partition(args, _is_array)

    def function(*arrays):
        return eqx.filter(step(*eqx.combine(arrays, static)), eqx.is_array), None

    return PureStep(function, arrays, problem.donate)


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _pure_nnx(step: Step, args: tuple, donate: tuple[int, ...]) -> PureStep:
    objects = args[: len(donate)]
    if donate != tuple(range(len(donate))):
        raise ValueError("an NNX problem takes its objects first")
    graphdef, state = nnx.split(objects)

    def function(state, *batch):
        objects = nnx.merge(graphdef, state)
        outputs = step(*objects, *batch)
        return outputs, nnx.state(objects)

    return PureStep(function, (state, *args[len(donate) :]), (0,))


def random_numbers(seed: int) -> np.random.Generator:
    """A generator for weights and data: drawn by NumPy, so equal on every JAX version."""
    return np.random.default_rng(seed)


def weight(rng: np.random.Generator, *shape: int, dtype=jnp.float32) -> jax.Array:
    """A weight ``[..., fan_in, fan_out]`` that keeps the variance of what it multiplies."""
    return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), dtype)


def normal(rng: np.random.Generator, *shape: int, dtype=jnp.float32) -> jax.Array:
    """Standard normal data."""
    return jnp.asarray(rng.standard_normal(shape), dtype)


def initialised(abstract: Any, rng: np.random.Generator) -> Any:
    """Abstract variables of Flax filled in by their names, without compiling any initialiser.

    Kernels and embeddings are normal with deviation 0.1, scales and variances 1, keys
    ``jax.random.key(0)`` or a split of it, and everything else 0.

    Raises:
        ValueError: if a matrix has a name that says nothing.
    """

    def fill(path, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        names = {str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path}
        if names & {"kernel", "embedding"}:
            return 0.1 * normal(rng, *leaf.shape, dtype=leaf.dtype)
        if not leaf.dtype.kind == "u" and not names & {"scale", "var", "bias", "mean"}:
            raise ValueError(f"no rule for {jax.tree_util.keystr(path)}")
        return jnp.full(leaf.shape, 1 if names & {"scale", "var"} else 0, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, abstract)


def initialised_module(make: Callable[[], nnx.Module], rng: np.random.Generator) -> nnx.Module:
    """An NNX module with its state ``initialised``."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, initialised(state, rng))


def integers(rng: np.random.Generator, high: int, *shape: int) -> jax.Array:
    """Integers below ``high``, for tokens and labels."""
    return jnp.asarray(rng.integers(high, size=shape), jnp.int32)


def at_least_float32(x: jax.Array) -> jax.Array:
    """``x`` in float32, or in float64 if that is what it is in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def layer_norm(x: jax.Array) -> jax.Array:
    """``x`` with mean 0 and variance 1 along its last axis, computed in at least float32."""
    wide = at_least_float32(x)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """``x`` with a share ``rate`` of its values zeroed; the mask is the same in every precision."""
    keep = jax.random.uniform(key, x.shape, jnp.float32) >= rate
    return jnp.where(keep, x / (1 - rate), 0)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy; logits ``[..., classes]``, labels ``[...]``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# eps is far above the rounding noise of a gradient: with Adam's usual 1e-8 the first update is the
# sign of the gradient, and the sign of a gradient that is zero but for rounding is a coin toss.
ADAM = optax.adam(1e-3, eps=1e-3)
ADAMW = optax.adamw(1e-3, eps=1e-3)
MOMENTUM = optax.sgd(1e-2, momentum=0.9)


def train_step(loss: Callable, optimizer: optax.GradientTransformation, *, aux=False) -> Step:
    """``step(params, opt_state, *batch) -> (params, opt_state, loss[, aux])`` on pytrees."""

    def step(params, opt_state, *batch):
        value, grads = jax.value_and_grad(loss, has_aux=aux)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, *value) if aux else (params, opt_state, value)

    return step


def plain(name: str, make: Callable[[], tuple[Step, tuple]], *tags: str, donate=(0, 1)) -> Problem:
    """A problem on plain pytrees, ``(params, opt_state)`` donated unless said otherwise."""
    return Problem(name, make, donate, frozenset({"plain", *tags}))
