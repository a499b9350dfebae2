"""Whether copies of residuals to the host and back hide, against JAX's own offload.

    python benchmarks/offload.py --json benchmarks/results/h200_offload.json    # on the device
    python benchmarks/offload.py --layers 3 --width 64 --batch 2 --length 64    # a dry run

A residual net of 16 layers (2048 wide, 8192 inside, bfloat16, batch 8 x 2048), gradients only. Two
cases: the input of each layer waits on the host and everything else is made again, or the wide
product does and the other products stay on the device. Each three ways: nothing offloaded,
``jax.checkpoint`` with JAX's offload policy, and jaxmem with the same decisions. In one process, so
ratios between rows mean something. ``exposed`` is when only copies run, of one profiled step;
``gradients_off`` is how far gradients are from those of the step as it is written.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from benchmarks.timing import compared
from jaxmem import policies
from jaxmem.runtime.profile import profiled

SIZES = {"layers": 16, "width": 2048, "wide": 8192, "batch": 8, "length": 2048, "repeats": 9}
CASES = {"layer input": ((), ("input",)), "wide product": (("input", "q", "o"), ("up",))}


def layer(x: jax.Array, w: tuple) -> jax.Array:
    up, down, q, o = w
    x = checkpoint_name(x, "input")
    x = x + checkpoint_name(jax.nn.gelu(checkpoint_name(x @ q, "q")) @ o, "o")
    return x + jax.nn.gelu(checkpoint_name(x @ up, "up")) @ down


def step_of(scan: bool, policy: Any = None) -> Callable:
    """The gradient of the net, each layer under ``jax.checkpoint`` where there is a policy."""
    block = layer if policy is None else jax.checkpoint(layer, policy=policy, prevent_cse=not scan)

    def loss(weights, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)
        else:
            for w in weights:
                x = block(x, w)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(weights, x):
        return jax.value_and_grad(loss)(weights, x)

    return step


def arguments(options: argparse.Namespace, scan: bool) -> tuple:
    n, d, f = options.layers, options.width, options.wide
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = ((d, f), (f, d), (d, d), (d, d))
    weights = [(jax.random.normal(next(keys), (n, *s)) * 0.02).astype(jnp.bfloat16) for s in shapes]
    x = jax.random.normal(next(keys), (options.batch, options.length, d)).astype(jnp.bfloat16)
    if scan:
        return tuple(weights), x
    return [tuple(w[i] for w in weights) for i in range(n)], x


def stock(saved: tuple, away: tuple) -> Any:
    """JAX's own policy."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(away),
        offload_src="device",
        offload_dst="pinned_host",
    )


def ours(saved: tuple, away: tuple) -> policies.Policy:
    """The same as one of jaxmem's."""
    policy = policies.nothing
    for rule, names in ((policies.save, saved), (policies.offload, away)):
        policy = policy.override(rule(*names)) if names else policy
    return policy


def distance(found: Any, reference: Any) -> float:
    """Largest relative distance of a gradient, in the norm of each leaf."""

    @jax.jit
    def relative(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm(x - y) / jnp.maximum(jnp.linalg.norm(y), 1e-30)

    return max(float(d) for d in jax.tree.leaves(jax.tree.map(relative, found, reference)))


def measured(
    name: str, run: Callable, args: tuple, memory: Any, repeats: int, reference: Any
) -> dict[str, Any]:
    """A row: median milliseconds, bytes, the loss, and what the profile of a step says."""
    loss, gradients = jax.block_until_ready(run(*args))
    memory = {"loss": float(loss), "gradients_off": distance(gradients, reference), **memory}
    del gradients
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append((time.perf_counter() - started) * 1e3)
    row = {"name": name, "ms": statistics.median(taken), **memory}
    row |= compared(row)
    if jax.default_backend() == "gpu":
        told = dataclasses.asdict(profiled(lambda: run(*args)))
        row |= {name.removesuffix("_seconds"): taken * 1e3 for name, taken in told.items()}
    shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
    print(shown, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    rows = []
    for scan in (True, False):
        args = arguments(options, scan)
        form = "scanned" if scan else "unrolled"
        reference = jax.jit(step_of(scan))(*args)[1]
        for case, (saved, away) in CASES.items():
            stay = ours((*saved, *away), ())
            plans = {"nothing offloaded": stay} | ({"jaxmem": ours(saved, away)} if on_gpu else {})
            for name, policy in plans.items():
                step = jaxmem.fit(step_of(scan), policy=policy, host_budget=0, progress=False)
                if name == "jaxmem":
                    step = jaxmem.fit(step_of(scan), policy=policy, progress=False)
                plan = step.plan(*args)
                memory = {
                    "bytes": plan.compiled_bytes,
                    "host_bytes": plan.host_bytes,
                    "predicted_ms": plan.predicted_seconds * 1e3,
                }
                name = f"{form}, {case}: {name}"
                rows.append(measured(name, step, args, memory, options.repeats, reference))
            if on_gpu:
                run = jax.jit(step_of(scan, stock(saved, away))).lower(*args).compile()
                found: Any = run.memory_analysis()
                memory = {
                    "bytes": found.argument_size_in_bytes
                    + found.output_size_in_bytes
                    + found.temp_size_in_bytes,
                    "host_bytes": found.host_temp_size_in_bytes,
                }
                name = f"{form}, {case}: jax.checkpoint"
                rows.append(measured(name, run, args, memory, options.repeats, reference))
    if options.json:
        result = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "options": {k: v for k, v in vars(options).items() if k != "json"},
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
