"""Put arguments where a plan wants them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxmem.program import nnx


def place(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments on the device, as committed as they were.

    Arrays that already are on a device stay there; NumPy arrays are moved; abstract values and
    everything that is not an array are returned as they are. An NNX object is returned itself:
    what it shares with others stays shared.

    >>> import numpy as np
    >>> type(place((np.ones(3), "static"))[0]).__name__
    'ArrayImpl'
    """
    return jax.tree_util.tree_map(_placed, args, is_leaf=nnx.is_object)


def _placed(leaf: Any) -> Any:
    if nnx.is_object(leaf):
        nnx.update_arrays(leaf, _on_device)
        return leaf
    return _on_device(leaf)


def _on_device(leaf: Any) -> Any:
    return jax.device_put(leaf) if isinstance(leaf, np.ndarray) else leaf
