"""Parameters in host memory: how fast a net runs whose weights are fetched as they are read.

    python benchmarks/parameters.py --json benchmarks/results/h200_parameters.json    # the device
    python benchmarks/parameters.py --layers 8 --width 512 --wide 2048 --batch 1 --length 512

16 layers of attention-like and wide products, bfloat16, unrolled, or with ``--scanned`` one
``lax.scan`` over their stacked weights. In one process: weights on the device,
``jaxmem.fit(host=...)`` inside a budget that is too small for all of them, and one ``jax.jit`` that
takes them from pinned host memory; first the net alone, then its gradients with the update of the
weights. Of the scanned net alone also one ``jax.jit`` whose layers take their own weights from
there. Medians; ``bytes`` are the compiler's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jaxmem
from benchmarks.timing import compared

SIZES = {"layers": 16, "width": 2048, "wide": 8192, "batch": 8, "length": 2048, "repeats": 9}
RATE = 0.01


def layer(x: jax.Array, w: dict) -> jax.Array:
    x = x + jnp.tanh(x @ w["q"]) @ w["o"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def net(params: Any, x: jax.Array) -> jax.Array:
    """The mean square of ``x`` [batch, length, width] after all layers, a list or stacked."""
    if isinstance(params, dict):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)
    else:
        for w in params:
            x = layer(x, w)
    return (x.astype(jnp.float32) ** 2).mean()


def fetching_net(params: dict, x: jax.Array) -> jax.Array:
    """The same of stacked weights in host memory: each layer takes its own from there."""

    def fetching(x: jax.Array, w: dict) -> tuple[jax.Array, None]:
        return layer(x, on_device(w)), None

    x, _ = jax.lax.scan(fetching, x, params)
    return (x.astype(jnp.float32) ** 2).mean()


def on_device(weights: Any) -> Any:
    return jax.tree.map(lambda w: jax.device_put(w, jax.memory.Space.Device), weights)


def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """One step of gradient descent on the logarithm of :func:`net`, which has no scale."""
    loss, grads = jax.value_and_grad(lambda params: jnp.log(net(params, x)))(params)
    return jax.tree.map(lambda w, g: w - jnp.asarray(RATE, w.dtype) * g, params, grads), loss


def weights(options: argparse.Namespace, where: Any = None) -> Any:
    """The weights, each layer's its own or stacked, in the memory ``where``."""
    width, wide = options.width, options.wide
    shapes = {"q": (width, width), "o": (width, width), "up": (width, wide), "down": (wide, width)}

    @jax.jit
    def of_layer(n: jax.Array) -> dict:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), n), len(shapes))
        return {
            name: (jax.random.normal(key, shape) * 0.02).astype(jnp.bfloat16)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    made = [of_layer(n) for n in range(options.layers)]
    if options.scanned:
        made = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)
    return made if where is None else jax.device_put(made, where)


def stock(function: Callable, train: bool, where: Any) -> Callable:
    """One program that takes the weights from the host, and gives new ones back there."""

    def whole(params: Any, x: jax.Array) -> Any:
        return function(on_device(params), x)

    if not train:
        return jax.jit(whole)
    return jax.jit(whole, donate_argnums=0, out_shardings=(where, None))


def measured(run: Callable, params: Any, x: jax.Array, train: bool, repeats: int) -> dict:
    """Median milliseconds, and the losses."""
    taken, losses = [], []
    for n in range(repeats + 1):
        started = time.perf_counter()
        found = jax.block_until_ready(run(params, x))
        if n:
            taken.append((time.perf_counter() - started) * 1e3)
        params, loss = found if train else (params, found)
        losses.append(float(loss))
    return {"ms": statistics.median(taken), "losses": [losses[0], losses[-1]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--scanned", action="store_true", help="one scan over stacked weights")
    parser.add_argument("--share", type=float, default=0.5, help="of what keep-all compiles to")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    where = SingleDeviceSharding(device, memory_kind="pinned_host" if on_gpu else None)
    shape = (options.batch, options.length, options.width)
    x = jax.random.normal(jax.random.key(1), shape).astype(jnp.bfloat16)
    rows = []
    for train in (False, True):
        function: Callable = step if train else net
        donated = (0,) if train else ()
        form = "gradients and update" if train else "forward"
        keep_all = jax.jit(function, donate_argnums=donated).lower(weights(options), x).compile()
        memory = keep_all.memory_analysis()
        whole = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        fitted = jaxmem.fit(
            function,
            host="params*",
            budget=int(whole * options.share),
            target=None if on_gpu else "h200",
            donate_argnums=donated,
            progress=False,
        )
        plan = fitted.plan(weights(options), x)
        ways: list[tuple[str, Callable, Any, int | None]] = [
            ("on the device", keep_all, None, whole),
            ("jaxmem, host=", fitted, where, plan.compiled_bytes),
        ]
        if on_gpu:
            ways.append(("one jax.jit", stock(function, train, where), where, None))
        if on_gpu and options.scanned and not train:
            ways.append(("one jax.jit, in the scan", jax.jit(fetching_net), where, None))
        for name, run, place, nbytes in ways:
            row: dict[str, Any] = {"form": form, "name": name, "bytes": nbytes}
            row |= measured(run, weights(options, place), x, train, options.repeats)
            if run is fitted:
                row |= {
                    "predicted_ms": plan.predicted_seconds * 1e3,
                    "stages": plan.streamed.stages if plan.streamed else 0,
                    "fetched_bytes": plan.streamed.fetched_bytes if plan.streamed else 0,
                    "read_ahead": plan.streamed.ahead if plan.streamed else 0,
                    "updated_by_rows": plan.streamed.by_rows if plan.streamed else 0,
                    "solver": plan.solver,
                }
                if on_gpu:
                    profile = fitted.profile(weights(options, place), x)[1]
                    row |= {"profile": str(profile), "exposed_ms": profile.exposed_seconds * 1e3}
            row |= compared(row)
            rows.append(row)
            print(row, flush=True)
    result = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "weight_bytes": sum(w.nbytes for w in jax.tree.leaves(weights(options))),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
