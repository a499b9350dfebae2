"""``jax_debug_nans`` and ``jax_debug_infs``, which compiled programs do not always heed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KINDS: dict[str, Callable[[Any], Any]] = {"nan": np.isnan, "inf": np.isinf}


def found_in(kind: str, name: str) -> FloatingPointError:
    """The error of a step of which a result has a ``"nan"`` or an ``"inf"``."""
    return FloatingPointError(
        f"invalid value ({kind}) encountered in the results of {name}. jax.jit({name}.__wrapped__) "
        "says which operation it comes from, given the same arguments, as long as they were not "
        "donated."
    )


def checked(
    local: Callable[[Sequence[Any]], Sequence[Any]], name: str
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A step whose results are looked at where JAX is told to.

    JAX looks at those of the first call of a compiled program. The next ones may go past that: so
    they do, with jax 0.10.2, once a program for another backend was compiled in the process.
    """

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        made = local(arrays)
        kinds = _asked()
        if kinds:
            _check(made, kinds, name)
        return made

    return run


def _asked() -> dict[str, Callable[[Any], Any]]:
    config: Any = jax.config
    if not config.jax_debug_nans and not config.jax_debug_infs:
        return {}
    asked = {"nan": config.jax_debug_nans, "inf": config.jax_debug_infs}
    return {kind: is_one for kind, is_one in _KINDS.items() if asked[kind]}


def _check(made: Sequence[Any], kinds: dict[str, Callable[[Any], Any]], name: str) -> None:
    for array in made:
        if not isinstance(array, jax.Array) or not jnp.issubdtype(array.dtype, jnp.inexact):
            continue
        for shard in array.addressable_shards:
            part = np.asarray(shard.data)
            for kind, is_one in kinds.items():
                if is_one(part).any():
                    raise found_in(kind, name)
