"""What Python takes to start a step of many leaves, against ``jax.jit`` and ``nnx.jit``.

    JAX_PLATFORMS=cpu python benchmarks/calls.py [--layers 200] [--json OUT]

Adam on a stack of linear layers so small that a call is Python's work and little else: six leaves
a layer, as a dictionary, as an ``nnx.State``, and as an ``nnx.Module`` with its ``nnx.Optimizer``.
Milliseconds until the call returns, medians; the ways are called in turn. A device hides them
behind the step before, unless they take longer than that, or a loop waits for every loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmem

WIDTH, WARM = 8, 3
ADAM = optax.adam(1e-3)
X = jnp.ones((4, WIDTH))


class Stack(nnx.Module):
    """``layers`` linear layers with rectifiers between them."""

    def __init__(self, layers: int):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


def functional(loss_of: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    """A train step that returns its state."""

    def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        updates, opt = ADAM.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def mutating(model: Stack, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """A train step that changes its arguments."""
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def fit(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return jaxmem.fit(step, budget="16GiB", progress=False, **options)


def returning(step: Callable[..., Any], params: Any) -> Callable[[], Any]:
    """One more step, of a loop that feeds the state back."""
    state = {"params": params, "opt": ADAM.init(params)}

    def call() -> Any:
        nonlocal state
        state, loss = step(state, X)
        return loss

    return call


def loops(layers: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """For each kind of state the ways to call a step."""
    graph, _ = nnx.split(Stack(layers))

    def of_dictionary(params: Any, x: jax.Array) -> jax.Array:
        for layer in params.values():
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return (x**2).mean()

    def of_state(params: nnx.State, x: jax.Array) -> jax.Array:
        return (nnx.merge(graph, params)(x) ** 2).mean()

    def dictionary() -> dict[str, Any]:
        one = {"kernel": jnp.eye(WIDTH), "bias": jnp.zeros(WIDTH)}
        return {f"{n:04d}": jax.tree.map(jnp.copy, one) for n in range(layers)}

    def module(wrap: Callable[..., Any]) -> Callable[[], Any]:
        model = Stack(layers)
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
        step = wrap(mutating, donate_argnums=(0, 1))
        return lambda: step(model, optimizer, X)

    def state() -> nnx.State:
        return nnx.split(Stack(layers))[1]

    kinds = {"dictionary": (of_dictionary, dictionary), "nnx.State": (of_state, state)}
    found: dict[str, dict[str, Callable[[], Any]]] = {}
    for kind, (loss_of, make) in kinds.items():
        step = functional(loss_of)
        found[kind] = {
            "jax.jit": returning(jax.jit(step, donate_argnums=0), make()),
            "jaxmem.fit": returning(fit(step, donate_argnums=0), make()),
        }
    found["nnx.Module and nnx.Optimizer"] = {
        "nnx.jit": module(nnx.jit),
        "jaxmem.fit": module(fit),
    }
    return found


def measured(ways: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Median milliseconds until each way's call returns."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for n in range(WARM + repeat):
        for way, call in ways.items():
            started = time.perf_counter()
            loss = call()
            seconds = time.perf_counter() - started
            jax.block_until_ready(loss)
            if n >= WARM:
                taken[way].append(seconds)
    return {way: statistics.median(seconds) * 1e3 for way, seconds in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for kind, ways in loops(options.layers).items():
        found = measured(ways, options.repeat)
        stock = next(way for way in found if way != "jaxmem.fit")
        ratio = found["jaxmem.fit"] / found[stock]
        rows.append({"state": kind, "milliseconds": found, "ratio": ratio})
        shown = ", ".join(f"{way} {ms:.2f} ms" for way, ms in found.items())
        print(f"{kind:30s} {shown}: {ratio:.2f} x", flush=True)
    if options.json:
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
        result = {
            "layers": options.layers,
            "device": jax.devices()[0].device_kind,
            "repeat": options.repeat,
            "versions": versions,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
