"""Checksums of arrays that do not depend on where an array is, nor on how it is split.

Every 32-bit word is mixed with its place in the whole array by a bijection (the finaliser of
MurmurHash3), and the mixed words are added up modulo 2**32, twice, with different seeds. A sum
over shards is then the sum over the array, in whichever order; one changed word always changes it.
Whoever forges a checkpoint can forge the sums, too: they are against faults, not against people.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SEEDS = (0x9E3779B9, 0x7F4A7C15)
# What is taken at a time of an array in host memory.
_PIECE_BYTES = 64 * 2**20
_WORDS = np.dtype(np.uint32)


def kind_of(array: Any) -> str:
    """The dtype and shape of an array.

    >>> kind_of(np.ones((2, 3), np.float32))
    'float32[2, 3]'
    """
    return f"{jnp.dtype(array.dtype).name}{list(array.shape)}"


class Sum:
    """The checksum of an array that is being computed; ``str`` waits for it.

    Of an array over several processes it is that of the parts which this process has, and others
    have no copy of with a smaller number; :func:`added` makes it the checksum of the array.

    >>> str(Sum(np.arange(4.0, dtype=np.float32))) == str(Sum(jnp.arange(4.0)))
    True
    >>> str(Sum(jnp.zeros(4))) == str(Sum(jnp.zeros(5)))
    False
    """

    def __init__(self, array: Any):
        self.kind = kind_of(array)
        self.parts = []
        for piece, origin in _pieces(array):
            data, are_words = _as_words(piece)
            self.parts.append(_sum(data, *_places(array.shape, origin), are_words=are_words))

    def __str__(self) -> str:
        parts = np.zeros((1 + len(self.parts), 2), np.uint32)
        parts[1:] = jax.device_get(self.parts) or 0
        first, second = parts.sum(axis=0, dtype=np.uint32).tolist()
        return f"{self.kind} {first:08x}{second:08x}"


def added(sums: Iterable[str]) -> str:
    """The checksum of an array of which each process has summed its own parts.

    >>> added(["float32[2] ffffffff00000001", "float32[2] 0000000200000003"])
    'float32[2] 0000000100000004'
    """
    kinds, words = zip(*(text.rsplit(" ", 1) for text in sums), strict=True)
    first, second = (sum(int(w[at : at + 8], 16) for w in words) % 2**32 for at in (0, 8))
    return f"{kinds[0]} {first:08x}{second:08x}"


def _pieces(array: Any) -> Iterator[tuple[Any, Sequence[int]]]:
    """Pieces of an array that together are all of it, and where each begins."""
    if not isinstance(array, jax.Array):
        yield from _rows(np.asarray(array), (0,) * np.ndim(array))
        return
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        places = zip(shard.index, array.shape, strict=True)
        origin = [index.indices(size)[0] for index, size in places]
        if "host" in str(array.sharding.memory_kind):
            yield from _rows(np.asarray(shard.data), origin)
        else:
            yield shard.data, origin


def _rows(array: np.ndarray, origin: Sequence[int]) -> Iterator[tuple[Any, Sequence[int]]]:
    """An array in host memory, some rows at a time."""
    if not array.ndim or array.nbytes <= _PIECE_BYTES:
        yield array, origin
        return
    count = max(1, _PIECE_BYTES * len(array) // array.nbytes)
    for start in range(0, len(array), count):
        yield array[start : start + count], (origin[0] + start, *origin[1:])


def _places(shape: Sequence[int], origin: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Where a piece begins, and how far elements that are next to each other are apart."""
    strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    one = [[number % 2**32 for number in numbers] for numbers in (origin, strides)]
    return np.array(one[0], np.uint32), np.array(one[1], np.uint32)


def _as_words(data: Any) -> tuple[Any, bool]:
    """A piece as it is, or NumPy's wide numbers as words, for which jax needs no x64; and which."""
    if not isinstance(data, np.ndarray) or data.dtype.itemsize <= _WORDS.itemsize:
        return data, False
    words = np.ascontiguousarray(data).reshape(*data.shape, 1).view(_WORDS)
    return words, True


@functools.partial(jax.jit, static_argnames="are_words")
def _sum(data: Any, origin: Any, strides: Any, *, are_words: bool) -> Any:
    """Both sums of a piece, ``uint32[2]``."""
    words = data if are_words else _bits(data)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim - 1):
        along = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place += (along + origin[axis]) * strides[axis]
    number = words.shape[-1]
    place = place * jnp.uint32(number) + lax.broadcasted_iota(
        jnp.uint32, words.shape, words.ndim - 1
    )
    sums = []
    for seed in _SEEDS:
        mixed = _mixed(words ^ _mixed(place + jnp.uint32(seed)))
        sums.append(jnp.sum(mixed, dtype=jnp.uint32))
    return jnp.stack(sums)


def _bits(x: Any) -> Any:
    """The bits of an array as ``uint32`` words along one more axis."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([_bits(x.real), _bits(x.imag)], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)[..., None]
    if jnp.issubdtype(x.dtype, jnp.integer):
        bits = jnp.iinfo(x.dtype).bits
    else:
        bits = jnp.finfo(x.dtype).bits
    if bits < 8:
        # No two of them become one 32-bit number.
        wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
        return _bits(x.astype(wide))
    if bits == 64:
        return lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)[..., None]


def _mixed(x: Any) -> Any:
    """A bijection of 32-bit numbers (Austin Appleby's ``fmix32``)."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> 13)
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
