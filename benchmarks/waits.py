"""What a compiled GPT waits for copies to and from the host, for a GPU that need not be there.

    JAX_PLATFORMS=cpu python benchmarks/waits.py [--layers N] [--budget B] [--target T] [--json OUT]
    python benchmarks/waits.py --run [--plan FILE]                                        # a GPU

A GPT of 1.3e9 parameters (or fewer layers of it) inside a budget that puts activations and moments
in host memory: what is not hidden on paper, and in the compiled program, played through in the
compiler's order with the target's rates. Nothing is run but with ``--run``, which times the step on
the GPU that is here and reads from a profile how long only copies ran. A plan that is in ``--plan``
is followed, and one that was made is kept there. Planning takes 4 minutes with all 24 layers.
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
from benchmarks.timing import timed
from benchmarks.ways_jax import peak_bytes
from benchmarks.workloads import gpt
from jaxmem.runtime.profile import profiled
from jaxmem.units import format_bytes

# 30% of what the step takes as written, as the headline benchmark found it on an H100.
BUDGET = "20.33GiB"


def waits(options: argparse.Namespace) -> dict[str, Any]:
    """A plan, what it waits for, and what was measured of that where it was run."""
    size = dataclasses.replace(gpt.SIZES["1.3b"], layers=options.layers)
    workload = gpt.workload(size)
    shapes = jax.eval_shape(workload.state), jax.eval_shape(workload.batch)
    kept: Path | None = options.plan
    known = jaxmem.Plan.load(kept) if kept is not None and kept.exists() else None
    target = jaxmem.Target.local() if options.run else options.target or "h100"
    started = time.perf_counter()
    settings = {"budget": options.budget, "target": target, "plan": known, "progress": False}
    step = jaxmem.fit(workload.step, donate_argnums=0, **settings)
    plan = step.plan(*shapes)
    row = {
        "layers": options.layers,
        "target": plan.target,
        "budget_bytes": plan.budget_bytes,
        "predicted_ms": 1e3 * plan.predicted_seconds,
        "predicted_exposed_ms": 1e3 * plan.exposed_seconds,
        "compiled_exposed_ms": 1e3 * (plan.compiled_exposed_seconds or 0.0),
        "compiled_bytes": plan.compiled_bytes,
        "host_bytes": plan.host_bytes,
        "updates_last": plan.updates_last,
        "slack_ms": 1e3 * plan.slack_seconds,
        "followed": known is not None,
        "planning_seconds": time.perf_counter() - started,
    }
    if known is None and kept is not None:
        plan.save(kept)
    return row | (measured(step, workload, options.samples) if options.run else {})


def measured(step: Any, workload: Any, samples: int) -> dict[str, Any]:
    """Steps on the GPU that is here."""
    state, batch = jax.jit(workload.state)(), jax.jit(workload.batch)()
    held = {"state": step.place(state, batch)[0]}
    del state

    def once() -> Any:
        held["state"], loss = step(held["state"], batch)
        return loss

    seconds, losses = timed(once, lambda: jax.block_until_ready(held["state"]), samples)
    profile = profiled(lambda: (once(), held["state"]))
    return {
        "measured_ms": 1e3 * seconds,
        "losses": losses,
        "allocator_peak_bytes": peak_bytes(),
        "profile": dataclasses.asdict(profile),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What a compiled GPT waits for copies.")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--budget", default=BUDGET, help=f"of each device; {BUDGET} by default")
    parser.add_argument("--target", help="h100 by default; with --run what is here")
    parser.add_argument("--run", action="store_true", help="time it on the GPU that is here")
    parser.add_argument("--samples", type=int, default=3, help="of steps, with --run")
    parser.add_argument("--plan", type=Path, help="follow this plan, or keep the one made here")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    if options.run and options.target:
        parser.error("--run is for the GPU that is here: leave --target out")
    row = waits(options)
    print(f"predicted for a step      {row['predicted_ms']:7.1f} ms")
    print(f"of it not hidden, on paper{row['predicted_exposed_ms']:7.1f} ms")
    print(f"in the compiled program   {row['compiled_exposed_ms']:7.1f} ms")
    print(f"compiled for the device   {format_bytes(row['compiled_bytes']):>10}")
    if options.run:
        print(f"measured                  {row['measured_ms']:7.1f} ms")
        print(f"of it only copies         {1e3 * row['profile']['exposed_seconds']:7.1f} ms")
        print(f"allocator's peak          {format_bytes(row['allocator_peak_bytes']):>10}")
    if options.json:
        told = {"rows": [row], "versions": versions()}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
