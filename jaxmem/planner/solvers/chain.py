"""Chains of blocks by dynamic programming: every way to keep, drop, make again and keep anew.

A chain is what most networks are once they are cut where little is live: stages that each read
what the stage before handed over. The backward pass visits them from the last to the first. The
program of a segment of stages either keeps something of its first stage and goes on, or runs ahead
to a later stage, does what is behind it, and comes back to the first ones again: the recursion of
Revolve (Griewank and Walther 2000) and of Rotor (Beaumont et al. 2019), with several ways to keep a
stage. Nested recomputation, by the square root of the depth or on more levels, is what comes out
where memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Option(NamedTuple):
    """One way to keep a stage on the way forward.

    Attributes:
        kept_bytes: what stays in memory besides what is handed over.
        again_seconds: what its backward pass then makes again.
        working_bytes: the most bytes its backward pass needs beyond what is kept.
    """

    kept_bytes: int
    again_seconds: float
    working_bytes: int


@dataclass(frozen=True)
class Stage:
    """One block of a chain.

    Attributes:
        seconds: one run forward.
        handed_bytes: what it hands to the next stage.
        running_bytes: the most bytes one run forward needs beyond what it was handed.
        options: ways to keep it; the first one keeps nothing.
        passing_bytes: the most bytes one run forward needs with what it was handed, where that is
            not held; as many as ``running_bytes`` if a stage writes over what it was handed.
        behind_bytes: what the backward passes of later stages have left in memory when its own
            runs: the gradients of their weights, until these are updated.
        back_seconds: its backward pass, without what is made again.
        movable: pairs of options, of which the first keeps nothing or the second keeps most: what
            the second keeps and the first does not may wait in host memory.
    """

    seconds: float
    handed_bytes: int
    running_bytes: int
    options: tuple[Option, ...]
    passing_bytes: int = 0
    behind_bytes: int = 0
    back_seconds: float = 0.0
    movable: tuple[tuple[int, int], ...] = ()


class Visit(NamedTuple):
    """One stage's backward pass.

    Attributes:
        stage: which one.
        option: what of it was kept; 0 where everything is made again.
        held: for every stage whose handed-over values are in memory meanwhile, itself included.
        kept: stages further to the front of which something is kept, each with its option.
    """

    stage: int
    option: int
    held: frozenset[int]
    kept: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Solution:
    """The best program of a chain.

    Attributes:
        seconds: all runs forward together, the first one included.
        visits: the backward passes in order, last stage first.
        handed_away: stages of which what they hand on waits in host memory.
        kept_away: for stages of which a part of what is kept does, the option that stays.
    """

    seconds: float
    visits: tuple[Visit, ...]
    handed_away: frozenset[int] = frozenset()
    kept_away: Mapping[int, int] = field(default_factory=dict)


# What a segment begins with: keep its first stage, run ahead and come back, or end with one stage.
_KEEP, _RUN, _END = "keep", "run", "end"


class ChainTable:
    """The least forward work of every segment of a chain, for every amount of memory.

    Args:
        stages: the chain.
        slot_bytes: the unit in which memory is counted; sizes are rounded up to it.
        slots: how much memory there is, in that unit.
        over: says that there is no time left; the table is then not ``complete`` and knows nothing.

    Attributes:
        again: [stages, stages, slots + 1]: seconds of forward work to have done the backward passes
            of stages s..t when what is handed to s is there and all of them have to run again.
        first: [stages, slots + 1]: the same for the first way forward, from s to the end.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        slot_bytes: int,
        slots: int,
        over: Callable[[], bool] | None = None,
    ):
        self.stages, self.slot_bytes, self.slots = stages, slot_bytes, slots
        count = len(stages)
        self.forward = np.concatenate([[0.0], np.cumsum([s.seconds for s in stages])])
        self.handed = [self.slots_of(s.handed_bytes) for s in stages]
        self.running = [self.slots_of(s.running_bytes) for s in stages]
        self.passing = [
            max(running, self.slots_of(s.passing_bytes))
            for running, s in zip(self.running, stages, strict=True)
        ]
        self.behind = [self.slots_of(s.behind_bytes) for s in stages]
        self.again = np.full((count, count, slots + 1), np.inf)
        self.first = np.full((count, slots + 1), np.inf)
        # The same with what is handed to the segment taken from the memory.
        self._again_held, self._first_held = self.again.copy(), self.first.copy()
        self.complete = False
        for length in range(1, count + 1):
            if over is not None and over():
                return
            for s in range(count - length + 1):
                t = s + length - 1
                self.again[s, t] = self._least(s, t, first=False)
                self._again_held[s, t] = self.taking(self.again[s, t], self.handed[s - 1])
        for s in range(count - 1, -1, -1):
            self.first[s] = self._least(s, count - 1, first=True)
            self._first_held[s] = self.taking(self.first[s], self.handed[s - 1])
        self.complete = True

    def slots_of(self, nbytes: int) -> int:
        """How many slots that many bytes take; one more than there are if they are too many."""
        return min(-(-nbytes // self.slot_bytes), self.slots + 1)

    def taking(self, cost: np.ndarray, slots: int) -> np.ndarray:
        """A cost with that many slots taken by something else."""
        moved = np.full(self.slots + 1, np.inf)
        if slots <= self.slots:
            moved[slots:] = cost[: self.slots + 1 - slots]
        return moved

    def _least(self, s: int, t: int, first: bool) -> np.ndarray:
        costs = [cost for _, cost in self._kept(s, t, first)]
        if t - s >= 2:
            costs.append(self._ahead(s, t, first).min(axis=0))
        return np.min(costs, axis=0)

    def _kept(self, s: int, t: int, first: bool) -> Iterator[tuple[int, np.ndarray]]:
        """For each option of stage s the cost of keeping it so and going on to s+1."""
        stage, behind = self.stages[s], self.behind[s]
        running = self.running[s] + (0 if first else self.behind[t])
        for number, option in enumerate(stage.options):
            kept, need = self.slots_of(option.kept_bytes), self.slots_of(option.working_bytes)
            need += behind
            if s < t:
                after = self._first_held[s + 1] if first else self._again_held[s + 1, t]
                cost = self.taking(after, kept) + stage.seconds + option.again_seconds
                least = max(kept + need, running)
            elif first:
                cost = np.full(self.slots + 1, float(stage.seconds + option.again_seconds))
                least = max(kept + need, running)
            elif number == 0:
                cost, least = np.full(self.slots + 1, float(option.again_seconds)), need
            else:
                return
            cost[:least] = np.inf
            yield number, cost

    def _ahead(self, s: int, t: int, first: bool) -> np.ndarray:
        """[t - s - 1, slots + 1]: the cost of running ahead to stage s+2, s+3, ..., t."""
        after = self._first_held[s + 2 : t + 1] if first else self._again_held[s + 2 : t + 1, t]
        cost = after + self.again[s, s + 1 : t]
        cost = cost + (self.forward[s + 2 : t + 1] - self.forward[s])[:, None]
        running = self.running_ahead(s, t) + (0 if first else self.behind[t])
        cost[np.arange(self.slots + 1)[None, :] < running[:, None]] = np.inf
        return cost

    def running_ahead(self, s: int, t: int) -> np.ndarray:
        """[t - s - 1]: the slots that running from stage s ahead to s+2, s+3, ..., t takes."""
        return np.maximum.accumulate([self.running[s], *self.passing[s + 1 : t]])[1:]

    def seconds(self, slots: int | None = None) -> float:
        """The least forward work of the whole chain; infinite if there is too little memory."""
        return float(self.first[0, self.slots if slots is None else slots])

    def solution(self, slots: int | None = None) -> Solution | None:
        """The program that has it; ``None`` if there is too little memory."""
        slots = self.slots if slots is None else slots
        if not np.isfinite(self.first[0, slots]):
            return None
        visits = self.visits(0, len(self.stages) - 1, slots, True, frozenset(), ())
        return Solution(self.seconds(slots), tuple(visits))

    def visits(
        self,
        s: int,
        t: int,
        slots: int,
        first: bool,
        held: frozenset[int],
        kept: tuple[tuple[int, int], ...],
    ) -> Iterator[Visit]:
        """The backward passes of stages s..t with so many slots, what is held besides known."""
        way, number = self._way(s, t, slots, first)
        if way == _END:
            yield Visit(s, number, held, kept)
        elif way == _KEEP:
            option = self.slots_of(self.stages[s].options[number].kept_bytes)
            left = slots - option - self.handed[s]
            yield from self.visits(s + 1, t, left, first, held | {s}, (*kept, (s, number)))
            yield Visit(s, number, held, kept)
        else:
            left = slots - self.handed[number - 1]
            yield from self.visits(number, t, left, first, held | {number - 1}, kept)
            yield from self.visits(s, number - 1, slots, False, held, kept)

    def _way(self, s: int, t: int, slots: int, first: bool) -> tuple[str, int]:
        """How the best program of a segment begins."""
        best = self.first[s, slots] if first else self.again[s, t, slots]
        for number, cost in self._kept(s, t, first):
            if cost[slots] == best:
                return (_END if s == t else _KEEP), number
        ahead = self._ahead(s, t, first)[:, slots]
        return _RUN, s + 2 + int(np.argmin(ahead))
