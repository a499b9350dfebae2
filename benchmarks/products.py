"""How fast a GPU multiplies, by which operands have to be turned, and how fast it attends.

    python benchmarks/products.py --json benchmarks/results/h200_products.json
    JAX_PLATFORMS=cpu python benchmarks/products.py --small         # a dry run, of products alone

Products of float32 (TF32 where there is it) and bfloat16, each operand with the summed axis last
(``n`` of the first, ``t`` of the second) or first; TFLOP/s with cuBLAS's own choice of a kernel and
with XLA's tuning. Then cuDNN's flash attention, forward and backward, with a causal mask and
without: TFLOP/s of the products that the mask leaves. Beside each is what is predicted of it at the
rate that a large product has here. Times include what starting a program costs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks.headline import versions
from jaxmem.attending import attended
from jaxmem.program.cost import Rates
from jaxmem.runtime.rates import rates_of
from jaxmem.targets.measuring import GPU_OPTIONS, timed
from jaxmem.work import Work

SIZES = (
    *((4096, 4096, 4096), (16384, 1024, 1024), (8192, 8192, 8192)),
    *((1024, 1024, 16384), (2048, 2048, 2048), (16384, 4096, 1024)),
)
# Batch, rows, heads and the length of a head.
ATTENTION = ((16, 2048, 16, 128), (32, 512, 16, 64), (16, 2048, 16, 64), (4, 8192, 16, 128))
CALLS, DRAWN = 4, 2**20


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
    drawn = np.random.default_rng(seed).standard_normal(DRAWN).astype(np.float32)
    return jnp.asarray(np.resize(drawn, shape)).astype(dtype)


def seconds_of(step: Any, *args: Any) -> float:
    return timed(lambda: [step(*args) for _ in range(CALLS)]) / CALLS


def multiplied(dtype: str, sizes: tuple[int, int, int], layout: str) -> dict[str, Any]:
    """TFLOP/s of one product, by how its kernel was chosen."""
    m, n, k = sizes
    a = random((m, k) if layout[0] == "n" else (k, m), dtype)
    b = random((k, n) if layout[1] == "n" else (n, k), dtype, 1)
    summed = (int(layout[0] == "n"),), (int(layout[1] == "t"),)
    row: dict[str, Any] = {"dtype": dtype, "mnk": list(sizes), "layout": layout}
    on_gpu = jax.default_backend() == "gpu"
    for name, options in {"plain": GPU_OPTIONS, "tuned": {}}.items():
        fun = jax.jit(
            lambda a, b: jax.lax.dot_general(a, b, (summed, ((), ()))),
            compiler_options=options if on_gpu else None,
        )
        row[name] = 2 * m * n * k / seconds_of(fun.lower(a, b).compile(), a, b) / 1e12
    return row


def attending(shape: tuple[int, ...], causal: bool, rates: Rates) -> dict[str, Any]:
    """Milliseconds forward, and of both, and TFLOP/s of the products under the mask."""
    batch, rows, heads, head = shape
    given = [random(shape, "bfloat16", seed) for seed in range(3)]
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
    )
    forward = jax.jit(attend).lower(*given).compile()
    taken = seconds_of(forward, *given)
    made = forward(*given)
    back = jax.jit(lambda q, k, v, g: jax.vjp(attend, q, k, v)[1](g)).lower(*given, made).compile()
    both = seconds_of(back, *given, made)
    flops = 4 * batch * heads * rows * rows * head / (2 if causal else 1)
    expected = [
        rates.seconds(Work(does.flops, 0, "bfloat16", does.cycles, does.apart))
        for does in (
            attended(given[0].size, head, rows, 2, backward=way, causal=causal)
            for way in (False, True)
        )
    ]
    return {
        "shape": list(shape),
        "causal": causal,
        "fwd_ms": taken * 1e3,
        "both_ms": both * 1e3,
        "fwd_tfs": flops / taken / 1e12,
        "bwd_tfs": 2.5 * flops / (both - taken) / 1e12,
        "predicted_fwd_ms": expected[0] * 1e3,
        "predicted_both_ms": sum(expected) * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true", help="one small product of each form")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.small and jax.default_backend() != "gpu":
        parser.error(f"JAX's device is a {jax.default_backend()}, not a GPU: add --small")
    result: dict[str, Any] = {"versions": versions(), "products": [], "attention": []}
    sizes = ((64, 64, 64),) if options.small else SIZES
    for dtype, size, layout in itertools.product(
        ("float32", "bfloat16"), sizes, ("nn", "nt", "tn", "tt")
    ):
        result["products"].append(multiplied(dtype, size, layout))
        print(json.dumps(result["products"][-1]), flush=True)
    if not options.small:
        rates = rates_of(jaxmem.Target.local())
        for shape, causal in itertools.product(ATTENTION, (True, False)):
            result["attention"].append(attending(shape, causal, rates))
            print(json.dumps(result["attention"][-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
