"""Scanned GPTs without a GPU: the bytes that plans are predicted to take, and what they compile to.

    JAX_PLATFORMS=cpu python benchmarks/scanned.py --json results/absent_h200_scanned.json

A loop is where the compiler decides most by itself: the layout of what it stacks, and the order of
what is in its body. Each GPT is planned for all that the GPU has, in which loops may do again what
takes longer to copy, and inside shares of what the step takes as written, or of the GPU if less.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

import jaxmem
from benchmarks.headline import versions
from benchmarks.workloads import gpt

# Size, and how attention is computed: ``xla`` writes out the products of queries and keys.
NETS = (("350m", "cudnn"), ("350m", "xla"), ("1.3b", "cudnn"), ("1.3b", "xla"))
SHARES = (0.5, 0.3, 0.2)


def planned(work: Any, budget: int | None, target: str) -> jaxmem.Plan:
    return jaxmem.plan(
        work.step,
        jax.eval_shape(work.state),
        jax.eval_shape(work.batch),
        budget=budget,
        target=target,
        donate_argnums=0,
        progress=False,
    )


def rows_of(size: str, attention: str, target: str) -> list[dict[str, Any]]:
    """On all of the GPU and inside each share; where nothing fits, the smallest that does."""
    work = gpt.workload(gpt.SIZES[size], attention=attention, scan=True)
    found = []
    whole = 0
    for share in (None, *SHARES):
        budget = None if share is None else int(share * whole)
        row: dict[str, Any] = {"net": f"{size} {attention}", "share": share}
        try:
            plan = planned(work, budget, target)
        except jaxmem.BudgetInfeasibleError as error:
            row |= {"budget_bytes": budget, "smallest_bytes": error.smallest_bytes}
            told = f"nothing fits; the smallest is {error.smallest_bytes / 2**30:.2f} GiB"
        else:
            written = plan.keep_all_compiled_bytes or plan.keep_all_predicted_bytes
            whole = whole or min(written, plan.budget_bytes)
            row |= {
                "budget_bytes": plan.budget_bytes,
                "predicted_bytes": plan.predicted_bytes,
                "compiled_bytes": plan.compiled_bytes,
                "predicted_seconds": plan.predicted_seconds,
                "compiles": len(plan.rounds),
            }
            ratio = plan.predicted_bytes / plan.compiled_bytes
            told = f"{plan.compiled_bytes / 2**30:7.2f} GiB compiled, {ratio:.3f} of it predicted"
        found.append(row)
        print(f"{row['net']:12s} {share or 'all of it'!s:10s} {told}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--size", choices=sorted(gpt.SIZES), help="only this one, with XLA's attention"
    )
    parser.add_argument("--target", default="h200")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    nets = [(options.size, "xla")] if options.size else NETS
    rows = [row for net in nets for row in rows_of(*net, options.target)]
    if options.json:
        told = {"versions": versions(), "target": options.target, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
