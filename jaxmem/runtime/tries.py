"""What was compiled for one budget, what came of it, and which of it fits."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import jax

from jaxmem.planner.decisions import Round
from jaxmem.planner.fill import Solution
from jaxmem.planner.plan import Plan
from jaxmem.program.ir import Block, Hosting, Program
from jaxmem.runtime.compiler import Attempt, Compiler
from jaxmem.runtime.exposed import exposed
from jaxmem.runtime.planned import Chosen, plan_of
from jaxmem.runtime.progress import Part, Report
from jaxmem.runtime.stream import Stream
from jaxmem.targets.compiling import Compiled
from jaxmem.units import format_bytes

MOST_COMPILES = 15
# Programs as quick as each other that differ by less than this share take the same memory.
SAME_BYTES = 0.01
# What is less on paper is taken for as much where it is compared with what was compiled.
_LEAST_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Outcome:
    """A program compiled for the target, within the budget, and the plan it follows.

    Attributes:
        plan: the plan.
        block: the schedule; of a step that is cut that of its first part, as ``compiled``.
        compiled: the program.
        hosting: which inputs and results of the step are in host memory.
        stream: how a step that is cut runs; ``None`` where it is one program.
        planned: its first part, of which ``block`` is a schedule.
    """

    plan: Plan
    block: Block
    compiled: Compiled
    hosting: Hosting = field(default_factory=Hosting)
    stream: Stream | None = None
    planned: Program | None = None

    def program(self, whole: Program) -> Program:
        """The program that ``block`` is a schedule of: the step, or its first part."""
        return whole if self.planned is None else self.planned


class Tries:
    """The compiles of one budget.

    Attributes:
        spent: how many programs of the step were compiled elsewhere.
        rounds: a line for each compile; ``noted`` says which of them is a program's.
        tried: the keys of the solutions that were compiled, or could not be.
        fitting: those that fit.
        trialled: which line is that of a program compiled in one of two orders.
        scale: the compiler's temporaries over the simulated ones, on a GPU the median of what was
            compiled, else of the last program; ``unscaled`` before any.
        closer: the same over simulated ones with what kernels work in; by it bytes are predicted.
        ratios: both of each.
        ends: simulated temporaries and what they compile to, of the smallest program as it did and
            of the step as written as it should, where nothing between them was compiled.
        fixed: bytes of arguments and results.
        said: what the plan is to tell of them.
        failed: how many XLA could not compile.
    """

    spent: int = 0

    def __init__(self, compiler: Compiler, budget: int, report: Report):
        self.compiler, self.budget, self.report = compiler, budget, report
        self.rounds: list[Round] = []
        self.tried: set[frozenset] = set()
        self.fitting: list[Chosen] = []
        self.trialled: dict[int, int] = {}
        self.noted: dict[int, int] = {}
        self.scale = self.unscaled = self.closer = 1.0
        self.ratios: list[tuple[float, float]] = []
        self.ends: tuple[tuple[int, int], tuple[int, int]] | None = None
        self.fixed = compiler.program.fixed_bytes
        self.said: list[str] = []
        self.failed = 0

    @contextlib.contextmanager
    def unless_xla_fails(self, what: str) -> Iterator[None]:
        """Within, that XLA cannot compile a program is said, and does not end the search."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            self.failed += 1
            said = f"{what} did not compile: {str(error).splitlines()[0][:200]}"
            if said not in self.said:
                self.said.append(said)

    def attempted(
        self, what: str, solution: Solution, options: Mapping[str, str] | None = None
    ) -> Attempt | None:
        """A solution, compiled and checked; ``None`` where XLA cannot compile it, which is said."""
        with self.unless_xla_fails(what):
            return self.compiler.attempt(solution, options=options)
        return None

    def attempted_least(self, solution: Solution) -> Attempt | None:
        """The same as the compiler makes least of it."""
        with self.unless_xla_fails("a program (smallest)"):
            return self.compiler.attempt_least(solution)
        return None

    def left(self) -> int:
        """How many compiles are left, by the lines and what did not compile."""
        return MOST_COMPILES - self.spent - len(self.rounds) - self.failed

    def announce(self, solution: Solution) -> None:
        """Say what is compiled next."""
        done = len(self.rounds) + self.failed
        said = (
            f"compile {done + 1} of at most {MOST_COMPILES}: "
            f"{format_bytes(self.predicted(solution))} predicted, "
            f"{format_bytes(self.budget)} allowed"
        )
        self.report(Part(said, done, MOST_COMPILES))

    def predicted(self, solution: Solution) -> int:
        """Bytes that a solution should compile to, after what was seen before."""
        hosted = self.compiler.program.host_bytes(self.compiler.hosting(solution))
        return self.fixed - hosted + self._compiled(solution)

    def _compiled(self, solution: Solution) -> int:
        """What temporaries of a solution should compile to.

        What a CPU's compiler takes beside them is about the same for any program of a step: 356 kB
        of 2.4 MB for the smallest of a small GPT, where as written it takes 1% more.
        """
        if self.ends is None:
            return int(self.compiler.temp_bytes(solution) * self.closer)
        (least, its), (most, whole) = self.ends
        return its + (whole - its) * (solution.temp_bytes - least) // (most - least)

    def record(self, name: str, limit: int, attempt: Attempt) -> Compiled:
        """Take down what a solution compiled to, and learn from it."""
        solution, compiled = attempt.solution, attempt.compiled
        predicted = self.predicted(solution)
        trial = self.trialled.get(id(compiled))
        if trial is None:
            away = self.compiler.program.host_bytes(self.compiler.hosting(solution))
            limit += self.fixed - away
            self.note(name, limit, predicted, compiled, attempt.problem)
        else:
            self.rounds[trial] = replace(self.rounds[trial], problem=attempt.problem)
        self.tried.add(solution.key)
        self.ends = None
        if solution.temp_bytes:
            self._learn(solution, compiled)
        if compiled.memory.total_bytes <= self.budget and not attempt.problem:
            block = self.compiler.block(solution)
            waits = exposed(self.compiler.search.simulator, block, compiled)
            self.fitting.append(Chosen(solution, compiled, predicted, waits))
        return compiled

    def _learn(self, solution: Solution, compiled: Compiled) -> None:
        """What comes is off by as much; on a GPU most programs are, and some by something else."""
        self.compiler.laid_out.learn(compiled)
        taken = compiled.memory.temp_bytes
        # Where all that is large goes to results' places, what is left says nothing in proportion.
        closely = max(self.compiler.temp_bytes(solution), _LEAST_BYTES)
        self.ratios.append((taken / solution.temp_bytes, taken / closely))
        if self.compiler.target.platform == "gpu":
            self.scale, self.closer = map(statistics.median, zip(*self.ratios, strict=True))
        else:
            self.scale, self.closer = self.ratios[-1]

    def forget(self) -> None:
        """What was compiled so far says nothing about what comes."""
        self.scale = self.closer = self.unscaled
        self.ratios.clear()

    def note(
        self, name: str, limit: int, predicted: int, compiled: Compiled, problem: str = ""
    ) -> None:
        """One line more."""
        total = compiled.memory.total_bytes
        self.noted.setdefault(id(compiled), len(self.rounds))
        self.rounds.append(Round(name, limit, predicted, total, total <= self.budget, problem))

    def best(self) -> Chosen:
        """The quickest program that fits; of equal ones the last, which is predicted best."""
        best = min(self.fitting, key=lambda chosen: chosen.cost)
        seconds, nbytes = best.cost
        alike = nbytes * (1 + SAME_BYTES)
        return [c for c in self.fitting if c.cost[0] == seconds and c.cost[1] <= alike][-1]

    def outcome_of(self, chosen: Chosen) -> Outcome:
        """The plan of a program that fits."""
        plan = plan_of(
            self.compiler,
            chosen,
            self.rounds,
            budget_bytes=self.budget,
            fixed_bytes=self.fixed,
        )
        return Outcome(
            replace(plan, notes=(*plan.notes, *self.said)),
            self.compiler.block(chosen.solution),
            chosen.compiled,
            self.compiler.hosting(chosen.solution),
        )
