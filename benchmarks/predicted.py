"""What the headline plans are predicted to take now, beside what was measured; without a GPU.

    JAX_PLATFORMS=cpu python benchmarks/predicted.py resnet unet3d bert --json OUT

Plans each net of ``headline.py`` for an absent H200 with the rates of ``results/h200_rates.json``,
inside the budgets of ``results/h200_headline_NET.json``, and compiles it. Predicted seconds and
bytes and compiled bytes are of this version, measured ones of the one that the results are of.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

import jaxmem
from benchmarks.headline import versions

RESULTS = Path(__file__).parent / "results"


def measured_target() -> jaxmem.Target:
    """An H200 with what was measured on one."""
    rows = json.loads((RESULTS / "h200_rates.json").read_text())["rows"]
    rates = {row["name"]: row["measured"] for row in rows if row["measured"]}
    table = jaxmem.Target("h200")
    flops = {dtype: rates.get(dtype, rate) for dtype, rate in table.flops.items()}
    others = {name: rate for name, rate in rates.items() if name.endswith("_per_second")}
    return jaxmem.Target("h200", flops=flops, **others)


def rows_of(net: str, target: jaxmem.Target) -> list[dict[str, Any]]:
    """As written and inside each budget."""
    seen = json.loads((RESULTS / f"h200_headline_{net}.json").read_text())
    module = importlib.import_module(f"benchmarks.workloads.{net}")
    work = module.workload(module.SIZES[seen["size"]])
    state, batch = jax.eval_shape(work.state), jax.eval_shape(work.batch)
    found = []
    for name, row in seen["rows"].items():
        if name != "jax: keep-all" and "jaxmem" not in name:
            continue
        plan = jaxmem.plan(
            work.step,
            state,
            batch,
            budget=row["limit"] or "128GiB",
            target=target,
            donate_argnums=0,
            progress=False,
        )
        found.append(
            {
                "net": net,
                "row": name,
                "predicted_seconds": plan.predicted_seconds,
                "measured_seconds": row["seconds"],
                "ratio": plan.predicted_seconds / row["seconds"],
                "predicted_bytes": plan.predicted_bytes,
                "compiled_bytes": plan.compiled_bytes,
                "measured_peak_bytes": row["peak_bytes"],
            }
        )
        shown = f"{plan.predicted_seconds * 1e3:7.1f} predicted, {row['seconds'] * 1e3:7.1f} ms"
        taken = plan.predicted_bytes / plan.compiled_bytes
        told = f"{shown}: {found[-1]['ratio']:.3f}; bytes {taken:.3f} of compiled"
        print(f"{net:8s} {name:20s} {told}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("nets", nargs="+", choices=["resnet", "bert", "gpt", "unet3d"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = measured_target()
    rows = [row for net in options.nets for row in rows_of(net, target)]
    if options.json:
        options.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
