"""Whether ``host=jaxmem.AUTO`` takes what is quickest: each of the ways it compares is run as well.

    python benchmarks/auto_host.py --json benchmarks/results/h200_auto_host.json    # on the device
    python benchmarks/auto_host.py --width 128 --layers 3 --tokens 64               # a dry run

AdamW in float32 on a stack of feed-forward blocks, inside shares of what the step takes as it is
written. For each share: no ``host=``, all moments named, everything that is updated named, and the
planner's choice. Each in a process of its own, so that the allocator's peak is its own. Medians of
steps that are waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem  # before JAX starts its backend: it lets XLA pin more than 64 GB
from benchmarks.headline import versions, what_failed
from benchmarks.timing import as_predicted, compared
from jaxmem.targets.compiling import compile_for

TX = optax.adamw(1e-4)
WAYS: dict[str, Any] = {
    "no host=": None,
    "moments named": "state['opt']*",
    "all named": "state*",
    "host=jaxmem.AUTO": jaxmem.AUTO,
}
# A prediction is no better than these, and machines of a kind differ in them.
RATES = tuple(f"{link}_bytes_per_second" for link in ("h2d", "d2h", "duplex", "hbm"))
WARM, STEPS = 2, 6


def state_of(width: int, layers: int) -> dict[str, Any]:
    params = {
        f"{n:03d}": {
            "up": jnp.zeros((width, 4 * width)),
            "down": jnp.zeros((4 * width, width)),
        }
        for n in range(layers)
    }
    return {"params": params, "opt": TX.init(params)}


def filled(state: Any) -> Any:
    """The state as NumPy arrays, so that only what a plan keeps on the device is ever there."""
    rng = np.random.default_rng(0)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if jax.tree_util.keystr(path).startswith("['params']"):
            normal = rng.standard_normal(leaf.shape, np.float32)
            return normal * np.float32(leaf.shape[0] ** -0.5)
        return np.zeros(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, state)


def loss_of(params: dict[str, Any], x: jax.Array) -> jax.Array:
    h = x.astype(jnp.bfloat16)
    for layer in params.values():
        up, down = (layer[name].astype(jnp.bfloat16) for name in ("up", "down"))
        h = h + jax.nn.gelu(h @ up) @ down
    return jnp.mean(jnp.square(h.astype(jnp.float32)))


def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def one_row(asked: dict[str, Any]) -> dict[str, Any]:
    """One way, or the step as it is written where ``way`` is ``None``."""
    width, layers, tokens = asked["width"], asked["layers"], asked["tokens"]
    state = jax.eval_shape(lambda: state_of(width, layers))
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    if asked["way"] is None:
        leaves, tree = jax.tree.flatten((state, x))

        def flat(*values: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(step(*tree.unflatten(values)))

        compiled = compile_for(None, flat, leaves, donate=range(len(leaves) - 1))
        return {"compiled_bytes": compiled.memory.total_bytes}
    run = jaxmem.fit(
        step,
        budget=asked["budget"],
        host=WAYS[asked["way"]],
        donate_argnums=0,
        progress=False,
    )
    started = time.perf_counter()
    plan = run.plan(state, x)
    here = jaxmem.Target.local()
    rates = {rate: getattr(here, rate) for rate in RATES} | {"flops": dict(here.flops)}
    found = {
        "planning_seconds": time.perf_counter() - started,
        "predicted_with": rates,
        "predicted_seconds": plan.predicted_seconds,
        "compiled_bytes": plan.compiled_bytes,
        "host_bytes": plan.host_bytes,
        "notes": list(plan.notes),
    }
    given = jax.random.normal(jax.random.key(1), (tokens, width))
    now, given = run.place(filled(state), given)
    seconds, losses = [], []
    for _ in range(WARM + STEPS):
        started = time.perf_counter()
        now, loss = run(now, given)
        jax.block_until_ready((now, loss))
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    stats = jax.devices()[0].memory_stats() or {}
    return found | {
        "seconds": statistics.median(seconds[WARM:]),
        "losses": losses,
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def measured(asked: dict[str, Any], limit: float) -> dict[str, Any]:
    """One row, from a process of its own; what it said last where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--row", json.dumps(asked), str(out)]
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93", **os.environ}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {limit:g} s"}
        if done.returncode:
            return {"error": what_failed(done.stderr)}
        return json.loads(out.read_text())


def main() -> int:
    if sys.argv[1:2] == ["--row"]:
        Path(sys.argv[3]).write_text(json.dumps(one_row(json.loads(sys.argv[2]))))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--share", type=float, nargs="+", default=[0.6, 0.4])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("width", "layers", "tokens")}
    base = measured({**sizes, "way": None}, options.limit)["compiled_bytes"]
    result: dict[str, Any] = {**sizes, "versions": versions(), "as_written": base, "rows": []}
    for share in options.share:
        for way in options.ways:
            asked = {**sizes, "way": way, "budget": int(base * share)}
            row = {"way": way, "budget": asked["budget"], **measured(asked, options.limit)}
            row |= compared(row)
            result["rows"].append(row)
            if "error" in row:
                print(f"{share:4.0%} {way:18s} {row['error'][:120]}", flush=True)
            else:
                times = f"{row['predicted_seconds'] * 1e3:8.1f} {row['seconds'] * 1e3:8.1f} ms"
                peak = (row["peak_bytes"] or 0) / row["budget"]
                peak = f"peak {peak:.3f} of the budget{as_predicted(row)}"
                print(f"{share:4.0%} {way:18s} {times}, {peak}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
