"""What the allocator of a real GPU sees when a GPT step runs inside a budget.

Each share of keep-all runs in a process of its own, because an allocator's peak is never reset.
Prints predicted, compiled and measured bytes side by side; exits with 1 if a measured peak is over
its budget.

    python benchmarks/real_peak.py --json results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import as_predicted

SHARES = (1.0, 0.7, 0.5, 0.35)
SIZES = ["--layers=12", "--width=1536", "--length=1024", "--batch=16"]


def measure(budget: int | None, options: list[str]) -> dict:
    """One run in this process."""
    import fit_step
    import jax

    import jaxmem

    settings = fit_step.parser().parse_args(options)
    state, tokens = fit_step.make_args(settings)
    step = jaxmem.fit(fit_step.make_step(settings, None), budget=budget, donate_argnums=0)
    plan = step.plan(state, tokens)
    seconds = []
    for _ in range(settings.repeats):
        start = time.perf_counter()
        state, loss = step(state, tokens)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - start)
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "compiled_bytes": plan.compiled_bytes,
        "allocator_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "seconds": statistics.median(seconds[1:]),
        "predicted_seconds": plan.predicted_seconds,
        "loss": float(loss),
        "compiles": len(plan.rounds),
    }


def in_a_process(budget: int | None, options: list[str]) -> dict:
    command = [sys.executable, __file__, "--one", str(budget), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one")
    given, options = parser.parse_known_args()
    options = options or SIZES
    if given.one:
        print(json.dumps(measure(None if given.one == "None" else int(given.one), options)))
        return 0
    rows, broken = [], False
    for layout in ([], ["--scan"]):
        keep_all = None
        for share in SHARES:
            budget = None if keep_all is None else int(share * keep_all)
            row = {"share": share, "layout": "scan" if layout else "unrolled"}
            row |= in_a_process(budget, [*options, *layout])
            keep_all = keep_all or row["compiled_bytes"]
            broken |= (row["allocator_peak_bytes"] or 0) > row["budget_bytes"]
            rows.append(row)
            shown = [
                f"{(row[k] or 0) / 2**30:7.2f}"
                for k in (
                    "budget_bytes",
                    "predicted_bytes",
                    "compiled_bytes",
                    "allocator_peak_bytes",
                )
            ]
            print(
                f"{row['layout']:9s} {share:4.0%} GiB: budget {shown[0]} predicted {shown[1]} "
                f"compiled {shown[2]} allocator {shown[3]}  {row['seconds'] * 1e3:7.1f} ms  "
                f"loss {row['loss']:.5f}{as_predicted(row)}",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps({"options": options, "rows": rows}, indent=1))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
