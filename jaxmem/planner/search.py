"""Find what to keep so that the step fits a number of temporary bytes and recomputes least.

First the valleys: keep what is live between the blocks, recompute each block. If that fits,
values are kept one group of equal values at a time, the most recomputation saved per byte
first, as long as the simulator says the schedule still fits. Every step of the way is judged by
simulating the schedule as it would be emitted, never by a price per value.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from jaxmem.planner.candidates import Candidate, TurnChoices, choices
from jaxmem.planner.level import kept_name
from jaxmem.planner.schedule import Keep, Scheduler, Turn
from jaxmem.planner.simulate import Simulator
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Block, Op, Program
from jaxmem.program.loops import Nest, nest

_NOTHING: Keep = {}
Members = list[tuple[Turn, Candidate]]

_MOST_STRIDE = 16
# Groups that are tried one by one before filling.
_MOST_TRIED = 40
# How long a search goes on, in simulated operations rather than seconds: the same program must
# give the same plan on a slow machine. A million take about 7 seconds; with 700,000 instead, the
# plans of two GPTs of 5,000 operations became 0.03% faster at most (70, 50, 35 and 25%).
_MOST_WORK = 400_000
_FEWEST_TRIALS = 60
# The compiler may make less of a program that the simulator thinks larger: of an Equinox MLP,
# XLA:CPU makes 28 MiB of the smallest schedule and 22 of one that should be twice as large.
_NEAR_SMALLEST = (1.0, 1.1, 1.35, 1.7, 2.0)


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


@dataclass(frozen=True, eq=False)
class Solution:
    """A point of the search: what is kept, and what the simulator says of its schedule.

    Attributes:
        keep: for each turn the names kept across it.
        temp_bytes: predicted temporary bytes at the peak.
        seconds: predicted seconds of one step.
        offload: for each turn the names kept across it in host memory.
        hosted: argument leaves that live in host memory, by their positions.
        host_bytes: predicted temporary bytes in host memory.
    """

    keep: dict[Turn, frozenset[str]]
    temp_bytes: int
    seconds: float
    offload: Keep = field(default_factory=dict)
    hosted: frozenset[int] = frozenset()
    host_bytes: int = 0

    @property
    def key(self) -> frozenset:
        """Equal for equal kept, offloaded and hosted sets."""
        return _key(self.keep, self.offload, self.hosted)


class Search:
    """Searches one program; what it has simulated it remembers across limits."""

    def __init__(self, program: Program, rates: Rates, *, host: bool = False):
        self.program = program
        self.nest: Nest = nest(program.block)
        self.simulator = Simulator(rates)
        self.scheduler = Scheduler(self.nest, host, self.simulator)
        self.keep_all = self.simulator.step(program.block)
        self.choices: tuple[TurnChoices, ...] = choices(self.nest, self.simulator)
        self.groups: dict[str, list[tuple[Turn, Candidate]]] = {}
        for choice in self.choices:
            for candidate in choice.candidates:
                self.groups.setdefault(candidate.group, []).append((choice.turn, candidate))
        self.pinned: frozenset[str] = frozenset()
        self._simulated: dict[frozenset, Solution] = {}
        self._bases: dict[frozenset[str], list[Solution]] = {}
        self._smallest: dict[frozenset[str], list[Solution]] = {}
        self._tried: set[frozenset] = set()

    def pin(self, ops: Iterable[Op]) -> None:
        """Keep the results of ``ops`` from now on: the compiler does so whatever the plan says."""
        self.pinned |= {kept_name(op, value) for op in ops for value in op.outputs}

    def unpin(self) -> None:
        """Forget what was pinned: what is found next depends on nothing that came before."""
        self.pinned = frozenset()

    def evaluate(
        self,
        keep: dict[Turn, frozenset[str]],
        offload: Keep = _NOTHING,
        hosted: frozenset[int] = frozenset(),
    ) -> Solution:
        """The schedule of a kept set, simulated; parts of it may be in host memory."""
        if self.pinned:
            keep = {turn: kept | self.pinned for turn, kept in keep.items()}
        key = _key(keep, offload, hosted)
        self._tried.add(key)
        if key not in self._simulated:
            hosting = self.program.hosting(hosted)
            simulation = self.simulator.step(self.scheduler.schedule(keep, offload, hosting))
            self._simulated[key] = Solution(
                keep,
                simulation.temp_bytes,
                simulation.seconds,
                offload,
                hosted,
                simulation.host_bytes,
            )
        return self._simulated[key]

    def schedule(self, solution: Solution) -> Block:
        """The program of a solution, written out."""
        hosting = self.program.hosting(solution.hosted)
        return self.scheduler.schedule(solution.keep, solution.offload, hosting)

    def bases(self) -> list[Solution]:
        """Keep the valleys and nothing else, every one of them down to every sixteenth."""
        if self.pinned not in self._bases:
            found = [self.evaluate(keep) for keep in self._base_keeps()]
            found.sort(key=lambda s: (s.temp_bytes, s.seconds))
            self._bases[self.pinned] = found
        return self._bases[self.pinned]

    def smallest_first(self) -> list[Solution]:
        """The schedules with the smallest peaks; the same ones whatever was solved before."""
        if not self.choices:
            return []
        if self.pinned not in self._smallest:
            least = self.bases()[0].temp_bytes
            filled = [self.solve(int(least * near)) for near in _NEAR_SMALLEST]
            found = {s.key: s for s in (self.bases()[0], *filled) if s is not None}
            ordered = sorted(found.values(), key=lambda s: (s.temp_bytes, s.seconds))
            self._smallest[self.pinned] = ordered
        return self._smallest[self.pinned]

    def solve(self, limit_bytes: int) -> Solution | None:
        """The least recomputation within ``limit_bytes`` of temporaries; ``None`` if none fits."""
        with _uncollected():
            return self._solve(limit_bytes)

    def _solve(self, limit_bytes: int) -> Solution | None:
        fitting = [s for s in self.bases() if s.temp_bytes <= limit_bytes]
        if not fitting:
            return None
        # Counted anew for each limit, so that the answer is the same whatever was solved before.
        self._tried.clear()
        most = max(_FEWEST_TRIALS, _MOST_WORK // len(self.nest.block.ops))
        starts = sorted(fitting, key=lambda s: (s.seconds, s.temp_bytes))[:2]
        filled = [self._fill(start, limit_bytes) for start in starts]
        filled.append(self._fill(starts[0], limit_bytes, self._by_trial(starts[0])))
        best = min(filled, key=lambda s: (s.seconds, s.temp_bytes))
        return self._improve(best, limit_bytes, most)

    def _improve(self, best: Solution, limit_bytes: int, most: int) -> Solution:
        """Drop one group at a time and fill again, as long as that saves time."""
        for members in sorted(self.groups.values(), key=lambda m: -sum(c.nbytes for _, c in m)):
            if len(self._tried) >= most:
                break
            held = [(t, c) for t, c in members if c.name in best.keep[t]]
            dropped = self.evaluate(_without(best.keep, held)) if held else best
            if dropped is not best and dropped.temp_bytes <= limit_bytes:
                again = self._fill(dropped, limit_bytes)
                best = min(best, again, key=lambda s: (s.seconds, s.temp_bytes))
        return best

    def _base_keeps(self) -> Iterator[dict[Turn, frozenset[str]]]:
        if not self.choices:
            return
        longest = max(len(c.valleys) for c in self.choices)
        strides = [1, 2, 3, 4, 6, 8, 12, _MOST_STRIDE]
        for stride in [s for s in strides if s == 1 or s <= longest] + [longest + 1]:
            for loops in (True, False):
                for tail in (True, False):
                    yield {c.turn: _valley_keep(c, stride, loops, tail) for c in self.choices}
        yield {c.turn: frozenset(k.name for k in c.candidates) for c in self.choices}

    def _fill(
        self, start: Solution, limit_bytes: int, order: list[Members] | None = None
    ) -> Solution:
        """Keep more, group by group, as long as it fits."""
        best = start
        for _ in range(2):
            before = best
            for members in order or self._by_value(best):
                left = [(t, c) for t, c in members if c.name not in best.keep[t]]
                if left:
                    best = self._keep_more(best, left, limit_bytes)
            if best is before:
                break
        return best

    def _by_trial(self, solution: Solution) -> list[Members]:
        """Groups by what keeping one whole group saves in simulation, per byte it adds."""
        worth = []
        for left in self._by_value(solution)[:_MOST_TRIED]:
            tried = self.evaluate(_with(solution.keep, left))
            added = max(1, tried.temp_bytes - solution.temp_bytes)
            worth.append(((tried.seconds - solution.seconds) / added, left[0][1].name, left))
        return [left for _, _, left in sorted(worth, key=lambda item: item[:2])]

    def _by_value(self, solution: Solution) -> list[Members]:
        """Groups with values not yet kept, most seconds saved per byte first."""
        open_groups = []
        for members in self.groups.values():
            left = [(t, c) for t, c in members if c.name not in solution.keep[t]]
            if left:
                worth = sum(c.seconds for _, c in left) / max(1, sum(c.nbytes for _, c in left))
                open_groups.append((-worth, left[0][1].name, left))
        return [left for _, _, left in sorted(open_groups, key=lambda item: item[:2])]

    def _keep_more(
        self, best: Solution, members: list[tuple[Turn, Candidate]], limit_bytes: int
    ) -> Solution:
        """Keep as many of ``members`` as fit; the last ones first, they are freed soonest."""

        def attempt(count: int) -> Solution | None:
            tried = self.evaluate(_with(best.keep, members[len(members) - count :]))
            fits = tried.temp_bytes <= limit_bytes
            better = (tried.seconds, tried.temp_bytes) < (best.seconds, best.temp_bytes)
            return tried if fits and better else None

        each = sum(c.nbytes for _, c in members) // len(members)
        likely = (limit_bytes - best.temp_bytes) // max(1, each)
        return _most(attempt, len(members), likely) or best


def _key(keep: Keep, offload: Keep, hosted: frozenset[int]) -> frozenset:
    away = [("offload", turn, names) for turn, names in offload.items() if names]
    return frozenset([*keep.items(), *away, *(("hosted", n) for n in hosted)])


def _most(attempt: Callable[[int], Solution | None], count: int, likely: int) -> Solution | None:
    """The result for the largest number up to ``count`` that works, searched from a guess.

    What works for a number works for smaller ones, so the search gallops away from ``likely``
    and then bisects.
    """
    low, high, found = 0, count + 1, None
    probe, stride = min(max(likely, 1), count), 1
    while high - low > 1:
        result = attempt(probe)
        if result is None:
            high = probe
            probe = max(low + 1, probe - stride) if found is None else (low + high) // 2
        else:
            low, found = probe, result
            probe = min(high - 1, probe + stride) if high > count else (low + high) // 2
        stride *= 2
    return found


def _with(
    keep: dict[Turn, frozenset[str]], more: Iterable[tuple[Turn, Candidate]]
) -> dict[Turn, frozenset[str]]:
    added: dict[Turn, set[str]] = {}
    for turn, candidate in more:
        added.setdefault(turn, set()).add(candidate.name)
    return {t: kept | added[t] if t in added else kept for t, kept in keep.items()}


def _without(
    keep: dict[Turn, frozenset[str]], less: Iterable[tuple[Turn, Candidate]]
) -> dict[Turn, frozenset[str]]:
    gone: dict[Turn, set[str]] = {}
    for turn, candidate in less:
        gone.setdefault(turn, set()).add(candidate.name)
    return {t: kept - gone[t] if t in gone else kept for t, kept in keep.items()}


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
