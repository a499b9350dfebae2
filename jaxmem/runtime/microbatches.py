"""Choose how many microbatches ``jaxmem.AUTO`` stands for.

One, where the step as written fits. Otherwise every number that divides the batches is traced and
searched on paper, and the quickest of those that are predicted to fit is compiled. All numbers
together compile no more programs than a plan without a choice may.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxmem.errors import BudgetInfeasibleError
from jaxmem.planner.decisions import Round
from jaxmem.planner.search import Solution
from jaxmem.program.calling import Traced
from jaxmem.program.microbatches import counts
from jaxmem.runtime import rounds
from jaxmem.runtime.bench import Bench
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.progress import Report
from jaxmem.runtime.rounds import FIRST_GUESS, TRIAL
from jaxmem.runtime.tries import MOST_COMPILES, Outcome
from jaxmem.targets.compiling import Compiled
from jaxmem.targets.options import memory_schedules

# The step as written with one microbatch, and on a CPU the smallest program in two orders; then
# first guesses, each of which tells what to make of the next prediction; then the step as written
# with the number that was found (twice on a CPU), and searches or, where no guess fitted, the
# smallest programs: five, with those two orders, and with host memory two more.
_MOST_PROBES = 3
_AS_WRITTEN_COMPILES = 2
_MOST_SMALLEST = 5
_AIM = 0.985


def fit(
    first: Traced,
    trace: Callable[[int], Traced],
    compiler: Compiler,
    budget_bytes: int,
    report: Report,
    *,
    host_bytes: int | None = None,
    bench: Bench | None = None,
) -> tuple[Traced, Outcome]:
    """The step with a number of microbatches with which it fits, and its plan.

    Args:
        first: the step traced with one microbatch; ``compiler`` compiles it.
        trace: traces it with another number.
        compiler: for the target.
        budget_bytes: bytes on each device.
        report: shows progress.
        host_bytes: host memory that plans may use, as in :func:`rounds.fit`.
        bench: where the quickest programs with the number that is found are timed.

    Raises:
        BudgetInfeasibleError: no number of microbatches leads to a plan that fits.
    """
    report("compiling the step as written")
    plain = compiler.keep_all()
    if plain.memory.total_bytes <= budget_bytes and compiler.search.ruled.allows_written:
        return first, rounds.fit(compiler, budget_bytes, report, host_bytes=host_bytes, bench=bench)
    chosen = _Choosing(first, trace, compiler, budget_bytes, report, host_bytes, plain, bench)
    return chosen.run()


def splits(traced: Traced) -> tuple[int, ...]:
    """Numbers of microbatches that divide every batch, and its rows on each device; ascending."""
    program = traced.program
    arguments = program.block.inputs[len(program.consts) :]
    local = [
        sharding.shard_shape(value.aval.shape)[0]
        for value, sharding in zip(arguments, program.shardings, strict=True)
        if sharding is not None and value.aval.shape[:1] in {(n,) for n in traced.automatic}
    ]
    return counts([*traced.automatic, *local])


@dataclass(frozen=True, eq=False)
class _Option:
    """The step with one number of microbatches."""

    count: int
    traced: Traced
    compiler: Compiler

    @property
    def name(self) -> str:
        """As rounds have it."""
        return f"{self.count} microbatch{'es' * (self.count > 1)}"

    @property
    def smallest_bytes(self) -> int:
        """Predicted temporaries of its smallest program."""
        search = self.compiler.search
        search.unpin()
        bases = search.bases() if search.choices else []
        written = [search.keep_all.temp_bytes] if search.ruled.allows_written else []
        return min([*written, *(base.temp_bytes for base in bases)])

    def solve(self, limit_bytes: int, written_bytes: int) -> tuple[float, Solution | None] | None:
        """Predicted seconds and schedule within a limit; ``None`` if none is predicted to fit.

        Args:
            limit_bytes: simulated temporaries that a schedule may have.
            written_bytes: what they may be in the step as written, of which the compiler makes
                more or less than it makes of a schedule.
        """
        search = self.compiler.search
        as_written = search.keep_all.temp_bytes
        if as_written <= written_bytes and search.ruled.allows_written:
            return search.keep_all.seconds, None
        solution = search.solve(written_bytes if as_written <= limit_bytes else limit_bytes)
        return None if solution is None else (solution.seconds, solution)


class _Choosing:
    """One choice for one budget."""

    def __init__(
        self,
        first: Traced,
        trace: Callable[[int], Traced],
        compiler: Compiler,
        budget_bytes: int,
        report: Report,
        host_bytes: int | None,
        plain: Compiled,
        bench: Bench | None,
    ):
        self.trace, self.budget, self.report, self.plain = trace, budget_bytes, report, plain
        self.host_bytes, self.bench = host_bytes, bench
        compiler.budget_bytes = budget_bytes
        self.target, self.check = compiler.target, compiler.check
        self.policy, self.deadline = compiler.policy, compiler.deadline
        self.options = {1: _Option(1, first, compiler)}
        self.counts = splits(first)
        self.fixed = plain.memory.total_bytes - plain.memory.temp_bytes
        keep_all = compiler.search.keep_all.temp_bytes
        self.written = max(plain.memory.temp_bytes, 1) / max(keep_all, 1)
        # For any number of microbatches devices have the same parts of arrays.
        self.scale = self.unscaled = compiler.scale
        before = self.fixed + int(compiler.written_temp_bytes * self.unscaled)
        self.trialled: list[_Option] = []
        self.rounds = [self._round("keep-all, 1 microbatch", before, plain)]

    def run(self) -> tuple[Traced, Outcome]:
        found = self._probed()
        return self._smallest() if found is None else self._planned(*found)

    def _compiles(self) -> int:
        return sum(option.compiler.compiles for option in self.options.values())

    def option(self, count: int) -> _Option:
        if count not in self.options:
            self.report(f"tracing the step with {count} microbatches")
            traced = self.trace(count)
            compiler = Compiler(traced.program, self.target, self.check, self.policy, self.deadline)
            compiler.budget_bytes = self.budget
            self.options[count] = _Option(count, traced, compiler)
        return self.options[count]

    def _probed(self) -> tuple[_Option, Solution | None, Round | None] | None:
        """The quickest schedule that is predicted to fit, and does; the round in which it did."""
        room = self.budget - self.fixed
        for _ in range(_MOST_PROBES):
            best = self._quickest(int(room / self.scale * _AIM), int(room / self.written * _AIM))
            if best is None:
                return None
            option, solution = best
            compiler = option.compiler
            compiler.search.unpin()
            self.report(f"compiling the step with {option.count} microbatches")
            if solution is None:
                compiled, problem = compiler.keep_all(), ""
                predicted = compiler.search.keep_all.temp_bytes
            else:
                self._set_order(option)
                total = self.fixed + int(solution.temp_bytes * self.scale)
                compiler.alone = compiler.is_near(total)
                attempt = compiler.attempt(solution)
                compiled, problem, predicted = (
                    attempt.compiled,
                    attempt.problem,
                    solution.temp_bytes,
                )
            before = self.fixed + int(predicted * self.unscaled)
            guess = self._round(option.name, before, compiled, problem)
            if guess.fits and not problem:
                return option, solution, guess if solution else None
            self.rounds.append(guess)
            found = compiled.memory.temp_bytes / max(predicted, 1)
            self.written = max(self.written, found)
            self.scale = max(self.scale, found) if solution else self.scale
        return None

    @functools.cached_property
    def smallest(self) -> _Option:
        """The number of microbatches with the smallest program; the same for every budget."""
        return min(map(self.option, self.counts), key=lambda o: (o.smallest_bytes, o.count))

    def _set_order(self, option: _Option) -> None:
        """On a CPU, one trial of the orders of operations serves every number of microbatches."""
        if len(memory_schedules(self.target)) == 1:
            return
        # Where that one leaves nothing to choose, it compiles no smallest programs either.
        tried = self.smallest if self.smallest.compiler.search.choices else option
        if option is not tried:
            option.compiler.order = tried.compiler.options()
        if tried not in self.trialled:
            self.trialled.append(tried)

    def _trials(self, option: _Option) -> list[Round]:
        """The programs from which the order of operations was chosen."""
        smallest = option.compiler.search.smallest()
        predicted = self.fixed + int(smallest.temp_bytes * self.unscaled)
        return [
            self._round(f"smallest with {option.name}", predicted, compiled)
            for _, compiled in option.compiler.trials
        ]

    def _quickest(self, limit: int, written: int) -> tuple[_Option, Solution | None] | None:
        best: tuple[float, _Option, Solution | None] | None = None
        for count in self.counts:
            option = self.option(count)
            # More microbatches have more fixed costs: from here on all are slower than the best.
            if best is not None and option.compiler.search.keep_all.seconds >= best[0]:
                break
            solved = option.solve(limit, written)
            if solved is not None and (best is None or solved[0] < best[0]):
                best = (solved[0], option, solved[1])
        return None if best is None else (best[1], best[2])

    def _smallest(self) -> tuple[Traced, Outcome]:
        """The number of microbatches with the smallest program; the same for every budget."""
        option = self.smallest
        option.compiler.most_smallest = _MOST_SMALLEST
        try:
            return self._planned(option, None, None)
        except BudgetInfeasibleError as error:
            tried = ", ".join(map(str, self.counts))
            raise BudgetInfeasibleError(
                f"{error}\n  That is with {option.count} microbatches; of {tried} they take least.",
                budget_bytes=error.budget_bytes,
                smallest_bytes=error.smallest_bytes,
                holders=error.holders,
            ) from None

    def _planned(
        self, option: _Option, start: Solution | None, guess: Round | None
    ) -> tuple[Traced, Outcome]:
        left = MOST_COMPILES - self._compiles() - _AS_WRITTEN_COMPILES
        others = [other for other in self.trialled if other is not option]
        outcome = rounds.fit(
            option.compiler,
            self.budget,
            self.report,
            host_bytes=self.host_bytes,
            searches=max(left, 0) if start else 0,
            start=start,
            bench=self.bench,
            spent=len(self.rounds) + sum(len(other.compiler.trials) for other in others),
        )
        after = outcome.plan.rounds[option.count == 1 :]
        # Where it fits as written in another order after all, these were not compiled again.
        told = any(r.name.startswith(TRIAL) for r in after)
        before = list(self.rounds)
        for tried in others if told else self.trialled:
            before += self._trials(tried)
        if guess is not None and all(r.name != FIRST_GUESS for r in after):
            before.append(guess)
        plan = replace(
            outcome.plan,
            microbatches=option.count,
            keep_all_predicted_bytes=self.rounds[0].predicted_bytes,
            keep_all_compiled_bytes=self.plain.memory.total_bytes,
            keep_all_seconds=self.options[1].compiler.search.keep_all.seconds,
            rounds=(*before, *after),
        )
        return option.traced, replace(outcome, plan=plan)

    def _round(self, name: str, predicted: int, compiled: Compiled, problem: str = "") -> Round:
        total = compiled.memory.total_bytes
        return Round(name, self.budget, predicted, total, total <= self.budget, problem)
