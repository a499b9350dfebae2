"""What a device does, measured, beside what the table says of it or what is assumed.

Measures the default device several times without reading or writing the cache, so that the spread
of the measurement shows; prints medians, spread and table, and the seconds that each part took.

    python benchmarks/rates.py --repeats 3 --json benchmarks/results/h200_rates.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
from jaxlib.version import __version__ as jaxlib_version

import jaxmem
from jaxmem.targets import local, measured

_NEEDED = {"float32", "bfloat16", "hbm_bytes_per_second"}


def rows(found: list[measured.Measurement], fields: dict) -> list[dict]:
    """One row for each rate: its median, the spread between runs, and the table's."""
    runs = [{**made.flops, **made.rates} for made in found]
    table = {**fields["flops"], **{n: v for n, v in fields.items() if n.endswith("_per_second")}}
    made = []
    for name in dict.fromkeys([*(name for run in runs for name in run), *table]):
        seen = [run[name] for run in runs if name in run]
        middle = statistics.median(seen) if seen else None
        made.append(
            {
                "name": name,
                "measured": middle,
                "spread": (max(seen) - min(seen)) / middle if middle else None,
                "table": table.get(name),
                "share": middle / table[name] if middle and name in table else None,
            }
        )
    return made


def shown(row: dict) -> str:
    unit = "GB/s" if row["name"].endswith("_per_second") else "TFLOP/s"
    scale = 1e9 if unit == "GB/s" else 1e12
    numbers = [
        f"{row[k] / scale:10.3f}" if row[k] else f"{'-':>10s}" for k in ("measured", "table")
    ]
    shares = [f"{row[k]:7.1%}" if row[k] is not None else f"{'-':>7s}" for k in ("share", "spread")]
    name = row["name"].removesuffix("_bytes_per_second")
    return f"{name:10s} {numbers[0]} {numbers[1]} {unit:8s} {shares[0]} {shares[1]}"


def parts(found: list[measured.Measurement]) -> list[str]:
    """One line for each part: its seconds in every measurement, and the median of its steps."""
    names = [name for name in found[0].part_seconds if ":" not in name]
    lines = [f"{'seconds':15s} {'data':>8s} {'compile':>8s}    each time"]
    for name in names:
        steps = [
            statistics.median(made.part_seconds.get(f"{name}: {step}", 0.0) for made in found)
            for step in ("data", "compile")
        ]
        each = ", ".join(f"{made.part_seconds[name]:.2f}" for made in found)
        lines.append(f"{name:15s} {steps[0]:8.2f} {steps[1]:8.2f}    {each}")
    lines.append(f"{'all':33s}    {', '.join(f'{made.seconds:.2f}' for made in found)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    fields, device = local.assumed_device(), jax.local_devices()[0]
    before = (device.memory_stats() or {}).get("bytes_in_use")
    found = [measured.measure(device, fields) for _ in range(options.repeats)]
    after = (device.memory_stats() or {}).get("bytes_in_use")
    table = rows(found, fields)
    print(f"{device.device_kind}, jax {jax.__version__}, jaxlib {jaxlib_version}")
    print(f"{'':10s} {'measured':>10s} {'table':>10s} {'':8s} {'share':>7s} {'spread':>7s}")
    print("\n".join(map(shown, table)))
    print("\n".join(parts(found)))
    for note in sorted({note for made in found for note in made.notes}):
        print("note:", note)
    # This one is read from the user's cache, or measured once more and kept there.
    target = jaxmem.Target.local(measure=True)
    print("Target.local:", "; ".join(target.sources[:2]))
    if options.json:
        content = {
            "device": device.device_kind,
            "devices": jax.local_device_count(),
            "platform_version": device.client.platform_version,
            "driver": measured.key_of(device).get("driver"),
            "jax": jax.__version__,
            "jaxlib": jaxlib_version,
            "jaxmem": jaxmem.__version__,
            "pinned_host_bytes": fields["pinned_host_bytes"],
            "bytes_in_use": [before, after],
            "rows": table,
            "runs": [asdict(made) for made in found],
            "sources": target.sources,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    missing = {row["name"] for row in table if not row["measured"]} & _NEEDED
    kept_bytes = after - before if before is not None else 0
    print(f"bytes left on the device: {kept_bytes}")
    return int(bool(missing) or kept_bytes > 2**20)


if __name__ == "__main__":
    sys.exit(main())
