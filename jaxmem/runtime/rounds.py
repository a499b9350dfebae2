"""Solve, write out, compile, check, tighten and solve again, until the compiler agrees."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from jaxmem.errors import BudgetInfeasibleError, JaxmemError
from jaxmem.planner.decisions import AT_ONCE, IN_FLIGHT, InFlight
from jaxmem.planner.fill import Solution
from jaxmem.program.ir import has_transfers
from jaxmem.runtime import describe, policed
from jaxmem.runtime.bench import Bench
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.host import MOST_SMALLEST, OnHost
from jaxmem.runtime.planned import Chosen
from jaxmem.runtime.progress import Report
from jaxmem.runtime.slack import Slack
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.compiling import Compiled, most_bytes
from jaxmem.targets.options import memory_schedules
from jaxmem.units import format_bytes

# Names of rounds.
FIRST_GUESS, TRIAL, WITH_HOST = "first guess", "smallest, scheduled for", "with host memory"
# As written (twice on a CPU and over GPUs), the smallest program (on a CPU once more with other
# options), searches, and what is left for the smallest programs, which are the same whatever the
# budget is: so the smallest budget that an error names is always reached.
_MOST_SEARCHES = 5
# Below this share of the budget a plan that still recomputes is worth another try.
_WELL_USED = 0.94
_AIM = 0.985
# A simple answer predicted to be this much over its room may still compile to less; so many of them
# are tried where they are quicker than what was found, by more than rounding.
_PERHAPS, _MOST_QUICKER, _SAME = 1.02, 3, 1e-6
# On paper this much quicker than the step as written is quicker on the device, too: so much of the
# step, and so many seconds, for launches of kernels are not on paper.
_CLEARLY, _FEWEST_SECONDS = 0.03, 1e-4
# Programs that are timed beside the step as written, and searches for them where it fits.
_MOST_TIMED = 4
_SEARCHES_BESIDE = 2
# Programs with values or leaves in host memory, where nothing fits without: so many compiles at
# least are left for them, the last MOST_SMALLEST for the smallest ones. The others are shared by
# what has its copies early, that with updates after all else where they can be early, and what has
# no copies on their way.
_FEWEST_WITH_HOST, _MOST_WITH_HOST = 1 + MOST_SMALLEST, 4
# No order of the same operations takes so many times fewer temporaries: seen were 2 times on CPUs.
_NO_ORDER = 4
# Workspaces of products are 32 MiB: of a step whose arguments and results take more than this
# about 3%.
_LARGE_BYTES = 2**30
# The compiler's temporaries over the predicted ones, from which on schedules settle more. A GPT
# whose GEMMs have workspaces and whose weights are copied is 4% off, and slower if they do.
_FAR_OFF = 1.1


def fit(
    compiler: Compiler,
    budget_bytes: int,
    report: Report,
    *,
    host_bytes: int | None = None,
    searches: int = _MOST_SEARCHES,
    start: Solution | None = None,
    spent: int = 0,
    bench: Bench | None = None,
) -> Outcome:
    """A program within the budget.

    Args:
        compiler: for the target.
        budget_bytes: bytes on each device.
        report: shows progress.
        host_bytes: host memory that plans may use to be faster; ``None`` lets them use it only
            where nothing fits without.
        searches: results of at most as many searches are compiled.
        start: a solution to compile before any search.
        spent: how many programs of the step were compiled elsewhere.
        bench: where the quickest programs that fit are timed; ``None`` goes by what is predicted.

    Raises:
        BudgetInfeasibleError: none was found.
    """
    compiler.budget_bytes = budget_bytes
    run = _Rounds(compiler, budget_bytes, report)
    run.searches, run.start = min(searches, _MOST_SEARCHES), start
    run.host_bytes, run.spent, run.bench = host_bytes, spent, bench
    return run.run()


class _Rounds(Slack):
    """One planning run for one budget."""

    searches: int = _MOST_SEARCHES
    start: Solution | None = None
    host_bytes: int | None = None
    bench: Bench | None = None

    def __init__(self, compiler: Compiler, budget: int, report: Report):
        super().__init__(compiler, budget, report)
        self.search = compiler.search

    @functools.cached_property
    def host(self) -> OnHost:
        """What may be in host memory."""
        return OnHost(self.compiler, self.host_bytes)

    def run(self) -> Outcome:
        # The same way whatever was planned before: a budget that was seen to work works again.
        self.search.unpin()
        self.search.settle_more(False)
        self.search.hosted, self.search.updates_last = frozenset(), False
        self.search.in_flight = IN_FLIGHT
        policed.check_offloads(self.compiler, self.host_bytes)
        if self.fixed > self.budget and self.compiler.program.is_counted:
            self._note_workspaces()
            self._in_host_memory()
            if not self.fitting:
                raise self._error(f"its arguments and results alone are {format_bytes(self.fixed)}")
            return self._outcome()
        plain = self._plain_within_budget()
        if plain.memory.total_bytes <= self.budget and self.search.ruled.allows_written:
            written = Chosen(None, plain, self.rounds[-1].predicted_bytes)
            if self.bench is not None:
                return self._beside(written)
            return self._quicker_than(written)
        self._note_trials()
        if self.start is not None:
            self.compile(FIRST_GUESS, self.start.temp_bytes, self.start)
        self._tighten()
        if not self.fitting:
            self._smallest_first()
        if not self.fitting:
            self._in_host_memory()
        if not self.fitting:
            raise self._error("")
        self._quicker_simple()
        self._quicker_with_host()
        return self._outcome()

    def _outcome(self) -> Outcome:
        self.sooner()
        self.overlap()
        self.loosen()
        if self.bench is None:
            self.untie(both=False)
            return self.outcome_of(self.best())
        self._try_simple()
        self.untie(both=True)
        return self._measured(self.bench, self._quickest())

    def _quicker_than(self, written: Chosen) -> Outcome:
        """The step as written, which fits, or what is clearly quicker on paper.

        That happens where loops copy what they keep into stacks: 16 scanned layers take 128 ms on
        an H200 as written, and 112 where matrix products are kept and the rest is made again. What
        is on paper for a CPU is too rough for that.
        """
        search = self.search
        loops = any(inner.pairs for inner in search.nest.walk())
        if self.compiler.target.platform != "gpu" or not loops or search.ruled.total:
            return self.outcome_of(written)
        limit = int((self.budget - self.fixed) / self.scale * _AIM)
        solution, least = search.solve(limit), search.keep_all.seconds
        gained = 0.0 if solution is None else least - solution.seconds
        enough = gained >= max(_CLEARLY * least, _FEWEST_SECONDS)
        if solution is None or not enough or self.compiler.deadline.ran_out:
            return self.outcome_of(written)
        self._try(solution, limit, "search")
        if not self.fitting:
            return self.outcome_of(written)
        self.overlap()
        self.untie(both=False)
        return self.outcome_of(self.best())

    def _beside(self, written: Chosen) -> Outcome:
        """The step as written, or what is quicker on the device."""
        assert self.bench is not None
        self._note_trials()
        self.searches = min(self.searches, _SEARCHES_BESIDE)
        self._tighten()
        self._try_simple()
        if self.fitting:
            self.untie(both=True)
        return self._measured(self.bench, [written, *self._quickest()])

    def _quicker_simple(self) -> None:
        """Searches aim below the budget: a simple answer that fills it may be quicker."""
        # That searches compiled to more says little about these, and they are followed as they are.
        scale = min(self.scale, self.unscaled)
        limit = int((self.budget - self.fixed) / scale * _PERHAPS)
        self.search.settle_more(False)
        for solution in self.search.simple(limit)[:_MOST_QUICKER]:
            least = min(chosen.cost[0] for chosen in self.fitting)
            if solution.seconds < least * (1 - _SAME):
                self._try(solution, limit)

    def _try_simple(self) -> None:
        """Compile simple answers that fit on paper, until there are enough programs to time."""
        limit = int((self.budget - self.fixed) / self.scale * _AIM)
        for solution in self.search.simple(limit):
            if len(self.fitting) < _MOST_TIMED:
                self._try(solution, limit)

    def _try(self, solution: Solution, limit: int, name: str = "") -> None:
        """Compile a solution, if that was not done and a compile is left."""
        if self.left() > 0 and solution.key not in self.tried:
            self.announce(solution)
            self.compile(name or solution.solver, limit, solution)

    def _quickest(self) -> list[Chosen]:
        return sorted(self.fitting, key=lambda chosen: chosen.cost)[:_MOST_TIMED]

    def _measured(self, bench: Bench, programs: Sequence[Chosen]) -> Outcome:
        """The program of which a step takes least time on the device; the first of equals."""
        self.report(f"timing {len(programs)} programs on {self.compiler.target.name}")
        hostings = [self.compiler.hosting(chosen.solution) for chosen in programs]
        taken = bench.medians(self.compiler.program, programs, hostings)
        for chosen, seconds in zip(programs, taken, strict=True):
            number = self.noted[id(chosen.compiled)]
            self.rounds[number] = replace(self.rounds[number], measured_seconds=seconds)
        least = min(taken)
        at = taken.index(least)
        winner, exposed = programs[at], None
        if has_transfers(self.compiler.block(winner.solution)):
            exposed = bench.exposed_seconds(self.compiler.program, winner, hostings[at])
        return self.outcome_of(
            replace(winner, measured_seconds=least, measured_exposed_seconds=exposed)
        )

    def _note_workspaces(self) -> None:
        """Of a step that is so small that what its kernels work in shows, read it as written."""
        if self.compiler.laid_out.wanted and self.fixed < _LARGE_BYTES:
            self._plain_within_budget()

    def _plain_within_budget(self) -> Compiled:
        """The step as written; scheduled for memory where that is a choice and it needs it."""
        self.report("compiling the step as written")
        plain = self.compiler.keep_all()
        self.fixed = plain.memory.total_bytes - plain.memory.temp_bytes
        self.scale = self.unscaled = self.closer = self.compiler.scale
        predicted = self.fixed + int(self.compiler.written_temp_bytes * self.scale)
        self.compiler.laid_out.learn(plain)
        ruled_out = "" if self.search.ruled.allows_written else policed.NOT_AS_WRITTEN
        self.note("keep-all", predicted, predicted, plain, ruled_out)
        options = self.compiler.least_options()
        over = plain.memory.total_bytes > self.budget
        far_over = plain.memory.temp_bytes > _NO_ORDER * (self.budget - self.fixed)
        if over and not far_over and options and not ruled_out:
            plain = self.compiler.compile(None, options=options)
            self.note("keep-all, scheduled for memory", predicted, predicted, plain)
        return plain

    def _note_trials(self) -> None:
        """On a CPU, which order of operations makes least of the smallest program."""
        if len(memory_schedules(self.compiler.target)) > 1:
            self.report("compiling the smallest program in two orders")
        for options, compiled in self.compiler.trials:
            order = "memory" if options == memory_schedules(self.compiler.target)[-1] else "speed"
            predicted = self.predicted(self.search.smallest())
            self.note(f"{TRIAL} {order}", predicted, predicted, compiled)
            self.trialled[id(compiled)] = len(self.rounds) - 1
        if trials := [compiled.memory.temp_bytes for _, compiled in self.compiler.trials]:
            whole = self.search.keep_all.temp_bytes
            least, as_written = self.search.smallest().temp_bytes, int(whole * self.scale)
            if least < whole and min(trials) <= as_written:
                self.ends = ((least, min(trials)), (whole, as_written))

    def _tighten(self) -> None:
        """Solve for a simulated limit; move the limit by what the compiler says."""
        room = self.budget - self.fixed
        # One of a CPU's two trials is among the smallest programs.
        reserved = self.compiler.most_smallest - bool(self.compiler.trials)
        if self.host.allowed:
            reserved += _FEWEST_WITH_HOST
        self.reserved = reserved
        limit, fits, too_much = int(room / self.scale * _AIM), 0, 0
        for _ in range(self.searches):
            solution = self.search.solve(limit, self.host_bytes or 0)
            if solution is None or solution.key in self.tried or self._ends_with(solution):
                return
            self.announce(solution)
            predicted = self.predicted(solution)
            attempt = self.compile("search", limit, solution)
            if attempt is None:
                limit = int(min(limit, solution.temp_bytes) * _AIM)
                continue  # Another one may compile.
            memory = attempt.compiled.memory
            used, fitted = memory.temp_bytes, memory.total_bytes <= self.budget
            if fitted and attempt.problem:
                continue  # What was undone is kept from now on: the same limit, another plan.
            if fitted:
                if used >= _WELL_USED * room or len(self.fitting) > 2:
                    return
                fits = max(limit, solution.temp_bytes)
                limit = int(fits * room / max(used, 1) * _AIM)
            elif not self.fitting and self._not_followed(used, predicted):
                # XLA did not follow the schedule: put off what it made element-wise work wait for.
                self.search.settle_more(True)
                self.forget()
                limit = int(room / self.scale * _AIM)
            else:
                too_much = min(limit, solution.temp_bytes)
                limit = int(too_much * room / max(used, 1) * _AIM)
            if fits and too_much and not fits < limit < too_much:
                limit = (fits + too_much) // 2

    def _ends_with(self, solution: Solution) -> bool:
        """Whether a search is over: no compiles are left for it, or its result is of no use."""
        if not self.fitting:
            return self.left() <= self.reserved
        # More room is of no use; on a CPU one more compile predicts better.
        on_gpu = self.compiler.target.platform == "gpu"
        return on_gpu and solution.seconds >= self.best().cost[0]

    def _smallest_first(self) -> None:
        """The schedules with the smallest peaks, until one fits."""
        self.report("compiling the smallest programs")
        for attempt in self.compiler.smallest(self.attempted_least):
            self.record("smallest", attempt.solution.temp_bytes, attempt)
            if self.fitting:
                return

    def _in_host_memory(self) -> None:
        """What fits in no other way: values, then an optimizer's moments, go to the host."""
        host = self.host
        if not host.allowed:
            return
        self.report("looking for what host memory makes possible")
        with self.search.afresh():
            sets = self.host.sets(self.budget)
            hosted = [leaves for leaves in sets if leaves]
            either = any(map(host.updates_early, sets[-1:]))
            last = [(hosted, True, IN_FLIGHT)] if either else []
            ways = [(sets, False, IN_FLIGHT), *last, (sets, False, AT_ONCE)]
            most = _MOST_WITH_HOST
            for number, (some, updates_last, in_flight) in enumerate(ways):
                share, before = -(-most // (len(ways) - number)), len(self.rounds)
                self._fewest_in_host_memory(some, share, updates_last, in_flight)
                most -= min(share, len(self.rounds) - before)
                if self.fitting:
                    break
        self.reserved = 0
        if self.fitting:
            return
        # Paper may say too much of them; an error would name one of these.
        named = host.smallest()
        for done, smallest in enumerate(named, 1):
            self.reserved = len(named) - done
            self.forget()
            if not self.fitting and smallest.key not in self.tried and self.left() > 0:
                self._attempt_with_host(smallest)

    def _fewest_in_host_memory(
        self,
        sets: Sequence[frozenset[int]],
        most: int,
        updates_last: bool,
        in_flight: InFlight,
    ) -> None:
        """The fewest leaves with which something fits on paper, until one compiles to that."""
        first = 0
        # What other programs compiled to says little about one with transfers.
        self.forget()
        # The last compiles are for what an error names: the smallest programs there are.
        self.reserved = MOST_SMALLEST
        for _ in range(most):
            if self.left() <= self.reserved:
                break
            how = {"updates_last": updates_last, "in_flight": in_flight}
            found = self.host.fewest(sets[first:], self._room, self.tried, **how)
            if found is None:
                break
            skipped, solution = found
            first += skipped
            self._attempt_with_host(solution)
            if self.fitting:
                return

    def _quicker_with_host(self) -> None:
        """With host memory allowed, state that waits there may leave room for fewer repetitions."""
        if not self.host_bytes or not self.host.allowed or not self.fitting:
            return
        quickest = self.host.quickest(self.budget, self._room, self.tried)
        least = min(chosen.cost for chosen in self.fitting)
        if quickest is not None and quickest.cost < least and self.left() > 0:
            self._attempt_with_host(quickest)

    def _room(self, away: int) -> int:
        """Predicted temporaries that fit beside what is left with so many bytes away."""
        return int((self.budget - self.fixed + away) / self.scale * _AIM)

    def _attempt_with_host(self, solution: Solution) -> None:
        self.announce(solution)
        hosted = self.compiler.program.host_bytes(self.compiler.hosting(solution))
        self.compile(WITH_HOST, self.budget - self.fixed + hosted, solution)

    def _smallest_with_host(self) -> list[tuple[int, Solution | None]]:
        """What the smallest programs with as much as possible in host memory compile to."""
        smallest = self.host.smallest() if self.host.allowed else []
        attempts = []
        for solution in smallest:
            with self.unless_xla_fails(f"a program ({WITH_HOST})"):
                attempts.append(self.compiler.attempt_least(solution))
        return [(a.compiled.memory.total_bytes, a.solution) for a in attempts if not a.problem]

    def _not_followed(self, used: int, predicted: int) -> bool:
        """Whether XLA:GPU made far more of a schedule than was predicted, for the first time."""
        far_off = used > _FAR_OFF * (predicted - self.fixed)
        return far_off and self.compiler.target.platform == "gpu" and not self.search.cautious

    def _error(self, reason: str) -> JaxmemError:
        """Names the smallest program that keeps its plan: a budget of its bytes leads to it."""
        compiler = self.compiler
        if self.search.choices:
            self.report("compiling the smallest programs, to name a budget that works")
        least = compiler.least(self.attempted_least)
        if not (least.kept or least.undone):
            least = compiler.least()  # That XLA compiles none is for XLA to say.
        if not least.kept:
            return policed.undone(compiler, least.undone[0][1])
        found = [*least.kept, *self._smallest_with_host()]
        smallest, solution = min(found, key=lambda f: f[0])
        for total, problem in least.undone:
            if total < smallest and not reason:
                reason = f"{format_bytes(total)} would be possible, but {problem}"
        if compiler.deadline.ran_out and not reason:
            limit = compiler.deadline.seconds
            reason = f"the time limit of {limit:g} s ended the search: a longer one may find less"
        reason = "; ".join([*filter(None, [reason]), *self.said])
        block = compiler.block(solution)
        simulation = self.search.simulator.step(block)
        holders = describe.holders(compiler.program, self.search.nest, block, simulation)
        message = describe.infeasible(
            compiler.program,
            compiler.target.name,
            self.budget,
            smallest,
            holders,
            reason,
            device_bytes=most_bytes(compiler.target),
            recomputed=solution is not None,
        )
        error = BudgetInfeasibleError(
            message, budget_bytes=self.budget, smallest_bytes=smallest, holders=holders
        )
        return error if compiler.policy is None else policed.infeasible(compiler, error, reason)
