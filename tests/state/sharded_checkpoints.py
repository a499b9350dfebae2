"""Checkpoints over several CPU devices; prints what holds. See test_checkpoint_faults.py."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxmem
from jaxmem.state.sums import Sum

W = np.random.default_rng(0).random((16, 24)).astype(np.float32)


def mesh(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def main(directory: Path) -> None:
    one = SingleDeviceSharding(jax.devices()[0])
    rows = NamedSharding(mesh((8,), ("d",)), PartitionSpec("d"))
    both = NamedSharding(mesh((2, 4), ("a", "b")), PartitionSpec("b", "a"))
    some = NamedSharding(mesh((2, 4), ("a", "b")), PartitionSpec(None, "a"))
    whole = NamedSharding(mesh((8,), ("d",)), PartitionSpec())
    typed = NamedSharding(mesh((8,), ("d",), AxisType.Explicit), PartitionSpec(None, "d"))
    hosted = [s.with_memory_kind("pinned_host") for s in (rows, both, some, one)]
    places = [one, rows, both, some, whole, typed, *hosted]
    assert len({str(Sum(jax.device_put(W, place))) for place in places}) == 1
    print("one checksum, however an array is split: holds")

    state = {str(n): jax.device_put(W + n, place) for n, place in enumerate(places)}
    jaxmem.save(directory, state, step=0)
    for shift in range(len(places)):
        others = {str(n): places[(n + shift) % len(places)] for n in range(len(places))}
        like = {n: jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=s) for n, s in others.items()}
        for n, array in jaxmem.restore(directory, like).items():
            assert array.sharding == others[n], (array.sharding, others[n])
            np.testing.assert_array_equal(array, W + int(n))
    print("each placing restored to each other one: holds")

    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), rows)
    jaxmem.save(directory / "keys", {"k": keys}, step=0)
    like = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=rows)
    found = jaxmem.restore(directory / "keys", {"k": like})["k"]
    assert found.sharding.is_equivalent_to(rows, 1), found.sharding
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))
    print("random keys on a mesh: holds")

    mixed = {"w": jax.device_put(W, rows), "step": jnp.int32(3)}
    jaxmem.save(directory / "mixed", mixed, step=0)
    found = jaxmem.restore(directory / "mixed", mixed)
    assert not found["step"].committed
    jax.jit(lambda s: s["w"] * s["step"])(found).block_until_ready()
    print("a scalar that JAX may put anywhere, beside sharded arrays: holds")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
