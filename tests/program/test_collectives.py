"""What collectives cost: laws of the ring, on both spellings that JAX has of them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxmem.program.collectives import COLLECTIVES, devices, sent
from jaxmem.program.cost import Rates, op_seconds
from jaxmem.program.primitives import may_repeat
from tests.planner.lines import program

RATES = Rates({"float32": 1e12}, 1e12, d2d_bytes_per_second=1e11)
LOCAL = 2**22  # bytes that each device has
PASSED = {
    "psum": (lambda x: lax.psum(x, "x"), lambda n: 2 * (n - 1) / n),
    "pmax": (lambda x: lax.pmax(x, "x"), lambda n: 2 * (n - 1) / n),
    "all_gather": (lambda x: lax.all_gather(x, "x"), lambda n: n - 1),
    "reduce_scatter": (lambda x: lax.psum_scatter(x, "x"), lambda n: (n - 1) / n),
    "all_to_all": (lambda x: lax.all_to_all(x, "x", 0, 0), lambda n: (n - 1) / n),
    "ppermute": (lambda x: lax.ppermute(x, "x", [(0, 1)]), lambda n: 1),
}


def mapped(function, count: int, varying: bool):
    """The operation that maps ``function`` over a mesh of ``count`` devices."""
    mesh = AbstractMesh((count,), ("x",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        lambda x: function(x.reshape(count, -1)).reshape(1, -1),
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec("x"),
        check_vma=varying,
    )
    (op,) = program(step, jnp.zeros((count, LOCAL // 4))).block.ops
    return op


def inside(op):
    return [eqn for eqn in op.eqn.params["jaxpr"].eqns if eqn.primitive.name in COLLECTIVES]


@pytest.mark.parametrize("varying", [True, False])
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", PASSED)
def test_a_ring_moves_what_the_law_says(name: str, count: int, varying: bool):
    function, share = PASSED[name]
    op = mapped(function, count, varying)
    (eqn,) = inside(op)
    passed = sent(eqn, {"x": count})
    assert passed is not None
    assert passed.nbytes == pytest.approx(share(count) * LOCAL)
    assert op_seconds(op, RATES) >= passed.nbytes / 1e11 + passed.seconds
    assert not may_repeat(op)


def test_half_the_bandwidth_is_twice_the_time():
    op = mapped(lambda x: lax.psum(x, "x"), 4, True)
    latency = op_seconds(op, dataclasses.replace(RATES, d2d_bytes_per_second=1e30))
    latency -= op_seconds(op, dataclasses.replace(RATES, d2d_bytes_per_second=0.0))
    assert latency == 0.0, "without a rate memory traffic and latency remain"
    (passed,) = [sent(eqn, {"x": 4}) for eqn in inside(op)]
    full, half = (
        op_seconds(op, dataclasses.replace(RATES, d2d_bytes_per_second=rate))
        for rate in (1e10, 0.5e10)
    )
    assert half - passed.seconds == pytest.approx(2 * (full - passed.seconds))


def test_more_devices_take_longer_to_answer():
    small = [sent(inside(mapped(lambda x: lax.psum(x, "x"), n, True))[0], {"x": n}) for n in (2, 8)]
    assert small[0].seconds < small[1].seconds < 1e-4


def test_one_device_sends_nothing():
    assert sent(inside(mapped(lambda x: lax.psum(x, "x"), 1, True))[0], {"x": 1}) == (0.0, 0.0)


def equation(name: str, **params):
    atom = SimpleNamespace(aval=jax.ShapeDtypeStruct((1024,), jnp.float32))
    primitive = SimpleNamespace(name=name)
    return SimpleNamespace(primitive=primitive, params=params, invars=[atom], outvars=[atom])


def test_where_the_number_of_devices_is_not_known_it_is_taken_for_large():
    for name, share in [("psum", 2), ("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1)]:
        passed = sent(equation(name, axis_name="unheard of"), {})
        assert passed is not None and passed.nbytes == share * 4096


def test_groups_and_several_axes_count():
    assert devices({"axis_name": ("a", "b")}, {"a": 2, "b": 4}) == 8
    assert devices({"axes": ("a", 0)}, {"a": 2}) == 2, "axis 0 is summed on the device"
    assert devices({"axes": ("a",), "axis_index_groups": [[0, 1], [2, 3]]}, {"a": 4}) == 2
    assert devices({"axis_name": "a", "axis_size": 16}, {}) == 16
    assert devices({"axes": (0, 1)}, {}) == 1


def test_of_a_collective_in_two_halves_the_first_sends():
    whole = sent(equation("psum", axes=("a",)), {"a": 4})
    assert sent(equation("psum_start", axes=("a",)), {"a": 4}) == whole
    assert sent(equation("psum_done", axes=("a",)), {"a": 4}) == (0.0, 0.0)
    assert sent(equation("sin"), {}) is None


def test_jax_has_no_collective_that_is_not_known():
    import jax.extend.core.primitives as known

    named = {p.name for n, p in vars(known).items() if n.endswith("_p")}
    marks = ("psum", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "pmax", "pmin")
    found = {name for name in named if name.startswith(marks)}
    assert found and found <= COLLECTIVES
