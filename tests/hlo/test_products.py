"""Products of compiled programs: what a kernel works in, and sums that are made in parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxmem.hlo.module import read_module
from jaxmem.hlo.products import Product, products_of
from jaxmem.targets import compile_for


def compiled(fun, *args):
    return compile_for("h200", fun, args)


def shape(*dims: int, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def products(fun, *args) -> list[Product]:
    return list(products_of(read_module(compiled(fun, *args).executable)))


def test_a_product_with_tiles_enough_takes_nothing():
    (found,) = products(jnp.matmul, shape(4096, 2048), shape(2048, 8192))
    assert found == Product((2048 * 4096, 2048 * 8192), (4096, 8192), 4 * 4096 * 8192, 0)


def test_a_small_product_with_a_long_sum_is_made_in_parts_that_are_all_its_temporaries():
    made = compiled(jnp.matmul, shape(512, 1024), shape(1024, 1024))
    (found,) = products_of(read_module(made.executable))
    assert found.operands == (512 * 1024, 1024 * 1024)
    assert found.dims[1:] == (512, 1024) and found.dims[0] > 1
    assert found.nbytes == made.memory.temp_bytes


def test_a_call_of_cublas_works_in_its_temporaries():
    # Tiles enough, so that it is not split: only complex numbers are left to cuBLAS unasked.
    numbers = [shape(4096, 512, dtype="complex64"), shape(512, 4096, dtype="complex64")]
    made = compiled(jnp.matmul, *numbers)
    (found,) = products_of(read_module(made.executable))
    assert found.size == 4096 * 4096
    assert found.workspace_bytes >= 4 * 2**20
    assert found.workspace_bytes == pytest.approx(made.memory.temp_bytes, rel=0.01)


def test_what_else_cublas_is_called_for_is_no_product():
    def solved(a, b):
        return jax.scipy.linalg.solve_triangular(a, b, lower=True)

    assert products(solved, shape(512, 512), shape(512, 512)) == []


def test_convolutions_and_what_loops_multiply_are_found_once_each():
    def net(x, kernel, w):
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        rows = x.reshape(-1, 64)
        return jax.lax.fori_loop(0, 5, lambda _, rows: jnp.tanh(rows @ w), rows)

    image, kernel = shape(8, 32, 32, 64), shape(3, 3, 64, 64)
    first, second = products(net, image, kernel, shape(64, 64))
    assert first.operands == (3 * 3 * 64 * 64, 8 * 32 * 32 * 64)
    assert second.operands == (64 * 64, 8 * 32 * 32 * 64)
    assert first.size == second.size == 8 * 32 * 32 * 64
