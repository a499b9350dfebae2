"""Where a step's time goes on a GPU, kernel by kernel, beside what is predicted for it.

    python benchmarks/kernels.py unet3d --budget 39.10GiB 23.46GiB --json OUT    # on the device
    JAX_PLATFORMS=cpu python benchmarks/kernels.py unet3d --budget 39GiB         # predicted only
    python benchmarks/kernels.py gpt --budget 33.89GiB --policy nothing_saveable # beside stock JAX
    python benchmarks/kernels.py unet3d --budget 23.46GiB --joined # sums not kept apart as well
    python benchmarks/kernels.py gpt --scan --size 350m --attention xla --budget 43.75GiB

Plans a net of ``headline.py`` inside each budget (as written first), profiles one step and adds up
its kernels by what they are: convolutions, matrix products, flash attention, everything else.
Beside each sum is that of the simulator, and what it takes to be longest is listed, too.
``--policy`` adds the net with a checkpoint policy of JAX on every block, ``--joined`` each budget
without the barriers that keep narrow sums apart from what they sum. The longest kernels are listed
with the bytes of their operands and results, by which one sees which are slower than the device's
memory, and what all blocks do alike is added up. Command buffers are off, so that each kernel is
traced by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import importlib
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax

import jaxmem
from benchmarks.headline import versions
from benchmarks.predicted import measured_target
from benchmarks.timing import compared
from benchmarks.workloads.base import JaxWorkload
from jaxmem.planner.simulate import Simulator
from jaxmem.program.fusion import Fusion
from jaxmem.program.ir import Block
from jaxmem.runtime import compiler
from jaxmem.runtime.rates import rates_of
from jaxmem.targets.target import Target

LISTED, KEPT_MS, ALIKE = 30, 0.1, 120
LISTS = ("longest", "alike", "predicted_longest")
_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:,|$)(.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


def class_of(name: str, its: str = "") -> str:
    """What a kernel is by the traced operation at its root, or by what the compiler calls it.

    The gradient of a weight has the name of the transposition behind it.
    """
    if "conv_general_dilated" in name:
        return "convolutions"
    if "dot_product_attention" in name:
        return "attention"
    called = its.startswith(("gemm_fusion", "custom-call"))
    return "products" if called or "dot_general" in name else "others"


def array_bytes(text: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(text):
        bits = _BITS.search(kind)
        size = int(bits.group()) if bits else 8
        total += math.prod(int(d) for d in dims.split(",") if d) * max(size, 8) // 8
    return total


def instructions(text: str) -> dict[str, dict[str, Any]]:
    """Of each instruction of a compiled program: its kind, where it comes from, its bytes."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        name, made, kind, operands, rest = match.groups()
        named = re.search(r'op_name="([^"]*)"', rest)
        read = sum(found[o]["made"] for o in re.findall(r"%([\w.\-]+)", operands) if o in found)
        found[name] = {
            "kind": kind,
            "op_name": named.group(1) if named else "",
            "type": made[:100],
            "made": array_bytes(made),
            "nbytes": array_bytes(made) + read,
        }
    return found


def kernel_events(folder: Path) -> Iterator[tuple[str, str, float]]:
    """HLO instruction, kernel and milliseconds of what ran on the first GPU."""
    (path,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and "Stream" in str(e["args"].get("name"))
    }
    first = min(pid for pid, _ in streams)
    for e in events:
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams and e["pid"] == first:
            yield str(e.get("args", {}).get("hlo_op", "")), e["name"], e["dur"] * 1e-3


def profiled(step: Any, work: JaxWorkload, text: str) -> dict[str, Any]:
    """The kernels of one step, added up and the longest of them."""
    state, batch = jax.jit(work.state)(), jax.jit(work.batch)()
    if hasattr(step, "place"):
        state, batch = step.place(state, batch)
    for _ in range(3):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    known = instructions(text)
    with tempfile.TemporaryDirectory() as name:
        with jax.profiler.trace(name):
            state, _ = step(state, batch)
            jax.block_until_ready(state)
        events = list(kernel_events(Path(name)))
    sums: dict[str, float] = defaultdict(float)
    alike: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    kernels: dict[str, dict[str, Any]] = {}
    for op, kernel, ms in events:
        its = known.get(op, {"kind": "", "op_name": "", "type": "", "nbytes": 0})
        sums[class_of(its["op_name"], op)] += ms
        row = kernels.setdefault(op or kernel, {"ms": 0.0, "kernel": kernel[:80], **its})
        row["ms"] += ms
        group = alike[" ".join(_BITS.sub("#", its[key]) for key in ("kind", "op_name")) or kernel]
        group[0] += 1
        group[1] += ms
    longest = sorted(kernels.items(), key=lambda item: -item[1]["ms"])
    return {
        "kernels_ms": dict(sums),
        "longest": [{"op": op, **row} for op, row in longest if row["ms"] >= KEPT_MS],
        "alike": dict(sorted(alike.items(), key=lambda item: -item[1][1])[:ALIKE]),
    }


def predicted(outcome: Any, target: Target) -> dict[str, Any]:
    """Milliseconds of the simulator by the same classes, and the operations that take longest."""
    simulator = Simulator(rates_of(target))
    sums: dict[str, float] = defaultdict(float)
    listed: list[dict[str, Any]] = []

    def add(what: str, shown: str, ms: float) -> None:
        sums[class_of(what)] += ms
        if ms >= KEPT_MS:
            listed.append({"op": what, "makes": shown, "ms": ms})

    def walk(block: Block, fusion: Fusion, times: int) -> None:
        for op, kind, made in zip(block.ops, fusion.kinds, fusion.made, strict=True):
            if not made:
                continue
            loop, each = op.loop, simulator.seconds(op, kind, fusion) * 1e3 * times
            if loop is None:
                shown = ", ".join(f"{v.aval.dtype}{list(v.aval.shape)}" for v in op.outputs)
                add(op.name, shown, each)
                continue
            inside = simulator.iteration(loop)
            walk(loop.body, inside.fusion, times * loop.length)
            rows = each - inside.seconds * 1e3 * times * loop.length
            add("rows of stacks", f"{loop.length} turns", rows)

    walk(outcome.block, simulator.step(outcome.block).fusion, 1)
    listed.sort(key=lambda row: -row["ms"])
    return {"predicted_by_class_ms": dict(sums), "predicted_longest": listed[:ALIKE]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("net", choices=["resnet", "bert", "gpt", "unet3d"])
    parser.add_argument("--size")
    parser.add_argument("--budget", nargs="*", default=[])
    parser.add_argument("--policy", nargs="*", default=[], help="of jax.checkpoint_policies")
    parser.add_argument("--joined", action="store_true", help="also without barriers before sums")
    parser.add_argument("--scan", action="store_true", help="a GPT's blocks in one loop")
    parser.add_argument("--attention", choices=["cudnn", "xla"], help="of a GPT")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (options.scan or options.attention) and options.net != "gpt":
        parser.error(f"--scan and --attention are the GPT's, not {options.net}'s")
    module = importlib.import_module(f"benchmarks.workloads.{options.net}")
    size = options.size or next(iter(module.SIZES))
    form: dict[str, Any] = {"scan": True} if options.scan else {}
    form |= {"attention": options.attention} if options.attention else {}
    work = module.workload(module.SIZES[size], **form)
    on_gpu = jax.default_backend() == "gpu"
    target = jaxmem.Target.local() if on_gpu else measured_target()
    result: dict[str, Any] = {"net": options.net, "size": size, **form}
    result |= {"versions": versions(), "rows": []}
    shapes = (jax.eval_shape(work.state), jax.eval_shape(work.batch))
    for budget, joined in itertools.product([None, *options.budget], [False, True]):
        if joined and not options.joined:
            continue
        fitted = functools.partial(jaxmem.fit, budget=budget, donate_argnums=0, progress=False)
        step = fitted(work.step, target=None if on_gpu else target)
        with as_it_was() if joined else contextlib.nullcontext():
            plan = step.plan(*shapes)
        _, outcome = step._planned(shapes, {})
        row: dict[str, Any] = {
            "budget": budget,
            "joined": joined,
            "compiled_bytes": plan.compiled_bytes,
            "solver": plan.solver,
            "predicted_ms": plan.predicted_seconds * 1e3,
            **predicted(outcome, target),
        }
        if on_gpu:
            row |= profiled(step, work, outcome.compiled.executable.as_text())
            row["ms"] = sum(row["kernels_ms"].values())
            row |= compared(row)
        else:
            row["instructions"] = len(instructions(outcome.compiled.executable.as_text()))
        result["rows"].append(row)
        told(row)
    for policy in options.policy if on_gpu else ():
        row = {"policy": policy, **with_policy(module, size, policy, form)}
        result["rows"].append(row)
        told(row)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def as_it_was() -> Any:
    """Within, plans leave sums in the kernels that write what they sum."""
    return mock.patch.object(compiler, "with_sums_apart", lambda program: program)


def with_policy(module: Any, size: str, policy: str, form: dict[str, Any]) -> dict[str, Any]:
    """The same net with one of JAX's checkpoint policies on every block."""
    named = getattr(jax.checkpoint_policies, policy)
    work = module.workload(module.SIZES[size], remat_policy=named, **form)
    step = jax.jit(work.step, donate_argnums=0)
    shapes = (jax.eval_shape(work.state), jax.eval_shape(work.batch))
    row = profiled(step, work, step.lower(*shapes).compile().as_text())
    return row | {"ms": sum(row["kernels_ms"].values())}


def told(row: dict[str, Any]) -> None:
    """Say a row: its sums, its longest kernels and what takes longest all together."""
    print(json.dumps({k: v for k, v in row.items() if k not in LISTS}), flush=True)
    for its in row.get("predicted_longest", ())[:LISTED]:
        print(f"{its['ms']:8.2f} ms predicted  {its['op']:24s} {its['makes'][:80]}")
    for its in row.get("longest", ())[:LISTED]:
        where = its["op_name"][-90:]
        rate = its["nbytes"] / max(its["ms"], 1e-9) / 1e6
        print(f"{its['ms']:8.2f} ms {rate:7.0f} GB/s {its['type'][:40]:40s} {where}")
    for name, (count, ms) in list(row.get("alike", {}).items())[:LISTED]:
        print(f"{ms:8.2f} ms {count:5.0f} x {name[:150]}")


if __name__ == "__main__":
    sys.exit(main())
