"""Random lines of kernels of every kind, small enough to try all there is to choose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.planner.fused import FusedLine, fused_line
from jaxmem.planner.problem import Choice, Problem, Run
from jaxmem.planner.schedule import Scheduler
from jaxmem.planner.simulate import Simulation, Simulator
from jaxmem.planner.solvers.answer import Limits
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Block, Op, Value
from jaxmem.program.loops import Nest
from tests.planner.lines import OPAQUE

# A kernel that writes over an operand which nobody needs any more.
IN_PLACE = jax.make_jaxpr(lambda x, y: x.at[0].set(y))(jnp.zeros(4), 1.0).eqns[-1]
assert IN_PLACE.primitive.name == "scatter"
SECONDS = (0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0)
RATES = Rates({"float32": 1.0}, 1.0)


class Judge(Simulator):
    """A simulator that is told how long operations take and what they need meanwhile."""

    def __init__(self, seconds: dict[Op, float], working: dict[Op, int]):
        super().__init__(RATES)
        self.given, self.working = seconds, working

    def seconds(self, op, kind, roots) -> float:
        return 0.0 if op.transfer else self.given[op.origin]

    def working_bytes(self, op) -> int:
        return 0 if op.transfer else self.working[op.origin]


class Writer(Scheduler):
    """A scheduler that is told what may run again."""

    once: frozenset[Op] = frozenset()

    def repeatable(self, op: Op) -> bool:
        return op not in self.once


@dataclass(frozen=True, eq=False)
class Dag:
    """A random line: as operations, and as the problem of its kernels.

    Attributes:
        block: the operations; ``turn`` the first late one.
        once: operations that must not run again.
        judge: knows what each operation needs.
        line: the problem, with the names of what may be dropped.
    """

    block: Block
    turn: int
    once: frozenset[Op]
    judge: Judge
    line: FusedLine

    @property
    def problem(self) -> Problem:
        return self.line.problem

    def written(self, choice: Choice) -> Simulation:
        """The program of a choice that offloads nothing, written out and simulated."""
        writer = Writer(Nest(self.block, None, (), ()))
        writer.once = self.once
        block = writer.schedule(dict(self.line.keep_of(choice, ("", self.turn))))
        return self.judge.step(block)


def dag(rng: random.Random, most: int = 8, *, offload: bool = False) -> Dag:
    """A line of up to ``most`` early kernels, of one or two results each, and as many late ones."""
    values = [_value(rng, f"x{n}") for n in range(rng.randint(1, 2))]
    inputs = tuple(values)
    ops: list[Op] = []
    residuals: list[Value] = []
    early = rng.randint(max(1, most // 2), most)
    for index in range(early + rng.randint(2, most)):
        # Early kernels read what was made lately, late ones anything made early and what was made
        # last: a forward and a backward pass.
        there = values[-4:] if index < early else residuals
        operands = {rng.choice(there) for _ in range(rng.randint(1, 3 if index < early else 2))}
        if rng.random() < 0.8:
            operands.add(values[-1])
        results = [_value(rng, f"v{index}.{n}") for n in range(rng.choice((1, 1, 1, 2)))]
        eqn = IN_PLACE if rng.random() < 0.3 else OPAQUE
        ops.append(Op(eqn, sorted(operands, key=lambda v: str(v.key)), tuple(results)))
        values.extend(results)
        if index < early:
            residuals = values[len(inputs) :]
    made = values[len(inputs) :]
    outputs = {rng.choice(made) for _ in range(rng.randint(0, 2))} | {made[-1]}
    block = Block("", inputs, tuple(ops), tuple(sorted(outputs, key=lambda v: str(v.key))))
    seconds = {op: rng.choice(SECONDS) for op in ops}
    working = {op: 4 * rng.choice((0, 0, 0, 1, 4)) if op.eqn is OPAQUE else 0 for op in ops}
    once = frozenset(op for op in ops[:early] if rng.random() < 0.15)
    judge = Judge(seconds, working)
    rates = (rng.choice((2.0, 8.0, 40.0)), rng.choice((2.0, 8.0, 40.0))) if offload else (0.0, 0.0)
    line = fused_line(
        block,
        block.ops,
        early,
        judge,
        lambda op: op not in once,
        d2h_bytes_per_second=rates[0],
        h2d_bytes_per_second=rates[1],
    )
    return Dag(block, early, once, judge, line)


def _value(rng: random.Random, key: str) -> Value:
    return Value(jax.ShapeDtypeStruct((rng.randint(1, 9),), jnp.float32), key)


def all_runs(problem: Problem, *, offload: bool = False) -> list[tuple[Choice, Run]]:
    """Every choice of one turn, played through."""
    return [(choice, problem.run(choice)) for choice in _all_choices(problem, offload)]


def _all_choices(problem: Problem, offload: bool) -> Iterator[Choice]:
    for fates in itertools.product(range(3 if offload else 2), repeat=len(problem.droppable)):
        fate = dict(zip(problem.droppable, fates, strict=True))
        kept = [v for v, f in fate.items() if f == 1]
        yield problem.keeping(kept, [v for v, f in fate.items() if f == 2])


def budgets(problem: Problem, runs: list[tuple[Choice, Run]]) -> list[int]:
    """Every number of bytes at which another choice becomes possible, up to keep-all."""
    most = problem.run(problem.keep_all).peak_bytes
    return sorted({run.peak_bytes for _, run in runs if run.peak_bytes <= most})


def best_seconds(runs: list[tuple[Choice, Run]], limits: Limits) -> float | None:
    """The seconds of the fastest choice within the limits."""
    return min((run.seconds for _, run in runs if limits.allow(run)), default=None)
