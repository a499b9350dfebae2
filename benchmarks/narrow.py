"""How fast a GPU sums arrays over few columns, in kernels that write what they sum and others.

    python benchmarks/narrow.py --json benchmarks/results/h200_narrow.json

XLA:GPU makes one kernel of an array and the sums of it (multi-output fusion). With fewer columns
than a warp's two rows have, such a kernel may be far slower than the device's memory: the norms of
a 3D U-Net, of 24 and 48 channels, and their gradients. Each row is one program: its milliseconds,
the bytes of its operands and results over them, and how many kernels the compiler made of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.headline import versions
from benchmarks.kernels import instructions

COLUMNS = (3, 8, 16, 24, 32, 48, 64, 96, 192)
ELEMENTS, SLICES = 400_000_000, 128
CALLS, REPEATS = 4, 5


def total(y: jax.Array) -> jax.Array:
    return y.astype(jnp.float32).sum((0, 1))


def totals(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = y.astype(jnp.float32)
    return wide.sum((0, 1)), (wide * wide).sum((0, 1))


def gradient(g: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    """What passes a rectified norm backwards, with its sum and that of its product with ``x``."""
    passed = jnp.where(x > 0, g, 0)
    wide = passed.astype(jnp.float32)
    return passed, wide.sum((0, 1)), (wide * x.astype(jnp.float32)).sum((0, 1))


def around(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """The gradient of three slices of a padded array: each slice is a sum of three."""
    before, after = (jnp.pad(a, (side, (0, 0), (0, 0))) for a, side in ((x, (0, 1)), (z, (1, 0))))
    return before[1:] + y + after[:-1]


WAYS: dict[str, tuple[int, Callable[..., Any]]] = {
    "made": (2, lambda x, y: x + y),
    "summed": (1, total),
    "summed twice": (1, totals),
    "made and summed": (2, lambda x, y: (x + y, total(x + y))),
    "made and summed twice": (2, lambda x, y: (x + y, *totals(x + y))),
    "gradient": (2, gradient),
    "of slices": (3, around),
    "of slices and summed": (3, lambda *a: (around(*a), total(around(*a)))),
    "of slices and summed twice": (3, lambda *a: (around(*a), *totals(around(*a)))),
}


def row(name: str, columns: int, dtype: str, elements: int) -> dict[str, Any]:
    """One program, timed."""
    count, fun = WAYS[name]
    # Powers of two, so that no kernel pads what it sums.
    shape = (SLICES, 2 ** round(math.log2(elements / SLICES / columns)), columns)
    keys = jax.random.split(jax.random.key(0), count)
    given = [jax.random.normal(key, shape[1:], dtype) for key in keys]
    given = [jnp.broadcast_to(x, shape) + 0 for x in given]
    compiled = jax.jit(fun).lower(*given).compile()
    made = instructions(compiled.as_text())
    results = jax.tree.leaves(jax.eval_shape(fun, *given))
    nbytes = sum(x.size * x.dtype.itemsize for x in [*given, *results])
    seconds = []
    for _ in range(2 + REPEATS):
        started = time.perf_counter()
        jax.block_until_ready([compiled(*given) for _ in range(CALLS)])
        seconds.append((time.perf_counter() - started) / CALLS)
    median = statistics.median(seconds[2:])
    return {
        "way": name,
        "columns": columns,
        "dtype": dtype,
        "shape": shape,
        "seconds": median,
        "nbytes": nbytes,
        "bytes_per_second": nbytes / median,
        "kernels": [i["type"] for i in made.values() if i["kind"] == "fusion"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--columns", type=int, nargs="*", default=COLUMNS)
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtypes", nargs="*", default=dtypes, choices=dtypes)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if min(options.columns) < 1 or options.elements < SLICES * max(options.columns):
        parser.error(
            f"--elements is at least {SLICES} rows of each of --columns, which are 1 or more"
        )
    rows = []
    for dtype, columns, name in itertools.product(options.dtypes, options.columns, WAYS):
        rows.append(row(name, columns, dtype, options.elements))
        its = rows[-1]
        told = f"{its['seconds'] * 1e3:8.3f} ms {its['bytes_per_second'] / 1e12:6.3f} TB/s"
        print(f"{dtype:9s} {columns:4d} {name:28s} {told} {len(its['kernels'])}", flush=True)
    if options.json:
        content = {"versions": versions(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
