"""How long planning takes: a program of 5,000 equations, and two GPTs of 24 layers on an H200.

    JAX_PLATFORMS=cpu python benchmarks/planning.py [--only equations|gpt_scan|gpt_unrolled]
        [--repeat 3] [--json OUT]

The first is traced, planned at half of its temporaries and rewritten, without a compile: 10 s are
allowed. The GPTs (d_model 2048, sequence 2048, batch 16, bfloat16, AdamW) are planned at 35% of
the temporaries of keep-all for an H200 that is not there, compiles included: 120 s are allowed on
two cores, and the prediction must be within 10% of what the compiler says. Exits with 1 if one of
these is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

import jaxmem
from jaxmem.planner.search import Search
from jaxmem.program.calling import Caller
from jaxmem.program.cost import Rates
from jaxmem.rewrite.emit import as_function
from jaxmem.targets import Target, compile_for
from jaxmem.units import format_bytes
from tests.problems import LARGE
from tests.problems.large import make
from tests.problems.transformers import Form, Shape

EQUATIONS, EQUATIONS_SECONDS = 5000, 10.0
GPT_SECONDS, GPT_SHARE, GPT_RATIO = 120.0, 0.35, 0.10
DEEP = Shape(layers=19, d_model=256, heads=4, vocab=1024, batch=8, sequence=256)
TARGET = "h200"


def equations(repeat: int) -> dict[str, Any]:
    """Trace, plan and rewrite an unrolled GPT of at least 5,000 equations."""
    runs = [_without_compiling() for _ in range(repeat)]
    row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    row["seconds"] = statistics.median(run["seconds"] for run in runs)
    row["all_seconds"] = [run["seconds"] for run in runs]
    row["kept"] = row["equations"] >= EQUATIONS and row["seconds"] <= EQUATIONS_SECONDS
    return row


def _without_compiling() -> dict[str, Any]:
    target = Target(TARGET)
    step, args = make(Form(scan=False, tied=True), DEEP)
    marks = [time.perf_counter()]
    caller = Caller(step, (0, 1))
    program = caller.trace(caller.take(args, {})).program
    marks.append(time.perf_counter())
    search = Search(program, Rates(dict(target.flops), target.hbm_bytes_per_second))
    solution = search.solve(search.keep_all.temp_bytes // 2)
    marks.append(time.perf_counter())
    if solution is None:
        raise SystemExit("half of the temporaries was not reached")
    jax.jit(as_function(search.schedule(solution))).trace(*program.avals())
    marks.append(time.perf_counter())
    trace, plan, rewrite = (b - a for a, b in itertools.pairwise(marks))
    return {
        "equations": program.equations,
        "trace_seconds": trace,
        "plan_seconds": plan,
        "rewrite_seconds": rewrite,
        "seconds": marks[-1] - marks[0],
        "share_of_temporaries": solution.temp_bytes / search.keep_all.temp_bytes,
    }


def gpt(name: str) -> dict[str, Any]:
    """Plan one of the large problems, all compiles included."""
    problem = LARGE[name]
    step, args = problem.make()
    keep_all = compile_for(TARGET, step, args, donate=problem.donate).memory
    fixed = keep_all.total_bytes - keep_all.temp_bytes
    budget = int(fixed + GPT_SHARE * keep_all.temp_bytes)
    jax.clear_caches()
    started = time.perf_counter()
    plan = jaxmem.plan(
        step, *args, budget=budget, target=TARGET, donate_argnums=problem.donate, progress=False
    )
    seconds = time.perf_counter() - started
    ratio = plan.predicted_bytes / plan.compiled_bytes
    return {
        "seconds": seconds,
        "keep_all_bytes": keep_all.total_bytes,
        "budget_bytes": budget,
        "predicted_bytes": plan.predicted_bytes,
        "compiled_bytes": plan.compiled_bytes,
        "predicted_over_compiled": ratio,
        "keep_all_predicted_over_compiled": plan.keep_all_predicted_bytes / keep_all.total_bytes,
        "compiles": len(plan.rounds),
        "slower": plan.predicted_seconds / plan.keep_all_seconds,
        "kept": seconds <= GPT_SECONDS
        and plan.compiled_bytes <= budget
        and abs(ratio - 1) <= GPT_RATIO,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = []
    for name, row in rows.items():
        cells = [
            f"{key} {format_bytes(value) if key.endswith('_bytes') else _number(value)}"
            for key, value in row.items()
            if key not in ("kept", "all_seconds")
        ]
        lines += [f"{name}: {'kept' if row['kept'] else 'MISSED'}", *(f"    {c}" for c in cells)]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> int:
    runs: dict[str, Callable[[int], dict[str, Any]]] = {
        "equations": equations,
        **{name: lambda _, name=name: gpt(name) for name in LARGE},
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(runs))
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of the first; the median counts"
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    wanted = parser.parse_args()
    rows = {}
    for name in wanted.only or runs:
        rows[name] = runs[name](wanted.repeat)
        print(table({name: rows[name]}), flush=True)
    if wanted.json:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        result = {"jax": jax.__version__, "cores": os.cpu_count(), "load": load, "rows": rows}
        wanted.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(row["kept"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
