"""What a compiled GPT waits for copies to and from the host, for a GPU that need not be there.

    JAX_PLATFORMS=cpu python benchmarks/waits.py [--layers N] [--budget B] [--target T] [--json OUT]

A GPT of 1.3e9 parameters (or fewer layers of it) inside a budget that puts activations and moments
in host memory: what is not hidden on paper, and in the compiled program, played through in the
compiler's order with the target's rates. Nothing is run. Takes 3 minutes with all 24 layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

import jaxmem
from benchmarks.headline import versions
from benchmarks.workloads import gpt
from jaxmem.units import format_bytes

# 30% of what the step takes as written, as the headline benchmark found it on an H100.
BUDGET = "20.33GiB"


def waits(layers: int, budget: str, target: str) -> dict[str, Any]:
    """A plan, and what it waits for."""
    workload = gpt.workload(dataclasses.replace(gpt.SIZES["1.3b"], layers=layers))
    shapes = jax.eval_shape(workload.state), jax.eval_shape(workload.batch)
    started = time.perf_counter()
    plan = jaxmem.plan(
        workload.step, *shapes, budget=budget, target=target, donate_argnums=0, progress=False
    )
    return {
        "layers": layers,
        "target": target,
        "budget_bytes": plan.budget_bytes,
        "predicted_ms": 1e3 * plan.predicted_seconds,
        "predicted_exposed_ms": 1e3 * plan.exposed_seconds,
        "compiled_exposed_ms": 1e3 * (plan.compiled_exposed_seconds or 0.0),
        "compiled_bytes": plan.compiled_bytes,
        "host_bytes": plan.host_bytes,
        "updates_last": plan.updates_last,
        "planning_seconds": time.perf_counter() - started,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What a compiled GPT waits for copies.")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--budget", default=BUDGET, help=f"of each device; {BUDGET} by default")
    parser.add_argument("--target", default="h100")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    row = waits(options.layers, options.budget, options.target)
    print(f"predicted for a step      {row['predicted_ms']:7.1f} ms")
    print(f"of it not hidden, on paper{row['predicted_exposed_ms']:7.1f} ms")
    print(f"in the compiled program   {row['compiled_exposed_ms']:7.1f} ms")
    print(f"compiled for the device   {format_bytes(row['compiled_bytes']):>10}")
    if options.json:
        told = {"rows": [row], "versions": versions()}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
