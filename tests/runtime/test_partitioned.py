"""What the devices of a compiled program exchange, read from its text."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem.program.collectives import gathering, reducing, scattering
from jaxmem.runtime.partitioned import exchanged_bytes
from jaxmem.runtime.splitting import nearest
from jaxmem.targets import compile_for

EIGHT = 8
SIZE = 4096
MESH = AbstractMesh((EIGHT,), ("data",), axis_types=(AxisType.Auto,))
SPLIT, WHOLE = NamedSharding(MESH, PartitionSpec("data")), NamedSharding(MESH, PartitionSpec())


def shape(sharding: NamedSharding, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding)


@functools.cache
def text_of(case: str) -> str:
    """A program of eight GPUs with one collective, as the compiler writes it."""
    if case == "gather":
        args, result = [shape(SPLIT, SIZE, 8)], WHOLE
        return compile_for("8xh100", lambda x: x * 2, args, out_shardings=result).hlo_text()
    # Each device has a part of every sum.
    by_last = NamedSharding(MESH, PartitionSpec(None, "data"))
    args = [shape(by_last, SIZE, 8), shape(SPLIT, 8, 16)]
    result = WHOLE if case == "reduce" else SPLIT
    return compile_for("8xh100", jnp.matmul, args, out_shardings=result).hlo_text()


@pytest.mark.parametrize(
    "case, sent",
    [
        ("gather", gathering(4 * SIZE * 8, EIGHT)),
        ("reduce", reducing(4 * SIZE * 16, EIGHT)),
        ("scatter", scattering(4 * SIZE * 16, EIGHT)),
    ],
)
def test_bytes_are_those_of_the_model_of_collectives(case: str, sent):
    assert exchanged_bytes(text_of(case), EIGHT) == sent.nbytes


@pytest.mark.parametrize("axis, size", [("data", 2), ("model", 4)])
def test_along_one_axis_of_a_mesh_only_its_devices_take_part(axis: str, size: int):
    grid = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows, whole = NamedSharding(grid, PartitionSpec(axis)), NamedSharding(grid, PartitionSpec())
    columns = NamedSharding(grid, PartitionSpec(None, axis))
    args = [shape(rows, SIZE, 8)]
    gathered = compile_for("8xh100", lambda x: x * 2, args, out_shardings=whole).hlo_text()
    args = [shape(columns, SIZE, 8), shape(rows, 8, 16)]
    summed = compile_for("8xh100", jnp.matmul, args, out_shardings=whole).hlo_text()
    assert exchanged_bytes(gathered, EIGHT) == gathering(4 * SIZE * 8, size).nbytes
    assert exchanged_bytes(summed, EIGHT) == reducing(4 * SIZE * 16, size).nbytes


@pytest.mark.parametrize(
    "groups, share",
    [
        ("{}", 7 / 8),
        ("{{0,1,2,3},{4,5,6,7}}", 3 / 4),
        ("[4,2]<=[8]", 1 / 2),
        ("[2,4]<=[4,2]T(1,0)", 3 / 4),
        ("mesh['a'=2,'b'=4] {'b'}", 3 / 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 7 / 8),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 1 / 2),
        ("mesh['a'=8] {'a':(2)4}", 3 / 4),
    ],
)
def test_who_takes_part_is_read_however_it_is_written_down(groups: str, share: float):
    text = f"  %c = f32[8,8]{{1,0}} all-gather(%a), replica_groups={groups}, dimensions={{0}}"
    assert exchanged_bytes(text, EIGHT) == share * 256


@pytest.mark.parametrize("start", ["", "-start"])
@pytest.mark.parametrize(
    "kind, given, made, sent",
    [
        ("all-gather", "f32[2,8]{1,0}", "f32[8,8]{1,0}", 192),
        ("reduce-scatter", "f32[8,8]{1,0}", "f32[2,8]{1,0}", 192),
        ("all-to-all", "bf16[8,8]{1,0}", "bf16[8,8]{1,0}", 96),
        ("collective-permute", "s8[64]{0}", "s8[64]{0}", 64),
        ("all-reduce", "", "pred[64]{0}", 96),
    ],
)
def test_both_forms_of_a_collective_send_the_same(kind, given, made, sent, start):
    types = f"({given}, {made})" if start and given else made
    text = f"  %c = {types} {kind}{start}(%a), channel_id=1, replica_groups={{{{0,1,2,3}}}}"
    done = f"  %d = {made} {kind}-done(%c)\n  %e = {made} fusion(%d), calls=%{kind}"
    assert exchanged_bytes(f"{text}\n{done}", 4) == sent


def test_several_arrays_in_one_collective_are_added_up():
    types = "((f32[2]{0}, /*index=1*/f32[4]{0}), (f32[8]{0}, /*index=1*/f32[16]{0}))"
    assert exchanged_bytes(f"%c = {types} all-gather-start(%a, %b), dimensions={{0}}", 4) == 72


def test_the_nearest_is_that_of_the_nearest_ratio_and_the_first_of_equals():
    assert nearest([100.0, 2500.0, 1e6], 2000.0) == 1
    assert nearest([1000.0, 4000.0], 2000.0) == 0
    assert nearest([1e6, 300.0], 2000.0) == 1
    assert nearest([1e6, 0.0], 0.0) == 1


LOOPS = """
%inner (p: f32[8]) -> f32[8] {
  %g = f32[8]{0} all-gather(%p), channel_id=2, dimensions={0}
}

%outer (p: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %r = f32[8]{0} all-reduce(%w), channel_id=3, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %v = f32[8]{0} while(%p), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %s = f32[8]{0} all-to-all(%v), channel_id=4
}
"""


def test_what_is_in_a_loop_is_sent_in_each_of_its_turns():
    assert exchanged_bytes(LOOPS, 2) == 3 * 5 * 16 + 3 * 32 + 16
    assert exchanged_bytes(LOOPS.replace('{"known_trip_count":{"n":"5"}}', "{}"), 2) == 160


def test_what_a_loop_runs_through_others_is_sent_in_each_of_its_turns():
    inner = "  %g = f32[8]{0} all-gather(%p), channel_id=2, dimensions={0}"
    run = "  %g = f32[8]{0} conditional(%p, %p), branch_computations={%some, %none}"
    moved = LOOPS.replace(inner, run) + f"\n%some (p: f32[8]) -> f32[8] {{\n{inner}\n}}\n"
    assert exchanged_bytes(moved, 2) == exchanged_bytes(LOOPS, 2)


def test_a_loop_that_was_compiled_sends_as_often_as_it_turns():
    def step(x, weights):
        def layer(y, w):
            return jnp.tanh(y @ w), None

        return jax.lax.scan(layer, x, weights)[0]

    by_last = NamedSharding(MESH, PartitionSpec(None, "data"))
    rows = NamedSharding(MESH, PartitionSpec(None, "data", None))
    sent = []
    for layers in (3, 6):
        args = [shape(by_last, 32, 64), shape(rows, layers, 64, 64)]
        text = compile_for("8xh100", step, args, out_shardings=by_last).hlo_text()
        sent.append(exchanged_bytes(text, EIGHT))
    assert 0 < sent[0] == sent[1] / 2
