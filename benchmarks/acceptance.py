"""Every problem of tests/problems at 70, 50 and 35% of keep-all, on the CPU and an absent H200.

    JAX_PLATFORMS=cpu python benchmarks/acceptance.py [--only NAME] [--target cpu|h200] [--json OUT]

Exits with 1 if a law is broken: results that differ from ``jax.jit``, compiled bytes above the
budget, a recomputation that is not in the program, or an infeasible budget whose named smallest
one does not work either.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxmem.units import format_bytes
from tests.laws import Verdict, judge
from tests.problems import PROBLEMS

# An error names the smallest of six programs that are the same for every budget, so that every
# larger budget works too; a search for one budget may find a somewhat smaller one.
NEAR = 1.1
SHARES = (0.7, 0.5, 0.35)
TARGETS = ("cpu", "h200")
HEADINGS = (
    *("problem", "target", "share", "budget", "keep-all", "predicted", "compiled", "smallest"),
    *("rounds", "seconds", "max error", "verdict"),
)
WIDTHS = (32, 6, 5, 9, 9, 9, 9, 9, 6, 7, 9, 10)


def row(verdict: Verdict) -> str:
    """One line of the table, with the broken laws under it."""
    sizes = (
        verdict.budget_bytes,
        verdict.keep_all_bytes,
        verdict.predicted_bytes,
        verdict.compiled_bytes,
        verdict.smallest_bytes,
    )
    cells = (
        verdict.problem,
        verdict.target,
        f"{verdict.share:.0%}",
        *(format_bytes(size) if size else "-" for size in sizes),
        str(verdict.compiles),
        f"{verdict.seconds:.1f}",
        f"{verdict.error:.1e}",
        verdict.word,
    )
    return "\n".join([_line(cells), *(f"    {law}" for law in verdict.broken)])


def _line(cells: Sequence[str]) -> str:
    first, second, *rest = zip(cells, WIDTHS, strict=True)
    left = [f"{cell:<{width}}" for cell, width in (first, second)]
    return " ".join([*left, *(f"{cell:>{width}}" for cell, width in rest)])


def check_smallest(verdict: Verdict, least: int) -> None:
    """A smallest budget that is far from the smallest known is a broken law.

    Args:
        verdict: of a budget that may have been infeasible.
        least: compiled bytes of the smallest program that larger budgets led to.
    """
    if verdict.smallest_bytes > NEAR * least:
        verdict.broken.append(
            f"names {verdict.smallest_bytes} bytes as the smallest that works, and {least} worked"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--share", action="append", type=float, metavar="SHARE")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every verdict there too")
    return parser.parse_args()


def main() -> int:
    wanted = arguments()
    print(_line(HEADINGS), flush=True)
    verdicts: list[Verdict] = []
    for name in wanted.only or PROBLEMS:
        for target in wanted.target or TARGETS:
            least = sys.maxsize
            for share in sorted(wanted.share or SHARES, reverse=True):
                verdict = judge(name, share, target)
                check_smallest(verdict, least)
                least = min(least, verdict.compiled_bytes or least)
                verdicts.append(verdict)
                print(row(verdict), flush=True)
    if wanted.json:
        wanted.json.write_text(json.dumps([dataclasses.asdict(v) for v in verdicts], indent=1))
    words = [verdict.word for verdict in verdicts]
    print(", ".join(f"{words.count(word)} {word}" for word in sorted(set(words))))
    return int("BROKEN" in words)


if __name__ == "__main__":
    sys.exit(main())
