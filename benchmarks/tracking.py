"""What tracking costs: steps with and without ``jaxmem.track``, in turn, in one process.

    JAX_PLATFORMS=cpu python benchmarks/tracking.py [--leaves 1200] [--milliseconds 20] [--json OUT]

A train step (Adam on a stack of layers, ``leaves`` arrays of state) of about so many milliseconds,
plain, decorated (each call begins and ends) and in one block around all of them, at the default
rate, with a file of samples. The ways take turns of a few steps, in an order drawn anew each round,
so that what else the machine does falls on all of them; the result is the median of the rounds'
ratios, of the clock and of processor time, with the interval that holds it at 95% (from medians of
rounds drawn again). Beside it ``share`` is the time that tracking's own code ran on its thread and
on the caller's. ``call_microseconds`` is what a decorated call of nothing costs its thread: all
that is done where tracking leaves out its looks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import optax

import jaxmem
from jaxmem.monitor.duty import AT_POINTS
from jaxmem.monitor.sampling import SAMPLER

ADAM = optax.adam(1e-3)
TURN_SECONDS = 0.1
REDRAWN = 2000
PER_LAYER, WIDTH = 6, 8


def make_step(milliseconds: float) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    """A step of about so long, and what makes its state of so many leaves."""

    def new_state(leaves: int) -> dict[str, Any]:
        one = {"kernel": jnp.eye(WIDTH), "bias": jnp.zeros(WIDTH)}
        layers = max(1, leaves // PER_LAYER)
        params = {f"{n:04d}": jax.tree.map(jnp.copy, one) for n in range(layers)}
        return {"params": params, "opt": ADAM.init(params), "work": jnp.eye(256)}

    def step_of(rounds: int) -> Callable[..., Any]:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            for layer in params.values():
                x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
            return (x**2).mean()

        @jax.jit
        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(state["params"], x)
            updates, opt = ADAM.update(grads, state["opt"], state["params"])
            work = jax.lax.fori_loop(
                0, rounds, lambda _, w: jnp.tanh(w @ state["work"]) + 1e-3, state["work"]
            )
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt, "work": state["work"]}, value + 0 * work.sum()

        return step

    trial, state = step_of(64), new_state(PER_LAYER)
    x = jnp.ones((4, WIDTH))
    jax.block_until_ready(trial(state, x))
    started = time.perf_counter()
    for _ in range(5):
        jax.block_until_ready(trial(state, x))
    each = (time.perf_counter() - started) / 5 / 64
    return step_of(max(1, round(milliseconds / 1e3 / each))), new_state


def call_microseconds(calls: int = 20_000) -> float:
    """Processor time that a decorated call of a function that does nothing adds, at best."""

    def nothing() -> None:
        pass

    decorated = jaxmem.track("nothing", publish=False)(nothing)

    def each(call: Callable[[], None]) -> float:
        started = time.thread_time()
        for _ in range(calls):
            call()
        return (time.thread_time() - started) / calls * 1e6

    each(decorated)  # What tracking has saved up to look with is spent here.
    return min(each(decorated) for _ in range(5)) - min(each(nothing) for _ in range(5))


def interval_of_median(values: list[float], draw: random.Random) -> tuple[float, float]:
    """Where the median of so many rounds lies, 95 times of 100: a bootstrap's percentiles."""
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(REDRAWN))
    return medians[round(0.025 * REDRAWN)], medians[round(0.975 * REDRAWN) - 1]


def compared(turns: list[float], plain: list[float], draw: random.Random) -> dict[str, Any]:
    """The median of the rounds' ratios, and how sure it is."""
    ratios = sorted(a / b for a, b in zip(turns, plain, strict=True))
    tenths = [round(ratios[round(n / 10 * (len(ratios) - 1))], 4) for n in range(11)]
    low, high = interval_of_median(ratios, draw)
    return {"ratio": statistics.median(ratios), "interval": [low, high], "tenths": tenths}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--leaves", type=int, default=1200)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    step, new_state = make_step(options.milliseconds)
    state, x = new_state(options.leaves), jnp.ones((4, WIDTH))
    state, loss = step(state, x)
    jax.block_until_ready(loss)
    folder = Path(tempfile.mkdtemp())
    block = jaxmem.track("block", jsonl=folder / "block.jsonl")
    decorated = jaxmem.track("step", jsonl=folder / "step.jsonl")(step)

    def turn(call: Callable[..., Any]) -> tuple[float, float]:
        """Seconds of a step, of the clock and of all processors; each loss is awaited."""
        nonlocal state
        count, started, used = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - started < TURN_SECONDS:
            state, loss = call(state, x)
            jax.block_until_ready(loss)
            count += 1
        return (time.perf_counter() - started) / count, (time.process_time() - used) / count

    def in_block() -> tuple[float, float]:
        with block:
            return turn(step)

    calls_cost = call_microseconds()  # It spends what tracking has saved up to look with, too.
    ways = {"plain": lambda: turn(step), "decorated": lambda: turn(decorated), "block": in_block}
    # Tracking may take a share of all time, and here only a part of the time is a way's: a loop
    # that is nothing but that way would have no more looks than this in as many steps.
    AT_POINTS.share /= len(ways)
    SAMPLER.share, SAMPLER.live_share = SAMPLER.share / len(ways), SAMPLER.live_share / len(ways)
    for run in ways.values():
        run()
    spent, trackers = SAMPLER.spent, {"decorated": decorated.track, "block": block}
    before = {name: tracker.own_seconds for name, tracker in trackers.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    draw, order, began = random.Random(0), list(ways), time.perf_counter()
    for _ in range(options.turns):
        draw.shuffle(order)
        for name in order:
            taken[name].append(ways[name]())
    each = (time.perf_counter() - began) / len(ways)
    plain = taken.pop("plain")
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "leaves": options.leaves,
        "turns": options.turns,
        "step_milliseconds": statistics.median(wall for wall, _ in plain) * 1e3,
        "call_microseconds": calls_cost,
        "sampler_share": (SAMPLER.spent - spent) / (len(trackers) * each),
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "optax")},
    }
    for name, turns in taken.items():
        points = (trackers[name].own_seconds - before[name]) / each
        found = result[name] = {
            "of_the_clock": compared([a for a, _ in turns], [a for a, _ in plain], draw),
            "of_processor_time": compared([b for _, b in turns], [b for _, b in plain], draw),
            "points_share": points,
            "share": points + result["sampler_share"],
            "calls": trackers[name].calls,
        }
        for what in ("of_the_clock", "of_processor_time"):
            low, high = found[what]["interval"]
            print(
                f"{name:10s} {what.replace('_', ' '):18s} {found[what]['ratio']:.4f} x "
                f"({low:.4f} to {high:.4f}); tracking's own {100 * found['share']:.3f}%"
            )
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
