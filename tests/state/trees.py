"""Trees that are saved and restored by several tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def blank(tree):
    """The same with other values."""

    def other(x):
        if isinstance(x, bool | int | float | str):
            return type(x)()
        if isinstance(x, np.ndarray | np.generic):
            return x * 0
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                jax.random.key_data(x) * 0, impl=str(jax.random.key_impl(x))
            )
        return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)

    return jax.tree.map(other, tree)


def assert_same(expected, found) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert type(a) is type(b), (a, b)
        if isinstance(a, jax.Array):
            assert a.dtype == b.dtype
            assert a.sharding == b.sharding
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
