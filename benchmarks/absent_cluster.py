"""A GPT of 70e9 parameters planned for 64 GPUs that are not there, on the machine at hand.

    JAX_PLATFORMS=cpu python benchmarks/absent_cluster.py [--budget 72GiB]... [--json OUT]

87 scanned layers of 8192, 16 x 4096 tokens, bfloat16 with float32 parameters, AdamW: the tensor
parallel axis has 8 devices, and the rest of each leaf is split over 8 more ("zero3"), for
`8x8xh100`. Nothing runs and no parameter is made. Five minutes are allowed on two cores, and 80 GB
on each device, by XLA:GPU's own figures of the compiled program. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from models.gpt import GPT, GPTConfig
from train_distributed import first_state, make_train_step

import jaxmem
from jaxmem.units import format_bytes

TARGET, MOST_BYTES, MOST_SECONDS = "8x8xh100", 80e9, 300.0
CONFIG = GPTConfig(
    vocab_size=32768,
    layers=87,
    heads=64,
    d_model=8192,
    sequence=4096,
    dtype=jnp.bfloat16,
    param_dtype=jnp.float32,
    scan_layers=True,
)
BATCH = 16
COLUMNS, ROWS = PartitionSpec(None, None, "model"), PartitionSpec(None, "model")
TENSOR = {
    "*qkv*": COLUMNS,
    "*up*": COLUMNS,
    "*attention*out*": ROWS,
    "*down*": ROWS,
    "*tokens*": PartitionSpec("model"),
}


def planned(budget: str) -> dict[str, Any]:
    """One plan, in a process that has compiled nothing."""
    shapes = nnx.eval_shape(lambda: first_state(CONFIG))
    mesh = AbstractMesh((8, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tokens = jax.ShapeDtypeStruct((BATCH, CONFIG.sequence + 1), jnp.int32)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(parameters_of)))
    jax.clear_caches()
    started = time.perf_counter()
    plan = jaxmem.fit(
        make_train_step(CONFIG),
        budget=budget,
        target=TARGET,
        mesh=mesh,
        shard=[TENSOR, "zero3"],
        donate_argnums=0,
        progress=False,
    ).plan(shapes, tokens)
    seconds = time.perf_counter() - started
    return {
        "budget": budget,
        "parameters": parameters,
        "seconds": seconds,
        "compiles": len(plan.rounds),
        "predicted_bytes": plan.predicted_bytes,
        "predicted_ms": plan.predicted_seconds * 1e3,
        "pinned": plan.pinned,
        "compiled_bytes": plan.compiled_bytes,
        "keep_all_compiled_bytes": plan.keep_all_compiled_bytes,
        "argument_bytes": plan.argument_bytes,
        "kept": seconds <= MOST_SECONDS and plan.compiled_bytes <= MOST_BYTES,
    }


def parameters_of() -> nnx.State:
    """The parameters alone."""
    return nnx.state(GPT(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", action="append", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [planned(budget) for budget in options.budget or ["72GiB", "56GiB"]]
    for row in rows:
        kept, written = "" if row["kept"] else "  MISSED", row["keep_all_compiled_bytes"]
        print(
            f"{row['parameters'] / 1e9:.1f}e9 parameters in {row['budget']}: "
            f"{row['seconds']:.0f} s, {row['compiles']} compiles; "
            f"{format_bytes(row['compiled_bytes'])} compiled, "
            f"{format_bytes(row['predicted_bytes'])} predicted, "
            f"as written {format_bytes(written)}{kept}"
        )
    if options.json:
        about = {
            "jax": jax.__version__,
            "target": TARGET,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(about, indent=2) + "\n")
    return 0 if all(row["kept"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
