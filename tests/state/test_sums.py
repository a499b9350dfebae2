"""Checksums: the same wherever an array is, and another for any change."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.state import sums
from jaxmem.state.sums import Sum

DTYPES = [
    "bool",
    "int4",
    "uint4",
    "int8",
    "uint8",
    "int16",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int32",
    "uint32",
    "float32",
    "complex64",
]
WIDE = ["int64", "uint64", "float64", "complex128"]


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(-7 if dtype[0] not in "ub" else 0, 7, shape)
    return np.asarray(values).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_on_the_device_in_host_memory_and_in_numpy(dtype):
    array = random_array(dtype, (5, 3))
    on_device = jnp.asarray(array)
    hosted = jax.device_put(on_device, on_device.sharding.with_memory_kind("pinned_host"))
    assert str(Sum(array)) == str(Sum(on_device)) == str(Sum(hosted))


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_numbers_keep_all_their_bits(dtype):
    """Without jax_enable_x64 they exist in NumPy only, and with it in JAX as well."""
    array = random_array(dtype, (5, 3))
    array[2, 1] += 2**40
    plain = str(Sum(array))
    with jax.enable_x64(True):
        assert str(Sum(jnp.asarray(array))) == plain
    changed = array.copy()
    changed.view(np.uint8)[4, -1] ^= 1
    assert str(Sum(changed)) != plain


@given(
    dtype=st.sampled_from([*DTYPES[4:], *WIDE]),
    shape=st.sampled_from([(), (1,), (7,), (3, 4), (2, 3, 2)]),
    data=st.data(),
)
def test_one_flipped_bit_is_another_sum(dtype, shape, data):
    array = random_array(dtype, shape, seed=3)
    raw = bytearray(array.tobytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    changed = np.frombuffer(bytes(raw), array.dtype).reshape(shape)
    assert str(Sum(array)) != str(Sum(changed))


def test_every_order_and_every_shape_has_a_sum_of_its_own():
    found = [str(Sum(np.array(p, np.float32))) for p in itertools.permutations(range(5))]
    assert len(set(found)) == 120
    shapes = [(6,), (2, 3), (3, 2), (1, 6), (6, 1)]
    assert len({str(Sum(np.zeros(shape, np.float32))) for shape in shapes}) == 5
    assert str(Sum(np.zeros(0, np.float32))) != str(Sum(np.zeros(1, np.float32)))


@given(rows=st.integers(1, 40), nbytes=st.integers(1, 400))
def test_pieces_add_up_to_the_whole(rows, nbytes):
    array = random_array("float32", (rows, 3, 2))
    whole = str(Sum(jnp.asarray(array)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_PIECE_BYTES", nbytes)
        assert str(Sum(array)) == whole
