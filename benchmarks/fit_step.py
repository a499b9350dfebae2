"""Step time and peak memory of a GPT train step: stock JAX settings against jaxmem at their peaks.

For every stock setting (keep-all, and ``jax.checkpoint`` on each layer with two of JAX's policies)
the step is run and timed, and then jaxmem is given the bytes that setting compiled to as its
budget. All in one process on one device, so only ratios between rows mean something.

    python benchmarks/fit_step.py --json results.json          # on the local device
    python benchmarks/fit_step.py --layers 2 --width 64 --length 32 --batch 2   # a dry run
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.timing import as_predicted, compared

POLICIES = {
    "keep-all": None,
    "checkpoint, dots_saveable": jax.checkpoint_policies.dots_saveable,
    "checkpoint, nothing_saveable": jax.checkpoint_policies.nothing_saveable,
}

SIZES = {
    "layers": 16,
    "width": 2048,
    "length": 1024,
    "batch": 16,
    "vocab": 50304,
    "heads": 16,
    "repeats": 7,
}


def layer(x, w, heads):
    batch, length, width = x.shape
    qkv = jnp.split(norm(x) @ w["qkv"], 3, -1)
    q, k, v = (a.reshape(batch, length, heads, width // heads) for a in qkv)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32)).astype(x.dtype)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def norm(x):
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype)


def make_step(options, policy):
    def block(x, w):
        return layer(x, w, options.heads)

    if policy is not None:
        block = jax.checkpoint(block, policy=policy, prevent_cse=not options.scan)

    def loss_fn(params, tokens):
        x = params["embed"][tokens]
        if options.scan:
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = block(x, w)
        logits = (norm(x) @ params["embed"].T).astype(jnp.float32)[:, :-1]
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def step(state, tokens):
        params, mean, square = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, grads)
        params = jax.tree.map(
            lambda p, m, s: p - (1e-4 * m / (jnp.sqrt(s) + 1e-3)).astype(p.dtype),
            params,
            mean,
            square,
        )
        return (params, mean, square), loss

    return step


def make_args(options):
    dtype, width = jnp.dtype(options.dtype), options.width
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def weight(*shape):
        lead = (options.layers,) if options.scan else ()
        return (jax.random.normal(next(keys), (*lead, *shape)) * 0.02).astype(dtype)

    stacked = {
        "qkv": weight(width, 3 * width),
        "out": weight(width, width),
        "up": weight(width, 4 * width),
        "down": weight(4 * width, width),
    }
    layers = (
        stacked
        if options.scan
        else [jax.tree.map(jnp.copy, stacked) for _ in range(options.layers)]
    )
    embed = (jax.random.normal(next(keys), (options.vocab, width)) * 0.02).astype(dtype)
    params = {"embed": embed, "layers": layers}
    zeros = partial(jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32))
    tokens = jax.random.randint(
        jax.random.key(1), (options.batch, options.length), 0, options.vocab
    )
    return (params, zeros(params), zeros(params)), tokens


def timed(run, options):
    """Median seconds per step, and the loss after all of them."""
    state, tokens = make_args(options)
    state, loss = run(state, tokens)
    jax.block_until_ready(loss)
    seconds = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        state, loss = run(state, tokens)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), float(loss)


def row(name, run, compiled_bytes, options, **more):
    seconds, loss = timed(run, options)
    found = {"setting": name, "compiled_bytes": compiled_bytes, "seconds": seconds, "loss": loss}
    found |= more
    print(
        f"{name:48s} {compiled_bytes / 2**30:8.3f} GiB {seconds * 1e3:9.2f} ms  loss {loss:.6f}"
        f"{as_predicted(found)}",
        flush=True,
    )
    return found | compared(found)


def parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scan", action="store_true", help="scan over layers")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    return parser


def main():
    options = parser().parse_args()
    rows = []
    for name, policy in POLICIES.items():
        args = jax.eval_shape(lambda: make_args(options))
        step = make_step(options, policy)
        compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
        memory = compiled.memory_analysis()
        total = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        rows.append(row(name, compiled, total, options))
        if policy is None:
            continue
        fitted = jaxmem.fit(make_step(options, None), budget=total, donate_argnums=0)
        start = time.perf_counter()
        plan = fitted.plan(*args)
        rows.append(
            row(
                f"jaxmem inside the bytes of {name}",
                fitted,
                plan.compiled_bytes,
                options,
                predicted_bytes=plan.predicted_bytes,
                budget_bytes=total,
                planning_seconds=time.perf_counter() - start,
                predicted_seconds=plan.predicted_seconds,
                solver=plan.solver,
                rounds=[dataclasses.asdict(r) for r in plan.rounds],
            )
        )
    stats = jax.devices()[0].memory_stats() or {}
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "rows": rows,
        "allocator_peak_bytes": stats.get("peak_bytes_in_use"),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
