"""How a train step in JAX is run: as written, with checkpoint policies, inside a budget."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from jax.sharding import SingleDeviceSharding

import jaxmem
import jaxmem.planner.schedule
from benchmarks.timing import timed
from benchmarks.workloads.base import JaxWorkload
from jaxmem.runtime.profile import profiled

POLICIES = jax.checkpoint_policies
ATTENTION = ("gpt", "bert")
# Each of these is applied to every block of the net, as its author would.
STOCK: dict[str, Callable[[JaxWorkload], Any]] = {
    "keep-all": lambda w: None,
    "nothing_saveable": lambda w: POLICIES.nothing_saveable,
    "dots_saveable": lambda w: POLICIES.dots_saveable,
    "dots_with_no_batch_dims_saveable": lambda w: POLICIES.dots_with_no_batch_dims_saveable,
    "save names": lambda w: POLICIES.save_only_these_names(*w.saved),
    "offload names": lambda w: POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(w.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    ),
}

# As MaxText does it: the optimizer's state lives in pinned host memory, the step takes it from
# there and gives it back there.
OPTIMIZER_OFFLOAD = "optimizer offload"

# Backward iterations of scans make gradients of weights when the compiler likes.
UNTIED = "jaxmem untied"
# What is given as ``host=``.
JAXMEM: dict[str, Any] = {"jaxmem": None, "jaxmem host=AUTO": jaxmem.AUTO, UNTIED: None}


def run(
    net: str,
    size: str,
    way: str,
    budget: int | None,
    samples: int,
    attention: str | None = None,
    scan: bool = False,
) -> dict:
    """Run one way and say what it took.

    Args:
        net: a module of ``workloads``.
        size: one of its ``SIZES``.
        way: a key of :data:`STOCK`, :data:`OPTIMIZER_OFFLOAD` or one of :data:`JAXMEM`.
        budget: bytes, for jaxmem.
        samples: how many samples of steps are timed.
        attention: how a GPT's is computed; its own default where ``None``.
        scan: whether a GPT's blocks are one loop.

    A step that the device has no room for says so in ``"error"``, beside what it compiled to.
    """
    module = importlib.import_module(f"benchmarks.workloads.{net}")
    # Flash attention is cuDNN's; a dry run elsewhere spells it out.
    if net in ATTENTION and jax.default_backend() != "gpu":
        attention = "xla"
    form = {"attention": attention} if attention else {}
    form |= {"scan": True} if scan else {}
    workload = functools.partial(module.workload, module.SIZES[size], **form)
    work = workload()
    if way in STOCK:
        work = workload(remat_policy=STOCK[way](work))
    started = time.perf_counter()
    step, place, told = _fitted(work, budget, way) if way in JAXMEM else _compiled(work, way)
    told["prepare_seconds"] = time.perf_counter() - started
    told["compiling_peak_bytes"] = peak_bytes()
    state, batch = jax.jit(work.state)(), jax.jit(work.batch)()
    state = place(state, batch)
    held = {"state": state}
    del state

    def once() -> Any:
        held["state"], loss = step(held["state"], batch)
        return loss

    try:
        seconds, losses = timed(once, lambda: jax.block_until_ready(held["state"]), samples)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return told | {"error": str(error).splitlines()[0]}
    told |= {
        "seconds": seconds,
        "losses": losses,
        "peak_bytes": peak_bytes(),
        "items_per_second": work.items / seconds,
        "unit": work.unit,
    }
    if told["host_bytes"] and jax.default_backend() == "gpu":
        told["profile"] = dataclasses.asdict(profiled(lambda: (once(), held["state"])))
    return told


def peak_bytes() -> int | None:
    """The most that the device's allocator has given out in this process; nothing on CPUs."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _fitted(
    work: JaxWorkload, budget: int | None, way: str
) -> tuple[Any, Callable[..., Any], dict]:
    """The step inside a budget, what places its state, and what its plan says."""
    if way == UNTIED:
        jaxmem.planner.schedule.in_order = lambda scan, _: scan
    step = jaxmem.fit(work.step, budget=budget, host=JAXMEM[way], donate_argnums=0, progress=False)
    plan = step.plan(jax.eval_shape(work.state), jax.eval_shape(work.batch))
    told = {
        "compiled_bytes": plan.compiled_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "predicted_keep_all_seconds": plan.keep_all_seconds,
        "host_bytes": plan.host_bytes,
        "rounds": len(plan.rounds),
        "slack_ms": 1e3 * plan.slack_seconds,
        "solver": plan.solver,
        "notes": list(plan.notes),
    }
    return step, lambda state, batch: step.place(state, batch)[0], told


def _compiled(work: JaxWorkload, way: str) -> tuple[Any, Callable[..., Any], dict]:
    """The same for a step of JAX alone."""
    state, batch = jax.eval_shape(work.state), jax.eval_shape(work.batch)
    places = _optimizer_on_host(state) if way == OPTIMIZER_OFFLOAD else None
    if places is not None:
        state = jax.tree.map(_placed, state, places)
    step = _jitted(work, places).lower(state, batch).compile()
    memory = step.memory_analysis()
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes
    told = {
        "compiled_bytes": arguments + memory.temp_size_in_bytes - memory.alias_size_in_bytes,
        "host_bytes": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
    }
    return step, lambda state, _: state if places is None else jax.device_put(state, places), told


def _jitted(work: JaxWorkload, places: Any) -> Any:
    if places is None:
        return jax.jit(work.step, donate_argnums=0)

    def step(state: dict, batch: Any) -> Any:
        opt = jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device), state["opt"])
        return work.step({**state, "opt": opt}, batch)

    return jax.jit(step, donate_argnums=0, out_shardings=(places, None))


def _optimizer_on_host(state: dict) -> dict:
    """Where each leaf lives: those of the optimizer in host memory, but for its counters."""
    device = jax.devices()[0]
    here = SingleDeviceSharding(device)
    there = SingleDeviceSharding(
        device, memory_kind="pinned_host" if device.platform == "gpu" else None
    )
    opt = jax.tree.map(lambda a: there if a.ndim else here, state["opt"])
    return {**{name: jax.tree.map(lambda _: here, state[name]) for name in state}, "opt": opt}


def _placed(leaf: Any, place: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
