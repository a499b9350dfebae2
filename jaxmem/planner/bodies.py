"""Solve the bodies of loops: what an iteration keeps, and whether the loop runs in segments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from jaxmem.planner.candidates import TurnChoices
from jaxmem.planner.fill import Solution
from jaxmem.planner.fused import fused_line
from jaxmem.planner.ruled import Ruled
from jaxmem.planner.schedule import Scheduler, Turn
from jaxmem.planner.segments import segment_choices, splittable
from jaxmem.planner.simple import valley_keep
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.solvers import milp
from jaxmem.planner.solvers.answer import Clock
from jaxmem.program.loops import Nest

T = TypeVar("T")

# Ways to keep the body of a loop that are looked at, from everything to nothing.
_MOST_WAYS = 10
# How many other ways to cut several loops are looked at, give or take those of one step.
_MOST_AROUND = 64
_WHY_BODIES = "it is no single line: each loop body keeps what makes least to do again"
_WHY_SEGMENTS = "loops hold what they carry at few places, and make the rest again from there"


class BodySolver:
    """Proposes what the bodies of loops keep.

    Args:
        nest: the program.
        choices: its turns.
        simulator: gives seconds and working bytes of single operations.
        scheduler: says what may run again.
        ruled: what a policy decides.
        clock: when its time is over nothing more is proposed.
        evaluate: what a kept set needs, written out.
    """

    def __init__(
        self,
        nest: Nest,
        choices: Sequence[TurnChoices],
        simulator: Simulator,
        scheduler: Scheduler,
        ruled: Ruled,
        clock: Clock,
        evaluate: Callable[..., Solution],
    ):
        self.nest, self.choices, self.ruled = nest, choices, ruled
        self.simulator, self.scheduler = simulator, scheduler
        self.clock, self.evaluate = clock, evaluate
        self._ways: dict[Turn, list[frozenset[str]]] = {}

    def starts(self, limit_bytes: int, simple: Sequence[Solution]) -> Iterator[Solution]:
        """For every loop body what is least to make again for what it keeps, the rest as it is."""
        for base in simple[:1]:
            best = base
            for choice in self.choices:
                for kept in self._ways_to_keep(choice.turn):
                    if self.clock.over():
                        break
                    keep = {**best.keep, choice.turn: kept}
                    tried = self.evaluate(keep, solver="MILP per loop body")
                    if tried.temp_bytes <= limit_bytes and tried.cost < best.cost:
                        best = replace(tried, why=_WHY_BODIES)
            yield best

    def in_segments(self) -> list[Solution]:
        """Nested recomputation of scans, their bodies kept in every way known.

        Several together, and less and less of those: of two nets that take a step in turn, one in
        segments leaves as many bytes as the other needs. Of nested scans the outer ones, the inner
        ones, and both. Then each by itself.
        """
        paths = splittable(self.nest)
        turns = [
            choice.turn
            for choice in self.choices
            if choice.turn[0] in paths and self.ruled.may_segment(choice.turn[0])
        ]
        outer = tuple(t for t in turns if not any(_is_inside(t, other) for other in turns))
        inner = tuple(t for t in turns if not any(_is_inside(other, t) for other in turns))
        joint = dict.fromkeys([outer, inner, tuple(turns)])
        alone = dict.fromkeys((turn,) for turn in turns)
        found = [s for some in joint if len(some) > 1 for s in self._cut(some, paths)]
        found += self._around(found, paths)
        return found + [s for some in alone for s in self._cut(some, paths)]

    def _cut(self, turns: Sequence[Turn], lengths: Mapping[str, int]) -> list[Solution]:
        """These scans in segments: all coarse, then all finer, and with what each may keep."""
        counts = [segment_choices(lengths[path]) for path, _ in turns]
        ways = [(frozenset[str](), *self._ways_to_keep(turn)) for turn in turns]
        return self._evaluated(
            (dict(zip(turns, kept, strict=True)), dict(zip(turns, cut, strict=True)))
            for cut, kept in itertools.product(_in_step(counts), _in_step(ways))
        )

    def _around(self, joint: Sequence[Solution], lengths: Mapping[str, int]) -> list[Solution]:
        """The smallest of several in segments with one of them cut otherwise or whole, and on.

        With fewer of them in segments it is quicker and larger.
        """
        found: list[Solution] = []
        least = min(joint, key=lambda s: s.temp_bytes, default=None)
        while least is not None and len(least.segments) > 1 and len(found) < _MOST_AROUND:
            keep, segments = least.keep, least.segments
            turns = [choice.turn for choice in self.choices if choice.turn[0] in segments]
            now = {turn: segments[turn[0]] for turn in turns}
            others = (
                {**now, turn: cut}
                for turn in now
                for cut in ((), *segment_choices(lengths[turn[0]]))
                if cut != now[turn]
            )
            tried = self._evaluated(
                ({turn: keep[turn] for turn, cut in cuts.items() if cut}, cuts) for cuts in others
            )
            found += tried
            fewer = [s for s in tried if len(s.segments) < len(now)]
            least = min(fewer, key=lambda s: s.temp_bytes, default=None)
        return found

    def _evaluated(
        self, cut: Iterable[tuple[dict[Turn, frozenset[str]], dict[Turn, tuple[int, ...]]]]
    ) -> list[Solution]:
        """Solutions, by what bodies keep and the segments they run in; the rest keeps little."""
        base = {c.turn: valley_keep(c, 1, loops=True, tail=False) for c in self.choices}
        found = []
        for kept, counts in cut:
            if self.clock.over():
                break
            segments = {path: n for (path, _), n in counts.items()}
            solved = self.evaluate({**base, **kept}, segments=segments, solver="loops in segments")
            found.append(replace(solved, why=_WHY_SEGMENTS))
        return found

    def _ways_to_keep(self, turn: Turn) -> list[frozenset[str]]:
        """Kept sets of one loop body, by MILP."""
        if turn not in self._ways:
            inner = next(n for n in self.nest.walk() if n.block.path == turn[0])
            ways: list[frozenset[str]] = []
            if inner.cut is not None and turn[1] == inner.cut and not self.clock.over():
                block = inner.block
                line = fused_line(
                    block, block.ops, turn[1], self.simulator, self.scheduler.repeatable
                )
                found = milp.kept_within(line.problem, frozenset(), _MOST_WAYS, self.clock)
                ways = list(dict.fromkeys(line.kept(numbers) for numbers in found))
            self._ways[turn] = ways
        return self._ways[turn]


def _in_step(each: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """The first of each, the second of each and so on; what has no more gives its last again."""
    for at in range(max(map(len, each))):
        yield tuple(some[min(at, len(some) - 1)] for some in each)


def _is_inside(turn: Turn, other: Turn) -> bool:
    return turn[0].startswith(f"{other[0]}/")
