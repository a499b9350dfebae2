"""Well-known nets at half and at 30% of their memory: jaxmem against JAX's and PyTorch's settings.

    python benchmarks/headline.py resnet --json benchmarks/results/h200_headline_resnet.json
    python benchmarks/headline.py gpt --size tiny --only jax     # a dry run
    python benchmarks/headline.py gpt --scan --size 350m --attention xla --shares 0.14 0.1 0.07

Every row is a process of its own on the same device, one after the other, so that the allocator's
peak is that row's; where XLA took more to choose kernels than the step takes, the row is run again
with what was compiled. First the step as it is written, in JAX; budgets are shares of the
allocator's peak of that, or of what it compiles to where it does not fit (``--shares``: others than
50% and 30%). Then jaxmem inside each budget (``--auto``: also with ``host=jaxmem.AUTO``), JAX's
checkpoint policies on every block, the optimizer's state on the host in JAX alone, and PyTorch:
eager, every block compiled with ``activation_memory_budget`` swept, every block checkpointed, what
autograd saves on the host, and the optimizer on the CPU. ``gpt --scan`` has its blocks in one loop:
no rows of PyTorch, and more of jaxmem, where backward iterations make gradients when the compiler
likes. Medians of several samples of about a second, in which steps are started ahead of the device
as a training loop does. A row that fails says why. With ``--json`` rows that are in the file
already are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import as_predicted

HERE = Path(__file__).resolve().parent
SHARES = [0.5, 0.3]
ACTIVATION_BUDGETS = (1.0, 0.5, 0.3, 0.1, 0.0)
KEEP_ALL = "jax: keep-all"
# Without ``host=`` and, with ``--auto``, where the planner may keep state in host memory.
JAXMEM = ("jaxmem", "jaxmem host=AUTO")
# With ``--scan``, where backward iterations make gradients of weights when the compiler likes.
UNTIED = "jaxmem untied"
# Nothing in these nets is a matrix product of any size.
CONVOLUTIONAL = ("resnet", "unet3d")


@dataclass(frozen=True)
class Way:
    """One row: which framework runs what, inside how much."""

    framework: str
    way: str
    share: float | None = None

    @property
    def of_jaxmem(self) -> bool:
        return self.way in (*JAXMEM, UNTIED)

    @property
    def name(self) -> str:
        if self.share is None:
            return f"{self.framework}: {self.way}"
        shown = f"{100 * self.share:g}%" if self.of_jaxmem else f"{self.share:g}"
        return f"{self.framework}: {self.way} {shown}"


def ways_of(net: str, only: str | None, auto: bool, scan: bool, shares: list[float]) -> list[Way]:
    stock = ["keep-all", "nothing_saveable", "save names", "offload names", "optimizer offload"]
    if net not in CONVOLUTIONAL:
        stock[2:2] = ["dots_saveable", "dots_with_no_batch_dims_saveable"]
    found = [Way("jax", way) for way in stock]
    fitted = [*JAXMEM[: 1 + auto], *([UNTIED] if scan else [])]
    found[1:1] = [Way("jax", way, share) for way in fitted for share in shares]
    if scan:
        return found
    found += [Way("torch", way) for way in ("eager", "checkpoint", "compile + checkpoint")]
    found += [Way("torch", "compile", share) for share in ACTIVATION_BUDGETS]
    found += [Way("torch", way) for way in ("save_on_cpu", "cpu optimizer")]
    return [way for way in found if only in (None, way.framework)]


def measured(way: Way, options: argparse.Namespace, rows: dict[str, dict]) -> dict:
    """One row, from a process of its own; what it said last where it fails."""
    asked = {
        "framework": way.framework,
        "way": way.way,
        "net": options.net,
        "size": options.size,
        "samples": options.samples,
        "limit": way.share,
        "attention": options.attention,
        "scan": options.scan,
    }
    if way.of_jaxmem:
        base = rows[KEEP_ALL].get("peak_bytes") or rows[KEEP_ALL].get("compiled_bytes")
        if not base:
            return {"error": "keep-all did not run: there is nothing to take a share of"}
        asked["limit"] = int(base * way.share)
    python = options.torch_python if way.framework == "torch" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [python, str(HERE / "headline.py"), "--row", json.dumps(asked), str(out)]
        settings = {
            # One process has the device: as much of it as there is, in one piece.
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93",
            "JAX_COMPILATION_CACHE_DIR": options.cache,
            **os.environ,
        }
        for _ in range(2):
            try:
                done = subprocess.run(
                    command, env=settings, capture_output=True, text=True, timeout=options.timeout
                )
            except subprocess.TimeoutExpired:
                return {"error": f"not done after {options.timeout} s", "limit": asked["limit"]}
            if done.returncode or not out.exists():
                failed = what_failed(done.stderr) or f"exit {done.returncode}"
                return {"error": failed, "said": done.stderr[-4000:]}
            row = {**json.loads(out.read_text()), "limit": asked["limit"]}
            # XLA tries kernels when it first compiles, and the allocator's peak is never reset.
            if not (peak := row.get("peak_bytes")) or row.get("compiling_peak_bytes", 0) < peak:
                break
        return row


def what_failed(said: str) -> str:
    """The last line that names an error."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines or [""])[-1][:600]


def one_row(asked: dict) -> dict:
    framework = asked.pop("framework")
    if framework == "torch":
        from benchmarks import ways_torch

        asked["share"] = asked.pop("limit")
        del asked["attention"], asked["scan"]
        return ways_torch.run(**asked)
    from benchmarks import ways_jax

    asked["budget"] = asked.pop("limit")
    return ways_jax.run(**asked)


def shown(name: str, row: dict) -> str:
    if "error" in row:
        return f"{name:40s} {row['error'].splitlines()[-1][:100]}"
    parts = [f"{name:40s} {row['seconds'] * 1e3:9.1f} ms"]
    for key in ("peak_bytes", "compiled_bytes", "limit"):
        if (value := row.get(key)) and value > 1:
            parts.append(f"{key.split('_')[0]} {value / 2**30:7.2f}")
    loss = f"loss {row['losses'][-1]:.5f}"
    parts.append(f"prepared in {row['prepare_seconds']:.0f} s, {loss}{as_predicted(row)}")
    return "  ".join(parts)


def verdicts(rows: dict[str, dict], shares: list[float]) -> list[str]:
    """For each budget: was it kept, and what else that fits it is how fast."""
    told = []
    for way, share in itertools.product((*JAXMEM, UNTIED), shares):
        name = Way("jax", way, share).name
        if (row := rows.get(name)) is None:
            continue
        if "seconds" not in row:
            told.append(f"{name}: not measured")
            continue
        budget, peak = row["limit"], row["peak_bytes"]
        kept = "no peak is known" if peak is None else f"{peak / budget:.3f} of the budget"
        fits = {
            other: found
            for other, found in rows.items()
            if "jaxmem" not in other and (found.get("peak_bytes") or 2**62) <= budget
        }
        told.append(f"{name}: {row['seconds'] * 1e3:.1f} ms, allocator's peak {kept}")
        for framework in ("jax", "torch"):
            times = {n: f["seconds"] for n, f in fits.items() if n.startswith(framework)}
            if not times:
                told.append(f"    no setting of {framework} fits")
                continue
            best = min(times, key=lambda n: times[n])
            told.append(f"    {times[best] / row['seconds']:.3f} x: {best}")
    return told


def main() -> int:
    if sys.argv[1:2] == ["--row"]:
        asked, out = json.loads(sys.argv[2]), Path(sys.argv[3])
        out.write_text(json.dumps(one_row(asked)))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("net", choices=["resnet", "bert", "gpt", "unet3d"])
    parser.add_argument("--size", help="one of the net's SIZES; the headline one by default")
    parser.add_argument("--only", choices=["jax", "torch"])
    parser.add_argument("--auto", action="store_true", help="jaxmem with host=AUTO as well")
    parser.add_argument("--scan", action="store_true", help="a GPT's blocks in one loop; JAX only")
    parser.add_argument("--attention", choices=["cudnn", "xla"], help="of a GPT; JAX only")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="for jaxmem")
    parser.add_argument("--rows", nargs="*", default=[""], help="rows with one of these in a name")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=420, help="seconds for a row")
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "headline-cache"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if told := refused(options):
        parser.error(told)
    sizes = {"resnet": "full", "unet3d": "full", "bert": "large", "gpt": "1.3b"}
    options.size = options.size or sizes[options.net]
    result: dict = {"net": options.net, "size": options.size, "rows": {}}
    if options.scan or options.attention:
        result |= {"scan": options.scan, "attention": options.attention or "cudnn"}
    if options.json and options.json.exists():
        asked, result = result, json.loads(options.json.read_text())
        if (there := rows_of(result)) != (these := rows_of(asked)):
            parser.error(f"--json {options.json} has {there}, and not {these}: name another file")
    result["versions"] = versions()
    known = ways_of(options.net, options.only, options.auto, options.scan, options.shares)
    wanted = [way for way in known if any(part in way.name for part in options.rows)]
    if not wanted:
        names = ", ".join(way.name for way in known)
        parser.error(f"--rows {' '.join(options.rows)}: no row has that in its name, of {names}")
    for way in wanted:
        if way.name in result["rows"]:
            continue
        row = result["rows"][way.name] = measured(way, options, result["rows"])
        print(shown(way.name, row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
    print("\n".join(verdicts(result["rows"], options.shares)), flush=True)
    return 0


def refused(options: argparse.Namespace) -> str:
    """What does not go together."""
    if not all(0 < share <= 1 for share in options.shares):
        return f"--shares are of the step as written, above 0 and up to 1, not {options.shares}"
    if (options.scan or options.attention) and options.net != "gpt":
        return f"--scan and --attention are the GPT's, not {options.net}'s"
    if options.scan and options.only == "torch":
        return "--scan has no rows of PyTorch"
    if options.attention and options.only != "jax" and not options.scan:
        return "--attention is JAX's: add --only jax"
    return ""


def rows_of(result: dict) -> str:
    """What the rows of a file are of."""
    keys = ("net", "size", "scan", "attention")
    return ", ".join(f"{key} {result[key]}" for key in keys if result.get(key))


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "jaxlib", "flax", "optax", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True)
        found["device"] = said.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        found["device"] = "cpu"
    return found


if __name__ == "__main__":
    sys.exit(main())
