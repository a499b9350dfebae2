"""A GPT of 6.7e9 parameters, all of them trained, on a device limited to 24 GiB, and on all of it.

    python benchmarks/finetune.py --json benchmarks/results/h200_finetune.json   # 256 GiB of RAM
    JAX_PLATFORMS=cpu python benchmarks/finetune.py --dry --unrolled --limit 48MiB  # a dry run

AdamW, float32 parameters and moments (80 GB), bfloat16 in between; with ``--masters`` bfloat16
parameters beside their float32 masters (93 GB). One loop over the blocks, or with ``--unrolled``
one after the other. Two rows, each a process of its own on the same device. In the first JAX's
allocator may take ``--limit`` of the device (``XLA_PYTHON_CLIENT_MEM_FRACTION``), all but the batch
is in host memory, and ``jaxmem.fit`` gets a little less than the limit. In the second everything is
on the device: ``jaxmem.fit`` without a budget, as the step as written fits none. The state of both
is the same, made leaf by leaf. Medians of steps after the first, each waited for; losses of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jaxmem  # before JAX starts its backend: it lets XLA pin more than 64 GB
from benchmarks.headline import versions
from benchmarks.timing import compared
from benchmarks.workloads import gpt
from jaxmem.units import parse_bytes

LIMITED, WHOLE = "limited", "whole device"
# What runs without a GPU, in a minute.
SMALL = {"layers": 4, "d_model": 512, "heads": 4, "sequence": 64, "vocab_size": 512, "batch": 4}
# Of the limit, for ``jaxmem.fit``: the allocator's own is beside it.
SHARE = 0.96


def state_of(abstract: Any, where: Any) -> Any:
    """Numbers like a fresh net's, the same wherever they are put."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def made(n: int, name: str) -> jax.Array:
        shape, dtype = leaves[n][1].shape, leaves[n][1].dtype
        if "'opt'" in name:
            return jnp.zeros(shape, dtype)
        if "scale" in name:
            return jnp.ones(shape, dtype)
        # Of a parameter and its master the same.
        key = jax.random.key(zlib.crc32(name.partition("]")[2].encode()))
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)

    found = []
    for n, (path, leaf) in enumerate(leaves):
        value = made(n, jax.tree_util.keystr(path))
        if where is not None and leaf.ndim:
            value = jax.device_put(value, where)
        found.append(jax.block_until_ready(value))
    return jax.tree.unflatten(tree, found)


def row(asked: dict) -> dict:
    """One of the two, in this process."""
    sizes = dataclasses.replace(gpt.SIZES["7b"], batch=asked["batch"])
    if asked["dry"]:
        sizes = dataclasses.replace(sizes, **SMALL)
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    attention = "cudnn" if on_gpu else "xla"
    form = {"scan": not asked["unrolled"], "masters": asked["masters"]}
    work = gpt.workload(sizes, attention=attention, **form)
    limited = asked["name"] == LIMITED
    options: dict[str, Any] = {"budget": None, "host_budget": 0}
    if limited:
        options = {"budget": int(SHARE * asked["limit"]), "host": "*"}
        options |= {} if on_gpu else {"target": "h200"}
    step = jaxmem.fit(work.step, donate_argnums=0, progress=False, **options)
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host" if on_gpu else None)
    started = time.perf_counter()
    plan = step.plan(jax.eval_shape(work.state), jax.eval_shape(work.batch))
    told = {
        "parameters": sizes.parameters,
        "tokens": work.items,
        "plan_seconds": time.perf_counter() - started,
        "compiled_bytes": plan.compiled_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "host_bytes": plan.host_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "exposed_seconds_predicted": plan.exposed_seconds,
        "solver": plan.solver,
        "streamed": plan.streamed and dataclasses.asdict(plan.streamed),
    }
    print(asked["name"], told, flush=True)
    state = state_of(jax.eval_shape(work.state), pinned if limited else None)
    batch = jax.jit(work.batch)()
    losses, taken = [], []
    for n in range(asked["steps"] + 1):
        started = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        losses.append(float(loss))
        if n:
            taken.append(time.perf_counter() - started)
    told |= {"seconds": statistics.median(taken), "all_seconds": taken, "losses": losses}
    told["peak_bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return told | compared(told)


def apart(asked: dict, total: int) -> dict:
    """One of the two, in a process of its own."""
    fraction = asked["limit"] / total if asked["name"] == LIMITED else 0.95
    settings = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.4f}"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--row", json.dumps(asked), str(out)]
        code = subprocess.run(command, env=settings).returncode
        return json.loads(out.read_text()) if out.exists() else {"error": f"exit {code}"}


def device_bytes() -> int:
    """Bytes of the first GPU; of a machine without one as many as an H200 has."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 141 * 10**9
    return int(said.splitlines()[0]) * 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="a small net")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 2048 tokens")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", default="24GiB")
    parser.add_argument("--unrolled", action="store_true")
    parser.add_argument("--masters", action="store_true")
    parser.add_argument("--only", nargs="*", choices=(LIMITED, WHOLE), default=[LIMITED, WHOLE])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        asked, out = options.row
        Path(out).write_text(json.dumps(row(json.loads(asked))))
        return 0
    kept = ("dry", "batch", "steps", "unrolled", "masters")
    asked = {name: getattr(options, name) for name in kept}
    asked["limit"] = parse_bytes(options.limit)
    rows = {name: apart({**asked, "name": name}, device_bytes()) for name in options.only}
    for name, told in rows.items():
        print(f"{name}: {json.dumps(told)}")
    seconds = [rows.get(name, {}).get("seconds") for name in (LIMITED, WHOLE)]
    if all(seconds):
        print(f"{seconds[1] / seconds[0]:.3f} of the speed with everything on the device")
    if options.json:
        result = {"versions": versions(), "options": asked, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if all("error" not in told for told in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
