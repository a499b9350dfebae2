"""Which of several layouts the values of a compiled program have, read from its text."""

from __future__ import annotations

import random

import jax.numpy as jnp
import pytest
from jax.core import ShapedArray

from jaxmem.program.ir import Value
from jaxmem.program.layout import Layout
from jaxmem.runtime.partitioned import chosen, shape_of

DATA = ("data", 4)
ROWS, COLUMNS = Layout(((DATA,), ())), Layout(((), (DATA,)))


def values(count: int, seed: int) -> list[Value]:
    """Arrays of sizes of their own, so that no part of one is as large as one of another."""
    sizes = random.Random(seed).sample(range(3, 90), 2 * count)
    return [
        Value(ShapedArray((4 * sizes[2 * n], 400 * sizes[2 * n + 1]), jnp.bfloat16))
        for n in range(count)
    ]


def text_of(given: list[Value], layouts: list[Layout]) -> str:
    lines = (
        f"  %fusion.{n} = {shape_of(v.aval, its)}{{1,0}} fusion()"
        for n, (v, its) in enumerate(zip(given, layouts, strict=True))
    )
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(8))
def test_layouts_are_those_of_which_the_compiled_program_has_the_arrays(seed: int):
    given, pick = values(12, seed), random.Random(seed)
    ways = [[ROWS] * 12, [COLUMNS] * 12]
    true = [pick.choice([ROWS, COLUMNS]) for _ in given]
    assert chosen(given, ways, text_of(given, true)) == true
    assert chosen(given, ways[::-1], text_of(given, true)) == true


@pytest.mark.parametrize("usual", [ROWS, COLUMNS])
def test_what_is_not_in_the_program_is_split_as_most_bytes_are(usual: Layout):
    given, ways = values(5, 0), [[ROWS] * 5, [COLUMNS] * 5]
    assert chosen(given, ways, text_of(given[:3], [usual] * 3)) == [usual] * 5
    largest = max(given, key=lambda v: v.aval.size)
    other = ROWS if usual is COLUMNS else COLUMNS
    rest = sorted((v for v in given if v is not largest), key=lambda v: v.aval.size)[:1]
    found = chosen(given, ways, text_of([largest, *rest], [usual, other]))
    assert found == [other if v is rest[0] else usual for v in given]


def test_what_is_there_in_every_way_says_nothing():
    given = [Value(ShapedArray((64, 64), jnp.float32))]
    found = chosen(given, [[ROWS], [COLUMNS]], "f32[16,64] and f32[64,16]")
    assert found == [ROWS]
    assert chosen(given, [[COLUMNS], [ROWS]], "") == [COLUMNS]


@pytest.mark.parametrize(
    "dtype, said",
    [
        ("bool", "pred[2]"),
        ("int8", "s8[2]"),
        ("uint32", "u32[2]"),
        ("float16", "f16[2]"),
        ("float8_e4m3fn", "f8e4m3fn[2]"),
        ("complex64", "c64[2]"),
    ],
)
def test_types_are_called_as_xla_calls_them(dtype: str, said: str):
    aval = ShapedArray((8,), jnp.dtype(dtype))
    assert shape_of(aval, Layout(((DATA,),))) == said


def test_a_part_of_what_does_not_divide_is_the_largest():
    assert shape_of(ShapedArray((9, 2), jnp.dtype("float32")), ROWS) == "f32[3,2]"
