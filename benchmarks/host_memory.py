"""What host memory buys on paper, and whether the compiler makes of such plans what was predicted.

    JAX_PLATFORMS=cpu python benchmarks/host_memory.py [--only ROW]... [--json OUT]

GPTs of 12 layers and an MLP with Adam are planned for an H200 that is not there, twice at each
budget: without host memory, and with 64 GiB of it. Seconds are predicted, bytes on the device are
predicted and compiled. A plan with host memory must not be predicted slower, and must be predicted
within 10% of what it compiles to; where nothing fits without it, it must fit. Exits with 1 if one
of these is missed. How fast copies run is not measured here: that takes a device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import optax

import jaxmem
from jaxmem.planner.plan import Plan
from jaxmem.targets import compile_for
from jaxmem.units import format_bytes
from tests.problems.transformers import Form, Shape, make

TARGET, HOST = "h200", "64GiB"
GPT = Shape(layers=12, d_model=1536, heads=24, vocab=50304, batch=16, sequence=1024)
MLP_LAYERS, MLP_WIDTH, MLP_ROWS = 12, 4096, 16384
SHARES = (0.4, 0.2, 0.12)
MOST_OFF = 0.10


def gpt(scan: bool) -> tuple[Callable, tuple]:
    """A GPT's train step and its arguments."""
    return make(Form(scan=scan, tied=True), GPT)


def mlp() -> tuple[Callable, tuple]:
    """An MLP's train step with Adam, whose moments are half of all it holds."""
    optimizer = optax.adam(1e-3)

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(weights, moments, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        updates, moments = optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    weights = [jax.ShapeDtypeStruct((MLP_WIDTH, MLP_WIDTH), jnp.float32)] * MLP_LAYERS
    x = jax.ShapeDtypeStruct((MLP_ROWS, MLP_WIDTH), jnp.float32)
    return step, (weights, jax.eval_shape(optimizer.init, weights), x)


MODELS = {"gpt": lambda: gpt(False), "gpt_scan": lambda: gpt(True), "mlp_adam": mlp}


def row(step: Callable, args: tuple, share: float) -> dict[str, Any]:
    """One budget with and without host memory."""
    memory = compile_for(TARGET, step, args, donate=(0, 1)).memory
    budget = memory.total_bytes - memory.temp_bytes + int(share * memory.temp_bytes)
    without, host = planned(step, args, budget, 0), planned(step, args, budget, HOST)
    found: dict[str, Any] = {"budget_bytes": budget}
    for name, plan in (("without", without), ("with", host)):
        if plan is not None:
            found |= {
                f"{name} seconds": plan.predicted_seconds,
                f"{name} predicted_bytes": plan.predicted_bytes,
                f"{name} compiled_bytes": plan.compiled_bytes,
                f"{name} host_bytes": plan.host_bytes,
                f"{name} solver": plan.solver,
                f"{name} compiles": len(plan.rounds),
            }
    if host is None:
        return found | {"kept": False}
    slower = without is not None and host.predicted_seconds > without.predicted_seconds
    off = abs(host.predicted_bytes / host.compiled_bytes - 1) > MOST_OFF
    return found | {"kept": not (slower or off)}


def planned(step: Callable, args: tuple, budget: int, host: int | str) -> Plan | None:
    """The plan, or ``None`` where nothing fits."""
    try:
        return jaxmem.plan(
            step,
            *args,
            budget=budget,
            target=TARGET,
            donate_argnums=(0, 1),
            host_budget=host,
            progress=False,
        )
    except jaxmem.BudgetInfeasibleError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(MODELS))
    parser.add_argument("--json", type=Path, metavar="OUT")
    wanted = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name in wanted.only or MODELS:
        step, args = MODELS[name]()
        for share in SHARES:
            found = rows[f"{name} at {share:.0%}"] = row(step, args, share)
            print(f"{name} at {share:.0%}: {'kept' if found['kept'] else 'MISSED'}")
            for key, value in found.items():
                if key != "kept":
                    shown = format_bytes(value) if key.endswith("_bytes") else value
                    print(f"    {key} {f'{shown:.4f}' if isinstance(shown, float) else shown}")
            sys.stdout.flush()
    if wanted.json:
        result = {"jax": jax.__version__, "target": TARGET, "cores": os.cpu_count(), "rows": rows}
        wanted.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(found["kept"] for found in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
