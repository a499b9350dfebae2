"""Find what to keep so that the step fits a number of temporary bytes and recomputes least.

Several proposals are made and the fastest that fits is taken: the simple answers (blocks recomputed
whole, what JAX's own policies save), greedy filling from there, and the solvers of
:mod:`jaxmem.planner.solvers` on the line of kernels. While they search, a program that is one
straight line is played through kernel by kernel (:mod:`jaxmem.planner.fused`); what they propose is
then written out and simulated as it would be emitted, and only that counts.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jaxmem.planner.candidates import TurnChoices, choices, stock_keeps
from jaxmem.planner.facts import kept_name
from jaxmem.planner.fill import Filler, KeptSets, Members, Solution
from jaxmem.planner.fused import FusedLine, fused_line
from jaxmem.planner.lines import LineSolver
from jaxmem.planner.offloading import Offloader
from jaxmem.planner.ruled import Ruled, ruled_by
from jaxmem.planner.schedule import Keep, Scheduler, Turn, is_nested
from jaxmem.planner.segments import Segments, segment_choices, splittable
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.solvers import milp
from jaxmem.policies import Policy
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Block, Op, Program
from jaxmem.program.loops import Nest, nest

__all__ = ["Search", "Solution"]

State = tuple[frozenset[str], frozenset[int], bool]
"""What is pinned, what is hosted, and whether to settle: what was found belongs to it."""

_NOTHING: Keep = {}
_WHOLE: Segments = {}

_MOST_STRIDE = 16
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
_ROOM_FOR_COPIES = 0.9
# Ways to keep the body of a loop that are looked at, from everything to nothing.
_WAYS_TO_KEEP_A_BODY = 10


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: schedules are many objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Search:
    """Searches one program; what it has simulated it remembers across limits.

    Attributes:
        line: the program as one line of kernels, if it has a single turn and that is not in a loop.
        pinned: names that are always kept.
        hosted: argument leaves that live in host memory, by their positions.
        settle: whether schedules write out more element-wise results early.
        ruled: what a policy decides; it holds in every solution that is found.
    """

    def __init__(
        self, program: Program, rates: Rates, *, host: bool = False, policy: Policy | None = None
    ):
        self.program = program
        self.nest: Nest = nest(program.block)
        self.simulator = Simulator(rates)
        self.scheduler = Scheduler(self.nest, host, self.simulator)
        self.keep_all = self.simulator.step(program.block)
        self.choices: tuple[TurnChoices, ...] = choices(self.nest, self.simulator)
        self.groups: dict[str, Members] = {}
        for choice in self.choices:
            for candidate in choice.candidates:
                self.groups.setdefault(candidate.group, []).append((choice.turn, candidate))
        self.ruled: Ruled = ruled_by(policy, self.nest, self.choices, program.name, host=host)
        for turn, candidate in self.ruled.extra:
            self.groups.setdefault(candidate.group, []).append((turn, candidate))
        self.line = self._line() if self.ruled.on_paper else None
        self.pinned: frozenset[str] = frozenset()
        self.hosted: frozenset[int] = frozenset()
        self.settle = self.cautious = False
        self._simulated: dict[frozenset, Solution] = {}
        self._bases: dict[State, list[Solution]] = {}
        self._smallest: dict[State, list[Solution]] = {}
        self._lines: dict[State, LineSolver] = {}
        self._segmented: dict[State, list[Solution]] = {}
        self._bodies: dict[Turn, list[frozenset[str]]] = {}

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
        return self.pinned, self.hosted, self.cautious

    def settle_more(self, wanted: bool) -> None:
        """From now on keep to what XLA follows closely, or not.

        Kept sets are then filled up from the simple ones, and more is written out early, of which
        XLA:CPU makes nothing better.
        """
        self.cautious, self.settle = wanted, wanted and not self.scheduler.host

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
            hosted: argument leaves that live in host memory, by their positions; besides those
                that do so anyway.
            segments: for the scan pairs that run in segments how many.
            solver: who proposed it.
        """
        keep = self._with_pinned(keep)
        offload = {t: names for t, names in self.ruled.offloaded(offload).items() if names}
        segments = {path: counts for path, counts in segments.items() if counts}
        asked = Solution(
            keep, 0, 0.0, solver, segments, offload, hosted | self.hosted, settle=self.settle
        )
        if asked.key not in self._simulated:
            ran = self.simulator.step(self.schedule(asked))
            self._simulated[asked.key] = replace(
                asked, temp_bytes=ran.temp_bytes, seconds=ran.seconds, host_bytes=ran.host_bytes
            )
        return replace(self._simulated[asked.key], keep=keep, solver=solver)

    def evaluated(self) -> list[Solution]:
        """Every schedule that was written out and simulated so far."""
        return list(self._simulated.values())

    def _with_pinned(self, keep: KeptSets) -> KeptSets:
        if self.pinned:
            keep = {turn: type(kept)(kept | self.pinned) for turn, kept in keep.items()}
        return self.ruled.applied(keep)

    def _on_paper(self, keep: KeptSets, offload: Keep = _NOTHING) -> Solution:
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
        )

    def bases(self) -> list[Solution]:
        """The simple answers, the smallest first; on paper where that is quicker."""
        if self._state not in self._bases:
            found = [replace(self._on_paper(k), solver=name) for name, k in self._base_keeps()]
            found.sort(key=lambda s: (s.temp_bytes, s.seconds))
            self._bases[self._state] = found
        return self._bases[self._state]

    def smallest(self) -> Solution:
        """The smallest of the simple answers, written out."""
        first = self.bases()[0]
        return self.evaluate(first.keep, solver=first.solver)

    def smallest_first(self) -> list[Solution]:
        """The schedules with the smallest peaks; the same ones whatever was solved before."""
        if not self.choices:
            return []
        if self._state not in self._smallest:
            nested = [*self._nested_smallest(), *self._in_segments()]
            found = [self.smallest(), *sorted(nested, key=lambda s: s.temp_bytes)[:_MOST_NESTED]]
            least = found[0].temp_bytes
            found += [s for s in (self.solve(int(least * near)) for near in _NEAR_SMALLEST) if s]
            once = {s.key: s for s in found}
            ordered = sorted(once.values(), key=lambda s: (s.temp_bytes, s.seconds))
            self._smallest[self._state] = ordered
        return self._smallest[self._state]

    def _nested_smallest(self) -> list[Solution]:
        """What nested recomputation makes of a line when it may use as much time as it likes."""
        if self.line is None:
            return []
        keep = self._line_solver().smallest(self.smallest().temp_bytes)
        return [] if keep is None else [self.evaluate(keep, solver="chain DP")]

    def solve(self, limit_bytes: int, host_bytes: int = 0) -> Solution | None:
        """The fastest schedule within ``limit_bytes`` of temporaries; ``None`` if none fits.

        Args:
            limit_bytes: temporary bytes on the device.
            host_bytes: bytes of host memory that values may be moved to.
        """
        if limit_bytes <= 0:
            return None
        with _uncollected():
            best = self._solve(limit_bytes)
            if host_bytes and self.can_offload:
                best = self._with_host(best, limit_bytes, host_bytes)
            return best

    def _with_host(
        self, best: Solution | None, limit_bytes: int, host_bytes: int
    ) -> Solution | None:
        """``best``, or what is faster with values in host memory."""
        aim = limit_bytes
        for _ in range(_MOST_CORRECTIONS):
            proposal = self._propose_with_host(best, aim, host_bytes)
            if proposal is None or not proposal.offload:
                return best
            judged = self.evaluate(proposal.keep, proposal.offload, solver=proposal.solver)
            if judged.temp_bytes <= limit_bytes and judged.host_bytes <= host_bytes:
                return judged if best is None or judged.cost < best.cost else best
            aim = int(aim * _CLOSER * min(1.0, limit_bytes / max(judged.temp_bytes, 1)))
        return best

    def _propose_with_host(
        self, best: Solution | None, limit_bytes: int, host_bytes: int
    ) -> Solution | None:
        """The fastest on paper of a plan that offloads instead of recomputing, or of keeping."""
        offloader = Offloader(self.ruled.free(self.groups), self._on_paper, host_bytes)
        everything = {c.turn: frozenset(k.name for k in c.candidates) for c in self.choices}
        found = [offloader.instead_of_keeping(self._on_paper(everything), limit_bytes)]
        # What is on its way needs room: the second start leaves some.
        for start in (best, self._solve(int(limit_bytes * _ROOM_FOR_COPIES))):
            if start is not None and not start.segments and not is_nested(start.keep):
                paper = self._on_paper(start.keep)
                found.append(offloader.instead_of_recomputing(paper, limit_bytes))
        kept = [f for f in found if f is not None and f.temp_bytes <= limit_bytes]
        fastest = min(kept, key=_cost, default=None)
        return fastest and replace(fastest, solver="greedy offload")

    def _solve(self, limit_bytes: int) -> Solution | None:
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
            judged = self.evaluate(proposal.keep, solver=proposal.solver)
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
        others = [self.evaluate(s.keep, solver=s.solver) for s in nearly]
        if self.choices and limit_bytes < _TIGHT * self.smallest().temp_bytes:
            others += [*self._in_segments(), *self._nested_smallest()]
        found = [s for s in (best, *others) if s is not None and s.temp_bytes <= limit_bytes]
        return min(found, key=lambda s: s.cost, default=None)

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
        elif self.line is not None:
            starts = [*self._line_solver().starts(limit_bytes), *starts]
        else:
            starts = sorted([*starts, *self._body_starts(limit_bytes, starts)], key=_cost)[:3]
        if not starts:
            return None
        operations = self.line.problem.kernels if self.line else self.nest.block.ops
        most = max(_FEWEST_TRIALS, _MOST_WORK // max(1, len(operations)))
        filler = Filler(self.ruled.free(self.groups), self._on_paper, most)
        filled = filler.best(starts, limit_bytes, thorough=thorough)
        origin = {s.key: s.solver for s in starts}
        if filled.key in origin:
            return replace(filled, solver=origin[filled.key])
        return replace(filled, solver=f"{starts[0].solver} + greedy fill")

    def _line_solver(self) -> LineSolver:
        assert self.line is not None
        if self._state not in self._lines:
            turn = self.choices[0].turn
            self._lines[self._state] = LineSolver(self.line, turn, self._on_paper)
        return self._lines[self._state]

    def _body_starts(self, limit_bytes: int, simple: Sequence[Solution]) -> Iterator[Solution]:
        """For every loop body what is least to make again for what it keeps, the rest as it is."""
        for base in simple[:1]:
            best = base
            for choice in self.choices:
                for kept in self._ways_to_keep(choice.turn):
                    keep = {**best.keep, choice.turn: kept}
                    tried = self.evaluate(keep, solver="MILP per loop body")
                    if tried.temp_bytes <= limit_bytes and tried.cost < best.cost:
                        best = tried
            yield best

    def _ways_to_keep(self, turn: Turn) -> list[frozenset[str]]:
        """Kept sets of one loop body, by MILP."""
        if turn not in self._bodies:
            inner = next(n for n in self.nest.walk() if n.block.path == turn[0])
            ways: list[frozenset[str]] = []
            if inner.cut is not None and turn[1] == inner.cut:
                block = inner.block
                line = fused_line(
                    block, block.ops, turn[1], self.simulator, self.scheduler.repeatable
                )
                found = milp.kept_within(line.problem, frozenset(), _WAYS_TO_KEEP_A_BODY)
                ways = list(dict.fromkeys(line.kept(numbers) for numbers in found))
            self._bodies[turn] = ways
        return self._bodies[turn]

    def _in_segments(self) -> list[Solution]:
        """Nested recomputation of scans: each in segments, its body kept in every way known."""
        if self._state not in self._segmented:
            paths = splittable(self.nest)
            base = {c.turn: _valley_keep(c, 1, loops=True, tail=False) for c in self.choices}
            found = []
            for choice in self.choices:
                path = choice.turn[0]
                if path in paths:
                    for counts in self._segment_choices(path, paths[path]):
                        for kept in (frozenset[str](), *self._ways_to_keep(choice.turn)):
                            keep = {**base, choice.turn: kept}
                            found.append(
                                self.evaluate(
                                    keep, segments={path: counts}, solver="loops in segments"
                                )
                            )
            self._segmented[self._state] = found
        return self._segmented[self._state]

    def _segment_choices(self, path: str, length: int) -> tuple[tuple[int, ...], ...]:
        return segment_choices(length) if self.ruled.may_segment(path) else ()

    def _base_keeps(self) -> Iterator[tuple[str, KeptSets]]:
        if not self.choices:
            return
        if self.ruled.total:
            yield "policy", {c.turn: frozenset() for c in self.choices}
            return
        longest = max(len(c.valleys) for c in self.choices)
        strides = [1, 2, 3, 4, 6, 8, 12, _MOST_STRIDE]
        for stride in [s for s in strides if s == 1 or s <= longest] + [longest + 1]:
            for loops in (True, False):
                for tail in (True, False):
                    keep = {c.turn: _valley_keep(c, stride, loops, tail) for c in self.choices}
                    yield _BLOCKS, keep
        yield from stock_keeps(self.choices)


_BLOCKS = "recompute per block"


def _cost(solution: Solution) -> tuple[float, int]:
    return solution.cost


def _valley_keep(choice: TurnChoices, stride: int, loops: bool, tail: bool) -> frozenset[str]:
    """What is live in every ``stride``-th valley.

    With ``loops`` whole loops are kept too. With ``tail`` so is what is made after the last of
    these valleys: the backward pass starts there and would make it again at once.
    """
    chosen = range(stride - 1, len(choice.valleys), stride)
    names: set[str] = set().union(*(choice.valleys[v] for v in chosen))
    if tail and chosen:
        names |= choice.tails[chosen[-1]]
    return frozenset(names | choice.loops if loops else names - choice.loops)
