"""How fast an optimizer's state streams from host memory, against one program with JAX alone.

    python benchmarks/streaming.py --json benchmarks/results/h200_streaming.json    # on the device
    python benchmarks/streaming.py --layers 3 --width 512 --tokens 64 --long 128    # a dry run

Adam with float32 master weights and moments, 12 bytes for each parameter, which are bfloat16
themselves and stay on the device, as gradients do. The net is a stack of square matrices. All in
one process: everything on the device (where that fits), ``jaxmem.fit(host=...)``, and one
``jax.jit`` that takes the state from pinned host memory and gives it back there. With few tokens
the step is nearly all update; with many, gradients take about as long as the copies.

Of JAX alone there are two more: leaf by leaf with barriers, and of a stack a ``lax.scan`` over its
rows.

``rate`` is bytes each way over what a step takes beyond its gradients, which are timed alone;
``link`` is what two plain copies of 1 GiB, one each way at a time, reach.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

import jaxmem  # before JAX starts its backend: it lets XLA pin more than 64 GB
from benchmarks.timing import compared

ADAM = optax.adam(1e-4)


def net(params: dict, x: jax.Array) -> jax.Array:
    if "stack" in params:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["stack"])
        return (x.astype(jnp.float32) ** 2).mean()
    for w in params.values():
        x = x + jnp.tanh(x @ w)
    return (x.astype(jnp.float32) ** 2).mean()


def step(state: dict, x: jax.Array, *, clip: float = 0.0) -> tuple[dict, jax.Array]:
    loss, grads = jax.value_and_grad(net)(state["params"], x)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    if clip:
        grads, _ = optax.clip_by_global_norm(clip).update(grads, optax.EmptyState())
    updates, moments = ADAM.update(grads, state["host"]["moments"])
    master = optax.apply_updates(state["host"]["master"], updates)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
    return {"params": params, "host": {"master": master, "moments": moments}}, loss


def state_of(options: argparse.Namespace, where: Any = None) -> dict:
    """The state, made leaf by leaf; ``where`` is the sharding of the large leaves of the host."""
    shape = (options.width, options.width)
    params, master, mu, nu = {}, {}, {}, {}
    put = (lambda a: a) if where is None else functools.partial(jax.device_put, device=where)

    @jax.jit
    def weights(n: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(jax.random.key(0), n), shape) * 0.01

    if options.stacked:
        shape = (options.layers, *shape)
        whole = jax.jit(lambda: jax.random.normal(jax.random.key(0), shape) * 0.01)()
        params["stack"], master["stack"] = whole.astype(jnp.bfloat16), put(whole)
        jax.block_until_ready((params, master))
        del whole
        mu["stack"] = put(jnp.zeros(shape))
        nu["stack"] = put(jnp.zeros(shape))
    for n in range(0 if options.stacked else options.layers):
        name, full = f"w{n:03d}", weights(n)
        there = put if options.host == "*" else (lambda a: a)
        params[name], master[name] = there(full.astype(jnp.bfloat16)), put(full)
        mu[name], nu[name] = put(jnp.zeros(shape)), put(jnp.zeros(shape))
        jax.block_until_ready((master[name], mu[name], nu[name]))
    fresh = ADAM.init({"w": jnp.zeros(())})
    moments = (fresh[0]._replace(mu=mu, nu=nu), *fresh[1:])
    return {"params": params, "host": {"master": master, "moments": moments}}


def link_rate(nbytes: int, where: Any, repeats: int) -> float:
    """Bytes a second each way of two plain copies at a time."""
    here = jnp.zeros(nbytes // 4)
    there = jax.device_put(jnp.zeros(nbytes // 4), where)
    device = where.with_memory_kind("device")

    def both() -> Any:
        return jax.device_put(here, where), jax.device_put(there, device)

    return nbytes / median_of(both, repeats)


def median_of(run: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def measured(run: Callable, state: dict, x: jax.Array, repeats: int) -> tuple[float, list, float]:
    """Median seconds of a step, the losses, and the sum of all parameters in the end."""
    losses, taken = [], []
    for n in range(repeats + 1):
        started = time.perf_counter()
        state, loss = run(state, x)
        jax.block_until_ready((state, loss))
        if n:
            taken.append(time.perf_counter() - started)
        losses.append(float(loss))
    params = state["params"].values()
    total = sum(float(jnp.abs(w.astype(jnp.float32)).sum()) for w in params)
    return statistics.median(taken), losses, total


def peak() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats and stats.get("peak_bytes_in_use")


def to_device(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, jax.memory.Space.Device) if leaf.ndim else leaf


def to_host(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf


def whole(step: Callable) -> Callable:
    """All of the state comes from the host, is updated, and goes back."""

    def fetched(state: dict, x: jax.Array) -> tuple[dict, jax.Array]:
        return step({**state, "host": jax.tree.map(to_device, state["host"])}, x)

    return fetched


def updated(grad: jax.Array, master: jax.Array, mu: jax.Array, nu: jax.Array, moments: tuple):
    """One leaf, or one row of a stack: its master weights, moments, and count."""
    changes, after = ADAM.update(grad, (moments[0]._replace(mu=mu, nu=nu), *moments[1:]))
    return (optax.apply_updates(master, changes), after[0].mu, after[0].nu), after[0].count


def windowed(state: dict, x: jax.Array, *, ahead: int = 2) -> tuple[dict, jax.Array]:
    """Leaf by leaf: each is fetched when the one two before it was updated."""
    loss, grads = jax.value_and_grad(net)(state["params"], x)
    host, moments = state["host"], state["host"]["moments"]
    params, master, mu, nu, count = {}, {}, {}, {}, moments[0].count
    done: list[jax.Array] = []
    for name, grad in grads.items():
        leaves = (host["master"][name], moments[0].mu[name], moments[0].nu[name])
        if len(done) >= ahead:
            leaves, _ = jax.lax.optimization_barrier((leaves, done[-ahead]))
        here = [to_device(leaf) for leaf in leaves]
        new, count = updated(grad.astype(jnp.float32), *here, moments)
        params[name] = new[0].astype(jnp.bfloat16)
        done.append(params[name])
        master[name], mu[name], nu[name] = map(to_host, new)
    after = (moments[0]._replace(count=count, mu=mu, nu=nu), *moments[1:])
    return {"params": params, "host": {"master": master, "moments": after}}, loss


def by_rows(state: dict, x: jax.Array) -> tuple[dict, jax.Array]:
    """A stack in a ``lax.scan``: each turn fetches a row, updates it, and writes it back."""
    loss, grads = jax.value_and_grad(net)(state["params"], x)
    host, moments = state["host"], state["host"]["moments"]

    def turn(_: None, given: tuple) -> tuple[None, tuple]:
        grad, *leaves = given
        here = [to_device(leaf) for leaf in leaves]
        new, count = updated(grad.astype(jnp.float32), *here, moments)
        return None, (new[0].astype(jnp.bfloat16), count, *map(to_host, new))

    rows = (grads["stack"], host["master"]["stack"], moments[0].mu["stack"], moments[0].nu["stack"])
    _, (params, counts, *stacks) = jax.lax.scan(turn, None, rows)
    master, mu, nu = ({"stack": stack} for stack in stacks)
    after = (moments[0]._replace(count=counts[-1], mu=mu, nu=nu), *moments[1:])
    return {"params": {"stack": params}, "host": {"master": master, "moments": after}}, loss


def stock(program: Callable) -> Callable:
    """One ``jax.jit`` that returns the state where it was given."""

    def run(state: dict, x: jax.Array) -> tuple[dict, jax.Array]:
        places = jax.tree.map(lambda a: a.sharding, state)
        if "whole" not in known:
            known["whole"] = jax.jit(program, donate_argnums=0, out_shardings=(places, None))
        return known["whole"](state, x)

    known: dict[str, Any] = {}
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--long", type=int, default=32768, help="tokens of the longer steps")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", default=None)
    parser.add_argument("--host", default="state['host']*", help='"*" has parameters there, too')
    parser.add_argument("--stacked", action="store_true", help="one leaf for all layers, scanned")
    parser.add_argument("--clip", type=float, default=0.0, help="gradients to this global norm")
    every = ["device", "jaxmem", "stock", "stock window", "stock scan", "fitted"]
    parser.add_argument("--only", nargs="*", choices=every, default=every[:-1])
    parser.add_argument(
        "--peak",
        action="store_true",
        help="nothing else before: the allocator's peak is the step's",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    where = SingleDeviceSharding(device, memory_kind="pinned_host" if on_gpu else None)
    parameters = options.layers * options.width**2
    link = 0.0 if options.peak else link_rate(2**30 if on_gpu else 2**20, where, 5)
    gradients = jax.jit(jax.value_and_grad(net))
    rows = []
    clipped = functools.wraps(step)(functools.partial(step, clip=options.clip))
    ways: dict[str, tuple[Callable, Any]] = {"device": (jax.jit(clipped, donate_argnums=0), None)}
    fitted = functools.partial(
        jaxmem.fit, host=options.host, budget=options.budget, donate_argnums=0
    )
    ways["jaxmem"] = (fitted(clipped, target=None if on_gpu else "h200", progress=False), where)
    alike = jaxmem.fit(clipped, budget=None, donate_argnums=0, host_budget=0, progress=False)
    ways["fitted"] = (alike, None)
    if on_gpu:
        ways["stock"] = (stock(whole(clipped)), where)
        # The other two update without clipping, a stack by its rows and others leaf by leaf.
        name, program = ("stock scan", by_rows) if options.stacked else ("stock window", windowed)
        ways |= {} if options.clip else {name: (stock(program), where)}
    for tokens in (options.tokens,) if options.peak else (options.tokens, options.long):
        x = jax.random.normal(jax.random.key(1), (tokens, options.width)).astype(jnp.bfloat16)
        alone = 0.0
        if not options.peak:
            params = state_of(options, where)["params"]
            alone = median_of(functools.partial(gradients, params, x), options.repeats)
            del params
        for name in options.only:
            if name not in ways:
                continue
            run, place = ways[name]
            state = state_of(options, place)
            row: dict[str, Any] = {"name": name, "tokens": tokens, "gradients_ms": alone * 1e3}
            if name in ("jaxmem", "fitted"):
                plan = run.plan(state, x)
                row |= {
                    "bytes": plan.compiled_bytes,
                    "host_bytes": plan.host_bytes,
                    "predicted_ms": plan.predicted_seconds * 1e3,
                    "solver": plan.solver,
                    "exposed_ms_predicted": plan.exposed_seconds * 1e3,
                    "streamed": plan.streamed and dataclasses.asdict(plan.streamed),
                }
            try:
                seconds, losses, total = measured(run, state, x, options.repeats)
            except jax.errors.JaxRuntimeError as error:
                print(name, tokens, str(error).splitlines()[0][:200], flush=True)
                rows.append({**row, "error": str(error).splitlines()[0][:200]})
                continue
            finally:
                del state
            row |= {
                "ms": seconds * 1e3,
                "rate_GBps": 12 * parameters / max(seconds - alone, 1e-9) / 1e9,
                "allocator_peak": peak(),
                "losses": losses,
                "sum_of_parameters": total,
            }
            row |= compared(row)
            rows.append(row)
            print(
                {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True
            )
    result = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "options": {k: v for k, v in vars(options).items() if k != "json"},
        "parameters": parameters,
        "link_GBps_each_way": link / 1e9,
        "rows": rows,
    }
    print(f"link {link / 1e9:.1f} GB/s each way, {parameters / 1e9:.2f}e9 parameters")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
