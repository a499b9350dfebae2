"""The smallest programs of small steps: predicted and compiled bytes, and the allocator's peak.

    python benchmarks/smallest.py --json benchmarks/results/h200_smallest.json
    JAX_PLATFORMS=cpu python benchmarks/smallest.py --target h200       # without a GPU: two columns

Each step is a few products, tanh between them, and an optimizer, 8 to 500 MiB in all, inside the
smallest budget that an error names and 1.3 times that. What is not on paper shows there as it does
nowhere else. Each step is a process of its own, run twice: XLA takes memory to choose kernels, and
the allocator's peak is never reset, so the second takes what the first compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks.headline import versions

# Layers, width, rows, and what updates them.
STEPS = (
    (6, 512, 256, "adam"),
    (6, 512, 512, "momentum"),
    (6, 1024, 256, "momentum"),
    (6, 1024, 512, "momentum"),
    (8, 1024, 1024, "momentum"),
    (6, 1024, 512, "adam"),
    (6, 2048, 1024, "momentum"),
    (4, 4096, 512, "adam"),
)
OVER = (1.0, 1.3)
MIB = 2**20


def momentum(state: tuple, grads: list) -> tuple:
    params, m = state
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, m), m


def adam(state: tuple, grads: list) -> tuple:
    params, m, n = state
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    n = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, n, grads)
    new = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), params, m, n)
    return new, m, n


UPDATES = {"momentum": (momentum, 2), "adam": (adam, 3)}


def made(layers: int, width: int, rows: int, update: str) -> tuple[Callable[..., Any], tuple]:
    """The step, and the shapes of its state and its rows."""
    rule, copies = UPDATES[update]

    def step(state: tuple, x: jax.Array) -> tuple[tuple, jax.Array]:
        def loss(params: list) -> jax.Array:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(state[0])
        return rule(state, grads), value

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    return step, ((weights,) * copies, jax.ShapeDtypeStruct((rows, width), jnp.float32))


def one(shape: tuple[int, int, int, str], target: str | None) -> list[dict[str, Any]]:
    """What this process sees of one step, inside each of its budgets."""
    step, args = made(*shape)
    settings = {"donate_argnums": 0, "progress": False}
    try:
        jaxmem.plan(step, *args, budget="1MiB", target=target, **settings)
    except jaxmem.BudgetInfeasibleError as error:
        smallest = error.smallest_bytes
    else:
        raise SystemExit(f"{shape} fits 1 MiB: this says nothing of a larger budget")
    compiling = peak_bytes() or 0
    rows = []
    for over in OVER:
        budget = int(smallest * over)
        fitted = jaxmem.fit(step, budget=budget, target=target, **settings)
        plan = fitted.plan(*args)
        row = {"shape": shape, "over": over, "budget_bytes": budget}
        row |= {"predicted_bytes": plan.predicted_bytes, "compiled_bytes": plan.compiled_bytes}
        if target is None:
            compiling = max(compiling, peak_bytes() or 0)
            # Made in host memory, where a part of it may be to stay.
            state, x = fitted.place(*jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), args))
            for _ in range(2):
                state, _ = fitted(state, x)
            jax.block_until_ready(state)
            peak = peak_bytes()
            row["peak_bytes"] = peak if peak and peak > compiling else None
            del state, x
        rows.append(row)
    return rows


def peak_bytes() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def in_processes(shape: tuple, target: str | None, cache: str) -> list[dict[str, Any]]:
    settings = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,
    }
    command = [sys.executable, __file__, "--one", json.dumps(shape)]
    command += ["--target", target] if target else []
    for _ in range(1 if target else 2):
        done = subprocess.run(command, env=settings, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{shape}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def shown(row: dict[str, Any]) -> str:
    layers, width, rows, update = row["shape"]
    name = f"{layers} x {width}, {rows} rows, {update}, {row['over']:g} x"
    columns = (row[f"{c}_bytes"] for c in ("budget", "predicted", "compiled"))
    peak = row.get("peak_bytes")
    ratio = row["predicted_bytes"] / (peak or row["compiled_bytes"])
    told = "  ".join(f"{value / MIB:7.2f}" for value in columns)
    return f"{name:38s} {told}  {f'{peak / MIB:7.2f}' if peak else '      -'}  {ratio:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", help="a GPU that is absent; the device of this process if not")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time; nothing is timed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(json.loads(options.one), options.target)))
        return 0
    print(f"{'MiB':38s}  budget  predict  compile  alloc.'s  predicted over the last of them")
    found = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(options.jobs) as pool:
        for rows in pool.map(lambda shape: in_processes(shape, options.target, cache), STEPS):
            found += rows
            print("\n".join(map(shown, rows)), flush=True)
    if options.json:
        told = {"versions": versions(), "target": options.target, "rows": found}
        options.json.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
