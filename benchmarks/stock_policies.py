"""What JAX's own checkpoint policies recompute, and what a plan recomputes in as many bytes.

    JAX_PLATFORMS=cpu python benchmarks/stock_policies.py [--only NAME] [--simulate-only]
        [--json OUT]

Every problem of tests/problems that has a backward pass, on an absent H200, with each stock policy
on its own and with what is live between the blocks. The bytes a policy compiles to (with
``--simulate-only``, those it is simulated to need) are the budget of the plan. Recomputation is
predicted seconds beyond those of keep-all; in a loop a policy that saves more copies into stacks
than it repeats work counts as none. A plan must never be slower, and take at least 10% less of them
on half of the pairs in which the policy takes any. Exits with 1 if not. With
``--json`` the pairs that are there already are not judged again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxmem.errors import BudgetInfeasibleError
from jaxmem.planner.candidates import stock_keeps
from jaxmem.planner.search import Search, Solution
from jaxmem.program.calling import Caller
from jaxmem.program.ir import Program
from jaxmem.runtime import rounds
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from jaxmem.units import format_bytes
from tests.problems import PROBLEMS, pure

TARGET = "h200"
# Predicted seconds that are equal but for the order in which they were added.
EQUAL = 1e-6
LESS, SHARE = 0.90, 0.5
HEADINGS = ("problem", "policy", "budget", "policy s", "ours s", "again", "ours again", "verdict")
WIDTHS = (30, 40, 9, 10, 10, 10, 10, 8)


@dataclass
class Pair:
    """One problem with one policy.

    Attributes:
        problem: its name; ``policy`` the policy's.
        budget_bytes: what the policy needs, and the plan may use.
        seconds: predicted of the policy; ``our_seconds`` of the plan, ``None`` without one.
        keep_all_seconds: predicted of the step as written.
        solver: how the plan came about, or why there is none.
        compiled: whether the budget is what a compiler says.
    """

    problem: str
    policy: str
    budget_bytes: int
    seconds: float
    our_seconds: float | None
    keep_all_seconds: float
    solver: str
    compiled: bool

    @property
    def worse(self) -> bool:
        """Whether the policy is faster, or the only one that fits."""
        return self.our_seconds is None or self.our_seconds > self.seconds * (1 + EQUAL)

    @property
    def again(self) -> float:
        """Seconds that the policy recomputes; nothing where it saves what a loop need not stack."""
        return max(0.0, self.seconds - self.keep_all_seconds)

    @property
    def our_again(self) -> float:
        """Seconds that the plan recomputes."""
        ours = self.seconds if self.our_seconds is None else self.our_seconds
        return max(0.0, ours - self.keep_all_seconds)

    @property
    def recomputes(self) -> bool:
        """Whether the policy recomputes anything."""
        return self.again > EQUAL * self.keep_all_seconds

    @property
    def word(self) -> str:
        """``less``, ``same`` or ``WORSE``."""
        if self.worse:
            return "WORSE"
        return "less" if self.our_again <= LESS * self.again and self.recomputes else "same"

    def row(self) -> str:
        """One line of the table."""
        seconds = (self.seconds, self.our_seconds, self.again, self.our_again)
        cells = (
            self.problem,
            self.policy,
            format_bytes(self.budget_bytes),
            *("-" if s is None else f"{s:.3e}" for s in seconds),
            self.word,
        )
        return _line(cells) + (f"\n    {self.solver}" if self.worse else "")


def _line(cells: tuple[str, ...]) -> str:
    first, second, *rest = zip(cells, WIDTHS, strict=True)
    left = [f"{cell:<{width}}" for cell, width in (first, second)]
    return " ".join([*left, *(f"{cell:>{width}}" for cell, width in rest)])


def traced(name: str) -> Program:
    """The step of a problem."""
    step = pure(PROBLEMS[name])
    caller = Caller(step.function, step.donate)
    return caller.trace(caller.take(step.args, {})).program


def policies(search: Search) -> Iterator[Solution]:
    """Every stock policy, each kept set once; none where there is nothing to decide."""
    if not search.choices:
        return
    seen = set()
    for name, keep in stock_keeps(search.choices):
        solution = replace(search.evaluate(keep), solver=name)
        if solution.key not in seen:
            seen.add(solution.key)
            yield solution


def simulated(name: str, known: set[str]) -> Iterator[Pair]:
    """Pairs whose budgets are what a policy is simulated to need."""
    search = Search(traced(name), rates_of(Target(TARGET)))
    for policy in policies(search):
        if policy.solver in known:
            continue
        plan = search.solve(policy.temp_bytes)
        yield Pair(
            name,
            policy.solver,
            policy.temp_bytes,
            policy.seconds,
            None if plan is None else plan.seconds,
            search.keep_all.seconds,
            "nothing found" if plan is None else plan.solver,
            compiled=False,
        )


def compiled(name: str, known: set[str]) -> Iterator[Pair]:
    """Pairs whose budgets are what a policy compiles to."""
    compiler = Compiler(traced(name), Target(TARGET))
    for policy in policies(compiler.search):
        if policy.solver in known:
            continue
        attempt = compiler.attempt(policy)
        compiler.search.unpin()
        budget = attempt.compiled.memory.total_bytes
        try:
            plan = rounds.fit(compiler, budget, lambda _: None).plan
            seconds, solver = plan.predicted_seconds, plan.solver
        except BudgetInfeasibleError as error:
            seconds, solver = None, str(error).splitlines()[0]
        if attempt.problem:
            solver += f"; of the policy {attempt.problem}"
        yield Pair(
            name,
            policy.solver,
            budget,
            policy.seconds,
            seconds,
            compiler.search.keep_all.seconds,
            solver,
            compiled=True,
        )


def judged(pairs: list[Pair]) -> tuple[str, bool]:
    """The verdict over all pairs in words, and whether both claims hold."""
    worse = [p for p in pairs if p.worse]
    again = [p for p in pairs if p.recomputes]
    less = [p for p in again if p.word == "less"]
    words = (
        f"{len(pairs)} pairs, worse on {len(worse)}; of {len(again)} in which the policy "
        f"recomputes, at least {1 - LESS:.0%} less on {len(less)}"
    )
    return words, not worse and len(less) >= SHARE * len(again)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--simulate-only", action="store_true", help="compile nothing")
    parser.add_argument("--json", type=Path, metavar="OUT", help="read from and written to")
    wanted = parser.parse_args()
    pairs: list[Pair] = []
    if wanted.json and wanted.json.exists():
        pairs = [Pair(**row) for row in json.loads(wanted.json.read_text())["pairs"]]
    print(_line(HEADINGS), flush=True)
    run = simulated if wanted.simulate_only else compiled
    for name in wanted.only or PROBLEMS:
        there = {
            p.policy for p in pairs if p.problem == name and p.compiled is not wanted.simulate_only
        }
        for pair in run(name, there):
            pairs.append(pair)
            print(pair.row(), flush=True)
            if wanted.json:
                text = json.dumps({"target": TARGET, "pairs": [asdict(p) for p in pairs]}, indent=1)
                wanted.json.write_text(text + "\n")
    words, holds = judged(pairs)
    print(words)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
