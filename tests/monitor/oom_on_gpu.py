"""Run a GPU out of memory in eager, jitted and fitted code, and apply what is said to help.

    python tests/monitor/oom_on_gpu.py [--json OUT]

Takes its size from what JAX may allocate, which it limits to a few GiB so that it is quick. Each
case fills the device beside a known amount that variables hold, and checks that the explanation
names the true largest holders with their bytes, and that its first fix, run as Python as it stands,
lets the same work go through. Without a GPU a limit is put in place of the device's, and the
failures are made up where the device would have failed: that checks this script, not XLA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
LIMIT_BYTES = 6 * 2**30


def limit_memory() -> None:
    """Let JAX take a few GiB of the GPU; before it starts."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:
        return
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        total = int(told.stdout.split()[0]) * 2**20
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{min(0.9, LIMIT_BYTES / total):.4f}"


limit_memory()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jaxmem  # noqa: E402
from jaxmem.monitor import figures  # noqa: E402

ON_GPU = jax.default_backend() == "gpu"
LAYERS = 8
results: dict[str, Any] = {}
history: list[Any] = []
cache: dict[str, Any] = {}


def device_stats() -> dict[str, int]:
    return figures.stats_of(jax.local_devices()[0]) or {}


def width() -> int:
    """Of a layer: parameters and moments take 2 to 3% of the device."""
    return 1024 if device_stats()["bytes_limit"] > 2**31 else 256


def block(nbytes: int, value: float = 1.0) -> jax.Array:
    return jnp.full((nbytes // 4,), value, jnp.float32)


def loss_fn(params: jax.Array, x: jax.Array) -> jax.Array:
    for n in range(LAYERS):
        x = x + jnp.tanh(x @ params[n])
    return (x**2).mean()


def written(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
    moment = 0.9 * state["moment"] + grads
    return {"params": state["params"] - 0.01 * moment, "moment": moment}, loss


def new_state() -> dict[str, jax.Array]:
    params = jnp.stack([jnp.eye(width())] * LAYERS) * 0.1
    return {"params": params, "moment": jnp.zeros_like(params)}


def told(name: str, explanation: Any) -> dict[str, Any]:
    print(f"--- {name}\n{explanation.text()}", flush=True)
    device = explanation.device
    return {
        "message": explanation.message,
        "headline": explanation.headline,
        "requested_bytes": explanation.requested_bytes,
        "in_use": str(device.in_use),
        "largest_free": str(explanation.largest_free),
        "holders": [[h.name, h.nbytes, h.count] for h in explanation.holdings[:4]],
        "fixes": [[f.what, f.code, f.saves_bytes, f.basis] for f in explanation.fixes],
        "notes": list(explanation.notes),
        "by_source": dict(list(explanation.report.by_source().items())[:4])
        if explanation.report
        else {},
    }


def raised_by(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__module__}.{type(error).__name__} in {last.name}"


def check(found: dict[str, Any], name: str, holds: bool) -> None:
    found.setdefault("checks", {})[name] = bool(holds)


def apply(code: str) -> None:
    """The fix as it stands, in this module."""
    print(f">>> {code}", flush=True)
    exec(code, globals())


def eager(limit: int) -> dict[str, Any]:
    """A list that grows by a block at a time."""
    each = limit // 16
    error: BaseException | None = None
    try:
        for _ in range(64):
            history.append(block(each))
            jax.block_until_ready(history[-1])
    except Exception as failed:
        error = failed
    assert error is not None, "nothing ran out of memory"
    # What failed holds nothing.
    whole = len(history)
    explanation = jaxmem.explain_oom(error)
    found = told("eager", explanation) | {"raised": raised_by(error)}
    error = None
    top = explanation.holdings[0]
    check(found, "names the list", top.name == "history")
    check(found, "with its bytes", abs(top.nbytes - top.count * each) <= each // 8)
    check(found, "all of them", top.count >= whole - 1)
    apply(explanation.fixes[0].code)
    jax.block_until_ready(block(each))
    check(found, "its first fix works", True)
    return found


def jitted(limit: int, rows: int) -> dict[str, Any]:
    """A train step beside a cache that takes half of the device."""
    global train_step, state, loss, x
    train_step = jax.jit(written)
    state, x = new_state(), jnp.ones((rows, width()))
    cache["features"] = block(limit // 2)
    jax.block_until_ready(cache["features"])
    explanation = None
    try:
        state, loss = train_step(state, x)
        jax.block_until_ready(loss)
    except Exception as error:
        explanation = jaxmem.explain_oom(error)
        found = told("jitted", explanation) | {"raised": raised_by(error)}
    assert explanation is not None, "nothing ran out of memory"
    # On a GPU the failure comes after the assignment: what the name stood for is not held any more.
    lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(state)) or failed(state)
    check_holders(found, explanation, limit, state_is_held=not lost)
    if lost:
        state = new_state()
    apply(explanation.fixes[0].code)
    state, loss = train_step(state, x)
    check(found, "its first fix works", bool(jnp.isfinite(loss)))
    found["plan"] = train_step.plan(state, x).solver
    return found


def fitted(limit: int, rows: int) -> dict[str, Any]:
    """The same step, fitted to all of the device, which is not free."""
    global train_step, state, loss, x
    cache.clear()
    state = x = loss = None
    # The cache comes first: small arrays in the middle of the device would leave no room for it.
    cache["features"] = block(limit // 2)
    jax.block_until_ready(cache["features"])
    state, x = new_state(), jnp.ones((rows, width()))
    train_step = jaxmem.fit(written, progress=False)
    planned = train_step.plan(state, x)
    explanation = None
    try:
        state, loss = train_step(state, x)
        jax.block_until_ready(loss)
    except jaxmem.DeviceOutOfMemoryError as error:
        explanation = error.explanation
        found = told("fitted", explanation) | {"raised": raised_by(error)}
    assert explanation is not None, "nothing ran out of memory"
    found["planned_bytes"] = planned.compiled_bytes
    check_holders(found, explanation, limit)
    apply(explanation.fixes[0].code)
    state, loss = train_step(state, x)
    check(found, "its first fix works", bool(jnp.isfinite(loss)))
    return found


def check_holders(
    found: dict[str, Any], explanation: Any, limit: int, state_is_held: bool = True
) -> None:
    largest = explanation.holdings[0]
    check(found, "names the cache", largest.name.startswith("cache"))
    check(found, "with its bytes", largest.nbytes == limit // 2 // 4 * 4)
    named = [h.name.split("[")[0] for h in explanation.holdings[:4]]
    check(found, "names the state where it is held", ("state" in named) == state_is_held)
    check(found, "the fix is a call of fit", "jaxmem.fit(" in explanation.fixes[0].code)
    lines = list(explanation.report.by_source()) if explanation.report else []
    check(found, "names the step's own line", any("loss_fn" in line for line in lines[:3]))


def failed(tree: Any) -> bool:
    try:
        jax.block_until_ready(tree)
    except Exception:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not ON_GPU:
        from tests.monitor import paper_limit

        paper_limit.put_in_place()
    started = time.perf_counter()
    limit = device_stats()["bytes_limit"]
    # What is kept for the backward pass takes 80% of the device: 2 arrays a layer.
    rows = int(limit * 0.8 / (LAYERS * 2 * width() * 4))
    stats = device_stats()
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {limit / 2**30:.2f} GiB, {stats}"
    )
    cases = {
        "eager": lambda: eager(limit),
        "jitted": lambda: jitted(limit, rows),
        "fitted": lambda: fitted(limit, rows),
    }
    for name, run in cases.items():
        try:
            results[name] = run()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"checks": {"ran": False}, "error": repr(error)[:500]}
        cache.clear()
        history.clear()
    results["device"] = jax.devices()[0].device_kind
    results["jax"], results["limit_bytes"] = jax.__version__, limit
    results["memory_stats"] = device_stats()
    results["seconds"] = time.perf_counter() - started
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    checks = {f"{c}: {n}": ok for c in cases for n, ok in results[c]["checks"].items()}
    print(json.dumps(checks, indent=1))
    print(f"{sum(checks.values())} of {len(checks)} hold, {results['seconds']:.0f} s")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
