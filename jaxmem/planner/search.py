"""Find what to keep so that the step fits a number of temporary bytes and recomputes least.

Several proposals are made and the fastest that fits is taken: the simple answers (blocks recomputed
whole, what JAX's own policies save), greedy filling from there, and the solvers of
:mod:`jaxmem.planner.solvers` on the line of kernels. While they search, a program that is one
straight line is played through kernel by kernel (:mod:`jaxmem.planner.fused`); what they propose is
then written out and simulated as it would be emitted, and only that counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from jaxmem.planner.bodies import BodySolver
from jaxmem.planner.candidates import TurnChoices, carried, choices
from jaxmem.planner.deadline import Deadline
from jaxmem.planner.decisions import IN_FLIGHT, InFlight
from jaxmem.planner.facts import kept_name
from jaxmem.planner.fill import Filler, KeptSets, Members, Solution
from jaxmem.planner.fused import FusedLine, fused_line
from jaxmem.planner.lines import LineSolver
from jaxmem.planner.ruled import Ruled, ruled_by
from jaxmem.planner.schedule import Keep, Scheduler
from jaxmem.planner.segments import Segments
from jaxmem.planner.simple import WHY, base_keeps
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.uncollected import uncollected
from jaxmem.planner.withhost import WithHost
from jaxmem.policies import Policy
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Block, Op, Program
from jaxmem.program.loops import Nest, nest

__all__ = ["Search", "Solution"]

State = tuple[frozenset[str], frozenset[int], bool, bool, InFlight]
"""What is pinned and hosted, whether to settle and to update last, how many copies are in flight:
what was found belongs to it."""

_NOTHING: Keep = {}
_WHOLE: Segments = {}

# How long a search goes on, in simulated operations rather than seconds: the same program must
# give the same plan on a slow machine. A million take about 7 seconds; with 700,000 instead, the
# plans of two GPTs of 5,000 operations became 0.03% faster at most (70, 50, 35 and 25%).
_MOST_WORK = 400_000
_FEWEST_TRIALS = 60
# The compiler may make less of a program that the simulator thinks larger: of an Equinox MLP,
# XLA:CPU makes 28 MiB of the smallest schedule and 22 of one that should be twice as large.
_NEAR_SMALLEST = (1.0, 1.1, 1.35, 1.7, 2.0)
# How often a limit is moved until what is written out fits what was proposed on paper.
_MOST_CORRECTIONS = 6
_CLOSER = 0.99
_NEARLY = 1.1
_MOST_SIMPLE = 6
_WELL_USED = 0.98
# Below this many times the smallest peak without nesting, nested recomputation is looked at.
_TIGHT = 1.5
_MOST_NESTED = 2
# Relative: up to this the seconds of a line and of the program written out are the same.
_SAME = 1e-6
_COST = attrgetter("cost")


class Search:
    """Searches one program; what it has simulated it remembers across limits.

    Attributes:
        line: the program as one line of kernels, if it has a single turn and that is not in a loop.
        groups: values that may be kept, by the name of what is decided together.
        carried: what loops hand from iteration to iteration, which may only wait in host memory.
        pinned: names that are always kept.
        hosted: argument leaves that live in host memory, by their positions.
        settle: whether schedules write out more element-wise results early.
        updates_last: whether hosted leaves are updated after all else.
        in_flight: how many of the largest copies to the host, and back, may be on the way.
        ruled: what a policy decides; it holds in every solution that is found.
        deadline: when its time is over, only the simple answers are found.
    """

    def __init__(
        self,
        program: Program,
        rates: Rates,
        *,
        host: bool = False,
        policy: Policy | None = None,
        deadline: Deadline | None = None,
    ):
        self.program = program
        self.deadline = deadline or Deadline(math.inf)
        self.nest: Nest = nest(program.block)
        self.simulator = Simulator(rates)
        self.scheduler = Scheduler(self.nest, host, self.simulator, alone=not program.sharded)
        self.keep_all = self.simulator.step(program.block)
        self.choices: tuple[TurnChoices, ...] = choices(self.nest, self.simulator)
        self.groups: dict[str, Members] = {}
        for choice in self.choices:
            for candidate in choice.candidates:
                self.groups.setdefault(candidate.group, []).append((choice.turn, candidate))
        self.ruled: Ruled = ruled_by(policy, self.nest, self.choices, program.name, host=host)
        for turn, candidate in self.ruled.extra:
            self.groups.setdefault(candidate.group, []).append((turn, candidate))
        self.carried: dict[str, Members] = carried(self.nest, self.choices)
        self.line = self._line() if self.ruled.on_paper else None
        self.bodies = BodySolver(
            self.nest,
            self.choices,
            self.simulator,
            self.scheduler,
            self.ruled,
            self.deadline,
            self.evaluate,
        )
        self.pinned: frozenset[str] = frozenset()
        self.hosted: frozenset[int] = frozenset()
        self.updates_last, self.in_flight = False, IN_FLIGHT
        self.settle = self.cautious = False
        self._simulated: dict[frozenset, Solution] = {}
        self._bases: dict[State, list[Solution]] = {}
        self._smallest: dict[State, list[Solution]] = {}
        self._line_solver: LineSolver | None = None
        self._segmented: dict[State, list[Solution]] = {}

    def _line(self) -> FusedLine | None:
        if len(self.choices) != 1 or self.choices[0].turn[0]:
            return None
        block, (_, turn) = self.program.block, self.choices[0].turn
        rates = self.simulator.rates
        return fused_line(
            block,
            block.ops,
            turn,
            self.simulator,
            self.scheduler.repeatable,
            d2h_bytes_per_second=rates.d2h_bytes_per_second,
            h2d_bytes_per_second=rates.h2d_bytes_per_second,
        )

    @property
    def can_offload(self) -> bool:
        """Whether there is a host to move things to: not on a CPU, whose memory is the host's."""
        return self.simulator.rates.d2h_bytes_per_second > 0 and not self.scheduler.host

    def pin(self, ops: Iterable[Op]) -> None:
        """Keep the results of ``ops`` from now on: the compiler does so whatever the plan says."""
        self.pinned |= {kept_name(op, value) for op in ops for value in op.outputs}

    @property
    def _state(self) -> State:
        return self.pinned, self.hosted, self.cautious, self.updates_last, self.in_flight

    def settle_more(self, wanted: bool) -> None:
        """From now on keep to what XLA follows closely, or not.

        Kept sets are then filled up from the simple ones, and more is written out early, of which
        XLA:CPU makes nothing better.
        """
        self.cautious, self.settle = wanted, wanted and not self.scheduler.host

    @contextlib.contextmanager
    def afresh(self) -> Iterator[None]:
        """Search as if nothing had been compiled yet, and then go on from where it was."""
        pinned, cautious = self.pinned, self.cautious
        self.unpin()
        self.settle_more(False)
        try:
            yield
        finally:
            self.pinned = pinned
            self.settle_more(cautious)

    @contextlib.contextmanager
    def hosting(
        self, hosted: frozenset[int], *, updates_last: bool, in_flight: InFlight = IN_FLIGHT
    ) -> Iterator[None]:
        """Search with these leaves in host memory meanwhile, updated when ready or last."""
        before = self.hosted, self.updates_last, self.in_flight
        self.hosted, self.updates_last, self.in_flight = hosted, updates_last, in_flight
        try:
            yield
        finally:
            self.hosted, self.updates_last, self.in_flight = before

    def unpin(self) -> None:
        """Forget what was pinned: what is found next depends on nothing that came before."""
        self.pinned = frozenset()

    def evaluate(
        self,
        keep: KeptSets,
        offload: Keep = _NOTHING,
        hosted: frozenset[int] = frozenset(),
        *,
        segments: Segments = _WHOLE,
        solver: str = "",
    ) -> Solution:
        """The schedule of a kept set, written out and simulated.

        Args:
            keep: for each turn the names kept across it.
            offload: those of them that cross it in host memory.
            hosted: argument leaves that live in host memory besides those that do so anyway.
            segments: for the scan pairs that run in segments how many.
            solver: who proposed it.
        """
        keep = self._with_pinned(keep)
        offload = {t: names for t, names in self.ruled.offloaded(offload).items() if names}
        segments = {path: counts for path, counts in segments.items() if counts}
        here = solver, segments, offload, hosted | self.hosted
        last = self.updates_last and self.scheduler.updates_early(self.program.hosting(here[-1]))
        asked = Solution(keep, 0, 0.0, *here, settle=self.settle, updates_last=last)
        if asked.hosted or offload:
            asked = replace(asked, in_flight=self.in_flight)
        if asked.key not in self._simulated:
            ran = self.simulator.step(self.schedule(asked))
            self._simulated[asked.key] = replace(
                asked, temp_bytes=ran.temp_bytes, seconds=ran.seconds, host_bytes=ran.host_bytes
            )
        return replace(self._simulated[asked.key], keep=keep, solver=solver)

    def judged(self, proposal: Solution) -> Solution:
        """A proposal written out and simulated; who made it and why stays with it.

        Its bound is a claim about the line of kernels: it stays only where the written-out
        program takes the seconds that the line said, and no fewer than the bound.
        """
        found = self.evaluate(proposal.keep, proposal.offload, solver=proposal.solver)
        bound = proposal.bound_seconds
        off = abs(found.seconds - proposal.seconds)
        if bound is not None and (
            off > _SAME * proposal.seconds or found.seconds < bound * (1 - _SAME)
        ):
            bound = None
        return replace(found, why=proposal.why, bound_seconds=bound)

    def evaluated(self) -> list[Solution]:
        """Every schedule that was written out and simulated so far."""
        return list(self._simulated.values())

    def _with_pinned(self, keep: KeptSets) -> KeptSets:
        if self.pinned:
            keep = {turn: type(kept)(kept | self.pinned) for turn, kept in keep.items()}
        return self.ruled.applied(keep)

    def on_paper(self, keep: KeptSets, offload: Keep = _NOTHING) -> Solution:
        """What a kept set needs, as quickly as that can be known."""
        if self.line is None:
            return self.evaluate(keep, offload)
        keep = self._with_pinned(keep)
        run = self.line.run(keep, offload)
        return Solution(
            keep, run.peak_bytes, run.seconds, offload=offload, host_bytes=run.host_bytes
        )

    def schedule(self, solution: Solution) -> Block:
        """The program of a solution, written out."""
        hosting = self.program.hosting(solution.hosted)
        return self.scheduler.schedule(
            solution.keep,
            solution.offload,
            hosting,
            segments=solution.segments,
            settle=solution.settle,
            updates_last=solution.updates_last,
            slack_seconds=solution.slack_seconds,
            in_flight=solution.in_flight,
            in_order=solution.in_order,
        )

    def bases(self) -> list[Solution]:
        """The simple answers, the smallest first; on paper where that is quicker."""
        if self._state not in self._bases:
            with self.deadline.running():
                found = [
                    replace(self.on_paper(keep), solver=name, why=why)
                    for name, keep, why in base_keeps(self.choices, total=self.ruled.total)
                ]
            found.sort(key=lambda s: (s.temp_bytes, s.seconds))
            self._bases[self._state] = found
        return self._bases[self._state]

    def smallest(self) -> Solution:
        """The smallest of the simple answers, written out."""
        return self.judged(self.bases()[0])

    def smallest_first(self) -> list[Solution]:
        """The schedules with the smallest peaks; the same ones whatever was solved before."""
        if not self.choices:
            return []
        if self._state in self._smallest:
            return self._smallest[self._state]
        with self.deadline.running():
            found = self._simply_smallest()
            least = found[0].temp_bytes
            found += [s for s in (self.solve(int(least * near)) for near in _NEAR_SMALLEST) if s]
            once = {s.key: s for s in found}
            ordered = sorted(once.values(), key=lambda s: (s.temp_bytes, s.seconds))
        self._smallest[self._state] = ordered
        return ordered

    def least(self) -> list[Solution]:
        """Those of them that are known without filling anything, the smallest first.

        What is filled within its bytes is smaller on paper at times, and was larger where it was
        compiled: 17.3 MiB and not 15.7 for a small GPT over two H200.
        """
        if not self.choices:
            return []
        with self.deadline.running():
            return sorted(self._simply_smallest(), key=lambda s: (s.temp_bytes, s.seconds))

    def _simply_smallest(self) -> list[Solution]:
        """The smallest of the simple answers, and the smallest of nested ones."""
        nested = [*self._nested_smallest(), *self._in_segments()]
        return [self.smallest(), *sorted(nested, key=lambda s: s.temp_bytes)[:_MOST_NESTED]]

    def _nested_smallest(self) -> list[Solution]:
        """What nested recomputation makes of a line when it may use as much time as it likes."""
        if self.line is None or self.deadline.over():
            return []
        keep = self.line_solver().smallest(self.smallest().temp_bytes)
        if keep is None:
            return []
        found = self.evaluate(keep, solver="chain DP")
        return [replace(found, why="the least memory that recomputing a chain in levels takes")]

    def solve(self, limit_bytes: int, host_bytes: int = 0) -> Solution | None:
        """The fastest schedule within ``limit_bytes`` of temporaries; ``None`` if none fits.

        Args:
            limit_bytes: temporary bytes on the device.
            host_bytes: bytes of host memory that values may be moved to.
        """
        if limit_bytes <= 0:
            return None
        with uncollected(), self.deadline.running():
            best = self.within(limit_bytes)
            if host_bytes and self.can_offload:
                best = WithHost(self, limit_bytes, host_bytes).quicker_than(best)
                # The bound is that of plans that offload nothing.
                best = best and replace(best, bound_seconds=None)
            return best

    def within(self, limit_bytes: int) -> Solution | None:
        """Propose, write out, and move the limit by what is then too much or too little."""
        if self.ruled.total:
            only = self.smallest() if self.choices else None
            return only if only is not None and only.temp_bytes <= limit_bytes else None
        best: Solution | None = None
        aim = limit_bytes
        for attempt in range(_MOST_CORRECTIONS):
            proposal = self._propose(aim, thorough=attempt == 0)
            if proposal is None:
                break
            judged = self.judged(proposal)
            if judged.temp_bytes <= limit_bytes:
                best = judged if best is None or judged.cost < best.cost else best
                if judged.temp_bytes >= _WELL_USED * limit_bytes or aim > limit_bytes:
                    break
                if self.line is None:
                    break
            elif best is not None:
                break
            # A little less than in proportion: what is written out does not follow that closely.
            closer = _CLOSER if judged.temp_bytes > limit_bytes else 1.0
            aim = int(aim * closer * limit_bytes / max(judged.temp_bytes, 1))
            if judged.temp_bytes > limit_bytes:
                aim = min(aim, proposal.temp_bytes - 1)
        # Paper may say too much: what is a little over there may fit when it is written out.
        nearly = self._simple_within(int(limit_bytes * _NEARLY), most=_MOST_SIMPLE)
        others = [self.judged(s) for s in nearly if best is None or s.seconds < best.seconds]
        if self.choices and limit_bytes < _TIGHT * self.smallest().temp_bytes:
            others += [*self._in_segments(), *self._nested_smallest()]
        found = [s for s in (best, *others) if s is not None and s.temp_bytes <= limit_bytes]
        return min(found, key=lambda s: s.cost, default=None)

    def simple(self, limit_bytes: int) -> list[Solution]:
        """Of each kind of simple answer the quickest that fits, written out; quickest first."""
        kinds: dict[str, Solution] = {}
        for base in self.bases():
            known = kinds.get(base.solver)
            if base.temp_bytes <= limit_bytes and (known is None or base.cost < known.cost):
                kinds[base.solver] = base
        written = {s.key: s for s in map(self.judged, kinds.values())}
        return sorted((s for s in written.values() if s.temp_bytes <= limit_bytes), key=_COST)

    def _simple_within(self, limit_bytes: int, most: int = 2) -> list[Solution]:
        """The fastest simple answers that fit on paper, and the smallest."""
        fitting = [s for s in self.bases() if s.temp_bytes <= limit_bytes]
        found = [*sorted(fitting, key=lambda s: s.cost)[:most], *fitting[:1]]
        return list({s.key: s for s in found}.values())

    def _propose(self, limit_bytes: int, *, thorough: bool) -> Solution | None:
        """The fastest kept set within ``limit_bytes`` on paper."""
        starts = self._simple_within(limit_bytes)
        if self.line is not None and self.cautious:
            starts = starts[:2]
        elif self.deadline.over():
            pass
        elif self.line is not None:
            starts = [*self.line_solver().starts(limit_bytes), *starts]
        else:
            starts = sorted([*starts, *self.bodies.starts(limit_bytes, starts)], key=_COST)[:3]
        if not starts:
            return None
        most = max(_FEWEST_TRIALS, _MOST_WORK // max(1, self._work))
        filler = Filler(self.ruled.free(self.groups), self.on_paper, most, self.deadline.over)
        filled = filler.best(starts, limit_bytes, thorough=thorough)
        origin = {s.key: s for s in starts}
        bound = max((s.bound_seconds for s in starts if s.bound_seconds is not None), default=None)
        if filled.key in origin:
            start, others = origin[filled.key], [s.solver for s in starts if s.why != WHY]
            why = start.why
            if why == WHY and others:
                why += f"; {' and '.join(others)} found nothing quicker"
            return replace(filled, solver=start.solver, why=why, bound_seconds=bound)
        return replace(
            filled,
            solver=f"{starts[0].solver} + greedy fill",
            why=f"{starts[0].why}; what room is left is filled up, dearest bytes first",
            bound_seconds=bound,
        )

    @functools.cached_property
    def _work(self) -> int:
        """Operations that are simulated for one kept set: those of loops, too."""
        if self.line is not None:
            return len(self.line.problem.kernels)
        return sum(len(inner.block.ops) for inner in self.nest.walk())

    def line_solver(self) -> LineSolver:
        assert self.line is not None
        if self._line_solver is None:
            # The line is the same whatever is pinned or hosted; `on_paper` looks at that itself.
            (on,) = self.choices
            self._line_solver = LineSolver(self.line, on.turn, self.on_paper, self.deadline)
        return self._line_solver

    def _in_segments(self) -> list[Solution]:
        """Nested recomputation of scans."""
        if self._state not in self._segmented:
            self._segmented[self._state] = self.bodies.in_segments()
        return self._segmented[self._state]
