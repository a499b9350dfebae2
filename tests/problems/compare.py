"""Judging outputs: leaf by leaf against a reference, and against a float64 reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .problem import Step

# How far two roundings of the same graph may be apart, in epsilons, relative to the largest value
# of the leaf. The problems themselves differ by at most 105 epsilons in float32 and 2 in bfloat16
# when XLA:CPU compiles them without fusion, vectorisation and excess precision.
MULTIPLES = {2: 16.0, 4: 512.0, 8: 512.0}
_TF32_EPS = 2.0**-10


def _as_numbers(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def _by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def relative_error(reference: np.ndarray, output: np.ndarray) -> float:
    """Largest difference over the largest value of the reference; inf and nan must coincide."""
    wide = np.complex128 if np.iscomplexobj(reference) else np.float64
    a, b = np.asarray(reference, wide), np.asarray(output, wide)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf
    a, b = a[finite], b[finite]
    if not a.size or np.array_equal(a, b):
        return 0.0
    difference = np.abs(a - b).max()
    return float(difference / max(np.abs(a).max(), np.finfo(np.float32).tiny))


def _products_are_tf32() -> bool:
    """On a GPU float32 matrix products are, unless JAX is told otherwise."""
    asked = jax.config.jax_default_matmul_precision
    return jax.default_backend() == "gpu" and asked in (None, "default", "tensorfloat32")


def _tolerance(tree: Any, multiple: float | None) -> tuple[float, str]:
    """Allowed relative error, and how it came about, by the coarsest float dtype in the tree."""
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    coarsest = max(floats, key=lambda dtype: jnp.finfo(dtype).eps, default=jnp.dtype("float32"))
    if multiple is None and coarsest == jnp.float32 and _products_are_tf32():
        return MULTIPLES[2] * _TF32_EPS, f"{MULTIPLES[2]:g} eps of TF32"
    if multiple is None:
        multiple = MULTIPLES[jnp.finfo(coarsest).bits // 8]
    return multiple * float(jnp.finfo(coarsest).eps), f"{multiple:g} eps of {coarsest}"


def _complaint(reference: Any, output: Any, limit: float, meaning: str) -> str | None:
    """What is wrong with one leaf, or None."""
    if str(jnp.result_type(reference)) != str(jnp.result_type(output)):
        return f"dtype {jnp.result_type(output)} instead of {jnp.result_type(reference)}"
    a, b = _as_numbers(reference), _as_numbers(output)
    if a.shape != b.shape:
        return f"shape {b.shape} instead of {a.shape}"
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        different = int((a != b).sum())
        return f"{different} of {a.size} {a.dtype} values differ" if different else None
    error = relative_error(a, b)
    if not error <= limit:
        return f"relative error {error:.3g} exceeds {limit:.3g} = {meaning}"
    return None


def assert_same(reference: Any, outputs: Any, *, multiple: float | None = None) -> None:
    """Fails unless two pytrees hold the same values up to rounding.

    Structure, shapes, dtypes, integers, booleans and random keys must be equal. Of a float leaf,
    ``max |a - b| <= multiple * eps * max |reference leaf|``, with the epsilon of the coarsest float
    dtype in the reference: a float32 loss of a bfloat16 net is no more exact than the net.

    Args:
        reference: what the untransformed step returned.
        outputs: what the transformed step returned.
        multiple: allowed multiple of epsilon; by default ``MULTIPLES`` of that dtype's bytes. 0
            demands equal values.

    Raises:
        AssertionError: names every leaf that differs, by its path, and by how much.

    >>> assert_same({"w": jnp.ones(2)}, {"w": jnp.ones(2)})
    """
    expected, got = _by_path(reference), _by_path(outputs)
    structures = jax.tree.structure(reference), jax.tree.structure(outputs)
    if structures[0] != structures[1]:
        missing, extra = sorted(expected.keys() - got), sorted(got.keys() - expected)
        raise AssertionError(
            f"structures differ: missing {missing}, unexpected {extra}\n"
            f"  reference: {structures[0]}\n  outputs:   {structures[1]}"
        )
    limit = _tolerance(reference, multiple)
    complaints = {path: _complaint(leaf, got[path], *limit) for path, leaf in expected.items()}
    wrong = [f"  {path or '(root)'}: {text}" for path, text in complaints.items() if text]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(expected)} leaves differ:\n" + "\n".join(wrong))


def in_float64(step: Step, args: tuple) -> Any:
    """Outputs of ``step`` with every float argument, and so the whole computation, in float64.

    Only for steps that take their precision from their arguments (those on plain pytrees, and
    ``random_step``); random numbers must be drawn in a stated dtype, as ``problem.dropout`` does.
    """
    with jax.enable_x64(True):

        def widen(leaf):
            leaf = jnp.asarray(leaf)
            return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        args = jax.tree.map(widen, args)
        # Level 0 compiles in half the time, and its rounding is no worse.
        options = {"xla_backend_optimization_level": 0}
        return jax.jit(step).lower(*args).compile(compiler_options=options)(*args)


def error_vs_float64(exact: Any, outputs: Any) -> dict[str, float]:
    """Relative error of each float leaf of ``outputs`` against ``in_float64``, by its path."""
    expected, got = _by_path(exact), _by_path(outputs)
    if expected.keys() != got.keys():
        raise AssertionError(f"structures differ: {sorted(expected.keys() ^ got.keys())}")
    return {
        path: relative_error(np.asarray(leaf), np.asarray(got[path], np.float64))
        for path, leaf in expected.items()
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    }


def assert_no_less_exact(
    exact: Any, reference: Any, outputs: Any, *, factor: float = 4, floor: float = 16
) -> None:
    """Fails where ``outputs`` are further from float64 than a few times what ``reference`` is.

    This is the fair judge of a rewrite of an ill-conditioned program, whose two float32 versions
    may be far apart and equally good.

    Args:
        exact: outputs of ``in_float64``.
        reference: outputs of the untransformed step in its own precision.
        outputs: outputs of the transformed step.
        factor: how many times the largest error of the reference is allowed.
        floor: an error below this multiple of float32's epsilon never fails.

    Raises:
        AssertionError: names each leaf and both errors.
    """
    before, after = error_vs_float64(exact, reference), error_vs_float64(exact, outputs)
    least = floor * float(np.finfo(np.float32).eps)
    wrong = [
        f"  {path}: error {error:.3g}, untransformed {before[path]:.3g}"
        for path, error in after.items()
        if not error <= max(factor * before[path], least)
    ]
    if wrong:
        raise AssertionError("less exact than the untransformed step:\n" + "\n".join(wrong))
