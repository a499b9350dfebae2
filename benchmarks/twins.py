"""Two scanned nets of one form in one step, each with its own gradient: bytes and time.

    python benchmarks/twins.py --json benchmarks/results/h200_twins.json
    JAX_PLATFORMS=cpu python benchmarks/twins.py --layers 4 --width 32 --rows 64   # a dry run

What loops stack into, XLA:GPU makes for all loops of one kind before anything else runs (before jax
0.12), so that one net's residuals are there beside the other's. As written, with each layer
checkpointed in plain JAX, and with jaxmem inside shares of what it takes as written. Every row is a
process of its own, so that the allocator's peak is that row's; one that fails says why. Medians of
samples of about a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.headline import versions, what_failed
from benchmarks.timing import as_predicted, timed

WRITTEN, CHECKPOINTED, JAXMEM = "as written", "jax.checkpoint per layer", "jaxmem"
SHARES = (0.6, 0.4, 0.25)


def loss_of(weights: jax.Array, rows: jax.Array, *, checkpoint: bool) -> jax.Array:
    """A loss of ``(layers, width, width)`` weights and ``(rows, width)`` inputs."""

    def layer(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return y + jnp.tanh(y @ w), None

    body = jax.checkpoint(layer) if checkpoint else layer
    return jnp.square(jax.lax.scan(body, rows, weights)[0]).mean()


def step_of(*, checkpoint: bool) -> Any:
    """Both nets take a step of gradient descent."""

    def step(weights: list[jax.Array], rows: list[jax.Array]) -> tuple[list, jax.Array]:
        new, losses = [], []
        for w, x in zip(weights, rows, strict=True):
            loss, gradient = jax.value_and_grad(loss_of)(w, x, checkpoint=checkpoint)
            new.append(w - 0.1 * gradient)
            losses.append(loss)
        return new, jnp.stack(losses)

    return step


def measure(way: str, budget: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process."""
    shapes = (options.layers, options.width, options.width), (options.rows, options.width)

    def made(first: int, shape: tuple[int, ...], scale: float) -> list[jax.Array]:
        keys = [jax.random.key(first + n) for n in range(2)]
        return [scale * jax.random.normal(key, shape) for key in keys]

    weights = made(0, shapes[0], options.width**-0.5)
    rows = made(2, shapes[1], 1.0)
    step, told = step_of(checkpoint=way == CHECKPOINTED), {}
    if way == JAXMEM:
        run = jaxmem.fit(step, budget=budget, donate_argnums=0, progress=False)
        plan = run.plan(weights, rows)
        told = {
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted_bytes,
            "predicted_seconds": plan.predicted_seconds,
            "compiled_bytes": plan.compiled_bytes,
            "keep_all_predicted_bytes": plan.keep_all_predicted_bytes,
            "compiles": len(plan.rounds),
        }
    else:
        run = jax.jit(step, donate_argnums=0).lower(weights, rows).compile()
        memory = run.memory_analysis()
        told["compiled_bytes"] = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
    held = {"weights": weights}
    del weights

    def once() -> jax.Array:
        held["weights"], losses = run(held["weights"], rows)
        return losses.sum()

    seconds, losses = timed(once, lambda: jax.block_until_ready(held["weights"]), options.samples)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return told | {"seconds": seconds, "losses": losses, "peak_bytes": peak}


def in_a_process(way: str, budget: int | None, given: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--row", json.dumps([way, budget]), *given]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (what_failed(done.stderr) or f"exit {done.returncode}")}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, most in (("layers", 24), ("width", 1024), ("rows", 16384), ("samples", 5)):
        parser.add_argument(f"--{name}", type=int, default=most)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        way, budget = json.loads(options.row)
        print(json.dumps(measure(way, budget, options)))
        return 0
    sizes = {name: getattr(options, name) for name in ("layers", "width", "rows", "samples")}
    given = [f"--{name}={value}" for name, value in sizes.items()]
    result: dict[str, Any] = {**sizes, "versions": versions(), "rows": {}}
    for way, share in ((WRITTEN, None), (CHECKPOINTED, None), *((JAXMEM, s) for s in SHARES)):
        name = way if share is None else f"{way} {share:.0%}"
        whole = result["rows"].get(WRITTEN, {}).get("compiled_bytes")
        row = in_a_process(way, None if share is None else int(share * whole), given)
        result["rows"][name] = row
        if "error" in row:
            print(f"{name:26s} {row['error'][:120]}", flush=True)
            if way == WRITTEN:
                return 1
            continue
        sizes_told = "  ".join(
            f"{key.removesuffix('_bytes')} {row[key] / 2**30:.2f}"
            for key in ("budget_bytes", "predicted_bytes", "compiled_bytes", "peak_bytes")
            if row.get(key)
        )
        told = f"{row['seconds'] * 1e3:8.1f} ms  {sizes_told}  loss {row['losses'][-1]:.6f}"
        print(f"{name:26s} {told}{as_predicted(row)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
