"""A GPT whose state is split over the GPUs of a machine, beside FSDP by hand in plain JAX.

    python benchmarks/meshes.py --json benchmarks/results/2xh200_meshes.json
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \\
        python benchmarks/meshes.py --layers 2 --width 256 --heads 4 --sequence 64 --batch 16 \\
        --vocab 512 --attention xla --budget-of 8xh200                        # a dry run

The mesh is all devices that are here, on one axis. Plain JAX is ``jax.jit`` of the same step with
the same shardings, as FSDP is written by hand: as written, and with ``nothing_saveable`` around
every layer; ``constrained`` is the same with a sharding constraint on what every layer gets, which
is written into the model. ``tight`` is the smallest budget that jaxmem finds for the step; it says
whether one of the plain ways fits there. ``offload`` is a smaller one, in which values and leaves
may wait in pinned host memory. ``host`` has the optimizer's state there.

Every row is a process of its own, because an allocator's peak is never reset: what is predicted and
compiled for each device, the allocator's own peak, the largest of all devices, and the losses of
the first steps. The last process has all ways that ended well beside each other and times them in
turn, so that what slows the machine slows all of them; shares are of the first of them. Exits with
1 if a row is missing, losses differ, or an allocator's peak is more than 5% over what was compiled.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import as_predicted
from benchmarks.ways_mesh import PLAIN, Work, way

ROWS = (
    "measure",
    "plain",
    "plain remat",
    "constrained",
    "constrained remat",
    "zero3",
    "tight",
    "offload",
    "zero1",
    "host",
)
TIMED = ("plain", "plain remat", "constrained", "constrained remat", "zero3", "tight", "offload")
# A bfloat16 net whose sums are taken in another order.
LOSSES_WITHIN, PEAK_WITHIN = 5e-3, 0.05
FIRST_STEPS = 3


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--layers", type=int, default=24)
    made.add_argument("--width", type=int, default=2048)
    made.add_argument("--heads", type=int, default=16)
    made.add_argument("--sequence", type=int, default=2048)
    made.add_argument("--batch", type=int, default=16, help="sequences, of all devices together")
    made.add_argument("--vocab", type=int, default=50304)
    made.add_argument("--attention", default="cudnn", choices=["cudnn", "xla"])
    made.add_argument("--unrolled", action="store_true", help="one layer after another, no scan")
    made.add_argument("--samples", type=int, default=7, help="of each way, in turn")
    made.add_argument("--steps", type=int, default=3, help="in a sample")
    made.add_argument("--budget-of", help="a target to plan for, such as 8xh200, where no GPU is")
    made.add_argument("--only", nargs="*", default=[*ROWS, "timed"])
    made.add_argument("--tight", help="a budget such as 12GiB; default: the smallest, searched for")
    made.add_argument("--offload", default="12.5GiB", help="the budget of that row")
    made.add_argument("--host-budget", default="8GiB", help="of each device, in that row")
    made.add_argument("--limit", type=float, default=300.0, help="seconds for each process")
    made.add_argument("--plan", type=Path, default=Path("/tmp/jaxmem_tight_plan.json"))
    made.add_argument(
        "--made-before",
        action="store_true",
        help="follow the plans that are there, such as those made where these GPUs are absent",
    )
    made.add_argument("--json", type=Path)
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--beside", nargs="*", default=TIMED, help=argparse.SUPPRESS)
    return made


# What a process does.


def row(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One way, alone in this process."""
    import jax

    import jaxmem
    from jaxmem.runtime.partitioned import exchanged_bytes

    if name == "measure":  # Kept for the processes after it, whose allocators it must not fill.
        target = jaxmem.Target.local()
        device = jax.devices()[0]
        return {
            "device": device.device_kind,
            "devices": jax.device_count(),
            "jax": jax.__version__,
            "python": sys.version.split()[0],
            "target": target.name,
            "limit_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
    work = Work(options)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(work.shapes["params"]))
    run, told = way(work, name)
    state, tokens = work.state("zero1" if name == "zero1" else "zero3"), work.tokens()
    state = placed(work, run, state, tokens)
    losses, seconds = [], []
    for _ in range(FIRST_STEPS + options.samples):
        started = time.perf_counter()
        state, loss = run(state, tokens)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    if name.startswith(PLAIN):
        text = run.as_text()
    elif name != "host":  # That one is more than one program.
        text = run.lower(work.shapes, tokens).compile().as_text()
    if name != "host":
        told["exchanged_bytes"] = exchanged_bytes(text, jax.device_count())
    return {
        "name": name,
        "parameters": parameters,
        **told,
        "allocator_peak_bytes": peak(),
        "ms": statistics.median(seconds[FIRST_STEPS:]) * 1e3,
        "losses": losses,
    }


def placed(work: Work, run: Any, state: Any, tokens: Any) -> Any:
    """The state where a way wants it: of plain JAX on the devices, of a plan also on the host."""
    import jax

    if hasattr(run, "place"):
        return run.place(state, tokens)[0]
    layouts = work.layouts["zero3"].shardings
    return jax.block_until_ready(jax.device_put(state, layouts))


def peak() -> int | None:
    """The most that the allocator of any device here has given out; nothing on CPUs."""
    import jax

    found = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
    return None if None in found else max(found)


def timed(options: argparse.Namespace) -> dict[str, Any]:
    """All ways in turn: milliseconds of a step, and throughput as a share of the first's."""
    import jax

    work = Work(options)
    runs = {name: way(work, name)[0] for name in options.beside}
    # All of them take the same state, split alike: the next goes on where one stopped, once what
    # that one had on the host is where it wants it.
    state, tokens = work.state(), work.tokens()
    for run in runs.values():
        state = placed(work, run, state, tokens)
        for _ in range(FIRST_STEPS):
            state, loss = run(state, tokens)
        jax.block_until_ready((state, loss))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(options.samples):
        # Each is first as often as last.
        for name in list(runs) if n % 2 else list(runs)[::-1]:
            state = placed(work, runs[name], state, tokens)
            started = time.perf_counter()
            for _ in range(options.steps):
                state, loss = runs[name](state, tokens)
            jax.block_until_ready((state, loss))
            taken[name].append((time.perf_counter() - started) / options.steps)
    base = next(iter(taken))
    return {
        "name": "timed",
        "samples_ms": {name: [s * 1e3 for s in its] for name, its in taken.items()},
        "ms": {name: statistics.median(its) * 1e3 for name, its in taken.items()},
        "base": base,
        "throughput_of_base": {
            name: statistics.median(b / s for b, s in zip(taken[base], its, strict=True))
            for name, its in taken.items()
        },
    }


# All of them.


def runs_alone(rows: dict[str, dict[str, Any]], way: str) -> bool:
    """Whether a way ended well by itself: one that does not fit is not timed beside the others."""
    return "error" not in rows.get(way, {"error": "it was not run"})


def in_a_process(name: str, given: list[str], limit: float) -> dict[str, Any]:
    command = [sys.executable, __file__, *given, "--child", name]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"name": name, "error": f"not done after {limit:g} s"}
    seconds = time.perf_counter() - started
    if done.returncode:
        return {"name": name, "error": done.stderr[-2000:], "process_seconds": seconds}
    return {**json.loads(done.stdout.splitlines()[-1]), "process_seconds": seconds}


def wrong(rows: dict[str, dict[str, Any]]) -> list[str]:
    """What does not hold, in words."""
    found = [f"{name}: {its['error'][-300:]}" for name, its in rows.items() if "error" in its]
    first = rows.get("plain", {}).get("losses")
    for name, its in rows.items():
        if first and "losses" in its:
            apart = max(abs(a - b) / abs(a) for a, b in zip(first, its["losses"], strict=True))
            its["losses_apart"] = apart
            if apart > LOSSES_WITHIN:
                found.append(f"{name}: losses differ by {apart:.1e}")
        if its.get("allocator_peak_bytes") and not name.startswith(PLAIN):
            over = its["allocator_peak_bytes"] / its["compiled_bytes"] - 1
            its["allocator_over_compiled"] = over
            if over > PEAK_WITHIN:
                found.append(f"{name}: the allocator's peak is {over:.1%} over what was compiled")
    if "compiled_bytes" in rows.get("tight", {}):
        budget = rows["tight"]["budget_bytes"]
        plain = {n: its for n, its in rows.items() if n.startswith(PLAIN) and "ms" in its}
        rows["tight"]["plain_ways_that_fit"] = [
            name
            for name, its in plain.items()
            if (its.get("allocator_peak_bytes") or its.get("compiled_bytes", 0)) <= budget
        ]
    return found


def shown(its: dict[str, Any]) -> str:
    if "error" in its:
        return its["error"].strip().splitlines()[-1][:160]
    if its.get("name") == "timed":
        shares = its["throughput_of_base"]
        return ", ".join(f"{k} {v:.1f} ms ({shares[k]:.1%})" for k, v in its["ms"].items())
    if "compiled_bytes" not in its:
        return str(its)
    sizes = [its.get(f"{k}_bytes") for k in ("budget", "predicted", "compiled", "allocator_peak")]
    gib = ["   -  " if nbytes is None else f"{nbytes / 2**30:6.2f}" for nbytes in sizes]
    return (
        f"budget {gib[0]} predicted {gib[1]} compiled {gib[2]} allocator {gib[3]} GiB, "
        f"{its['ms']:.1f} ms, losses {its['losses'][0]:.5f} .. {its['losses'][-1]:.5f}"
        f"{as_predicted(its)}"
    )


def main() -> int:
    options = parser().parse_args()
    if options.child:
        do = timed if options.child == "timed" else functools.partial(row, name=options.child)
        print(json.dumps(do(options)))
        return 0
    files = {"tight": options.plan, "offload": options.plan.with_suffix(".offload.json")}
    absent = [
        str(path) for name, path in files.items() if name in options.only and not path.is_file()
    ]
    if options.made_before and absent:
        sys.exit(f"--made-before: no plan in {' and '.join(absent)}; make it, or leave that out")
    if not options.made_before:
        options.plan.unlink(missing_ok=True)
        options.plan.with_suffix(".offload.json").unlink(missing_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    started = time.perf_counter()
    for name in (*ROWS, "timed"):
        if name in options.only:
            given = sys.argv[1:]
            if name == "timed":
                given = [*given, "--beside", *(way for way in TIMED if runs_alone(rows, way))]
            rows[name] = in_a_process(name, given, options.limit)
            print(f"{name:12s} {shown(rows[name])}", flush=True)
            failed = wrong(rows)
            write(options, rows, failed, time.perf_counter() - started)
    print(*failed, sep="\n")
    return int(bool(failed))


def write(options: argparse.Namespace, rows: dict, failed: list[str], seconds: float) -> None:
    """What is known so far: there may be no time for all rows."""
    result = {
        **rows.get("measure", {}),
        "cores": os.cpu_count(),
        "options": {k: str(v) for k, v in vars(options).items() if k not in ("json", "child")},
        "seconds": seconds,
        "rows": rows,
        "wrong": failed,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
