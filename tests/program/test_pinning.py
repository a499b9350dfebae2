"""Values that the compiler is told how to split: which, along what, and what repeats them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxmem.program.ir import Program, Value
from jaxmem.program.layout import Layout
from jaxmem.program.pinning import has_pins, pin, unpin
from tests.planner.lines import program

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
DATA, MODEL = ("data", 4), ("model", 2)
FREE = PartitionSpec.UNCONSTRAINED


def net(w, x):
    def layer(y, _):
        return jnp.tanh(y @ w), None

    y, _ = jax.lax.scan(layer, x @ w, length=3)
    return y + 1


def laid(rows: int, *axes: tuple) -> Program:
    """The net, and all that is of its rows split like this."""
    traced = program(net, jnp.zeros((8, 8)), jnp.zeros((rows, 8)))
    for value in made(traced.block):
        if value.aval.shape == (rows, 8):
            value.lay_out(Layout(axes))
    return traced


def made(block) -> list[Value]:
    inner = [made(op.loop.body) for op in block.ops if op.loop is not None]
    return [v for op in block.ops for v in op.outputs] + [v for its in inner for v in its]


def test_products_are_pinned_in_loops_too_and_nothing_else_is():
    traced = laid(16, (DATA,), (MODEL,))
    pinned = pin(traced.block, MESH, {"data"})
    makers = {v: op.name for op in traced.block.ops for v in op.outputs}
    assert len(pinned) == 2
    assert pinned == [v for v in made(traced.block) if v.pinned is not None]
    assert [makers.get(v, "in the loop") for v in pinned] == ["dot_general", "in the loop"]
    assert has_pins(traced.block)


def test_other_axes_are_the_compilers():
    (outer, _) = pin(laid(16, (DATA,), (MODEL,)).block, MESH, {"data"})
    assert outer.pinned is not None
    assert outer.pinned.spec == PartitionSpec("data", FREE)
    (outer, _) = pin(laid(16, (DATA, MODEL), ()).block, MESH, {"data", "model"})
    assert outer.pinned is not None
    assert outer.pinned.spec == PartitionSpec(("data", "model"), FREE)


@pytest.mark.parametrize(
    "rows, axes",
    [
        pytest.param(16, ((), (MODEL,)), id="along other axes"),
        pytest.param(16, ((), ()), id="whole"),
        pytest.param(18, ((DATA,), ()), id="not evenly"),
        pytest.param(16, ((("data", 2),), ()), id="over another mesh"),
        pytest.param(16, ((("data:(2)", 2),), ()), id="a part of an axis, which has no name"),
    ],
)
def test_what_no_constraint_can_say_is_not_pinned(rows, axes):
    block = laid(rows, *axes).block
    assert pin(block, MESH, {"data"}) == []
    assert not has_pins(block)


def test_what_is_pinned_stays_as_it_is_and_may_be_left_to_the_compiler_again():
    block = laid(16, (DATA,), ()).block
    pinned = pin(block, MESH, {"data"})
    assert pin(block, MESH, {"data"}) == []
    unpin(pinned)
    assert not has_pins(block)


def test_what_a_recomputation_makes_is_pinned_as_the_value_is():
    (outer, _) = pin(laid(16, (DATA,), ()).block, MESH, {"data"})
    assert outer.like().pinned is outer.pinned
    assert outer.on_host().pinned is None
