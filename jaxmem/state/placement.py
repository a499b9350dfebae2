"""Put arguments where a plan wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmem.program import nnx


def place(args: tuple[Any, ...], hosted: Mapping[int, Any] | None = None) -> tuple[Any, ...]:
    """The arguments on the device, as committed as they were, or where the plan hosts them.

    Arrays that already are on a device stay there; NumPy arrays are moved; abstract values and
    everything that is not an array are returned as they are. An NNX object is returned itself:
    what it shares with others stays shared.

    Args:
        args: the arguments.
        hosted: for the ``id`` of each leaf that lives in host memory, its sharding there.

    >>> import numpy as np
    >>> type(place((np.ones(3), "static"))[0]).__name__
    'ArrayImpl'
    """
    there = hosted or {}

    def placed(leaf: Any) -> Any:
        if nnx.is_object(leaf):
            nnx.update_arrays(leaf, moved)
            return leaf
        return moved(leaf)

    def moved(leaf: Any) -> Any:
        sharding = there.get(id(leaf))
        return _on_device(leaf) if sharding is None else jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map(placed, args, is_leaf=nnx.is_object)


def _on_device(leaf: Any) -> Any:
    return jax.device_put(leaf) if isinstance(leaf, np.ndarray) else leaf
