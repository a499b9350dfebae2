"""Checkpoints: how long a step waits for one, with checksums and as Orbax alone writes it.

    python benchmarks/checkpoints.py --json benchmarks/results/h200_checkpoints.json   # the device
    python benchmarks/checkpoints.py --layers 2 --width 256                            # anywhere

A state of Adam, parameters on the device, moments in pinned host memory where the device has any.
For each writer, after one that is not counted: ``held_ms`` until training may go on,
``written_ms`` until the checkpoint is complete, and ``restored_ms``. Medians, in one process and
directory. What comes back is compared with what was saved, bit for bit; meanwhile the arrays that
were saved are donated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

import jaxmem


def state_of(layers: int, width: int) -> dict[str, Any]:
    """Random parameters, and moments in pinned host memory."""
    here = SingleDeviceSharding(jax.devices()[0])
    hosted = here.with_memory_kind("pinned_host")
    make = jax.jit(lambda key: jax.random.normal(key, (width, width)), out_shardings=here)
    state: dict[str, Any] = {"params": {}, "mu": {}, "nu": {}}
    for n, (part, leaves) in enumerate((p, state[p]) for p in state):
        for layer in range(layers):
            array = make(jax.random.key(n * layers + layer))
            leaves[f"w{layer}"] = array if part == "params" else jax.device_put(array, hosted)
    return jax.block_until_ready(state)


def copy_of(state: Any) -> Any:
    """The same in buffers of its own."""

    def copied(x: jax.Array) -> jax.Array:
        there = jax.device_put(x, x.sharding.with_memory_kind("device"), may_alias=False)
        return jax.device_put(jnp.copy(there), x.sharding)

    return jax.block_until_ready(jax.tree.map(copied, state))


def used_up(state: Any) -> None:
    """What a step does to the state that it was given."""
    clear = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    for array in jax.tree.leaves(state["params"]):
        jax.block_until_ready(clear(array))
    for array in jax.tree.leaves((state["mu"], state["nu"])):
        array.delete()


def same(a: Any, b: Any) -> bool:
    def equal(x: jax.Array, y: jax.Array) -> bool:
        device = x.sharding.with_memory_kind("device")
        return bool((jax.device_put(x, device) == jax.device_put(y, device)).all())

    return all(jax.tree.leaves(jax.tree.map(equal, a, b)))


def measured(
    start: Callable[[Path, Any], Callable[[], None]],
    read: Callable[[Path, Any], Any],
    state: Any,
    repeats: int,
    root: Path,
) -> dict[str, Any]:
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    rows: list[list[float]] = []
    exact = True
    for number in range(repeats + 1):
        given = copy_of(state)
        path = Path(tempfile.mkdtemp(dir=root)) / "run"
        times = [time.perf_counter()]
        finish = start(path, given)
        times.append(time.perf_counter())
        used_up(given)
        finish()
        times.append(time.perf_counter())
        found = jax.block_until_ready(read(path, like))
        times.append(time.perf_counter())
        exact = exact and same(state, found)
        del found
        shutil.rmtree(path.parent)
        if number:
            rows.append([times[1] - times[0], times[2] - times[0], times[3] - times[2]])
    held, written, restored = (
        1e3 * statistics.median(column) for column in zip(*rows, strict=True)
    )
    return {"held_ms": held, "written_ms": written, "restored_ms": restored, "exact": exact}


def with_jaxmem(path: Path, state: Any) -> Callable[[], None]:
    return jaxmem.save(path, state, step=0).wait


def with_orbax(path: Path, state: Any) -> Callable[[], None]:
    manager = ocp.CheckpointManager(path)
    manager.save(0, args=ocp.args.StandardSave(state))

    def finish() -> None:
        manager.wait_until_finished()
        manager.close()

    return finish


def read_by_orbax(path: Path, like: Any) -> Any:
    with ocp.CheckpointManager(path) as manager:
        return manager.restore(0, args=ocp.args.StandardRestore(like))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where checkpoints go")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    state = state_of(options.layers, options.width)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        rows = {
            "jaxmem": measured(with_jaxmem, jaxmem.restore, state, options.repeats, Path(root)),
            "Orbax alone": measured(with_orbax, read_by_orbax, state, options.repeats, Path(root)),
        }
    for name, row in rows.items():
        print(name, json.dumps(row))
    if options.json:
        found = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "orbax": ocp.__version__,
            "options": {"layers": options.layers, "width": options.width},
            "repeats": options.repeats,
            "nbytes": nbytes,
            "rows": rows,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
