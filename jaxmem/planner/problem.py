"""The problem every solver solves: one straight line of kernels, and what crosses its turns.

A line is what XLA runs once the element-wise work is fused: kernels in order, each reading and
writing buffers. At a turn (where a forward pass ends, or anywhere after that) every buffer made
before it is kept on the device, kept on the host, or dropped; what is dropped is made again at
its next use. :meth:`Problem.run` plays a choice through on paper. It is ten to thirty times faster
than writing the program out and simulating that, and says the same of lines that nothing is fused
in (tests/planner/test_problem.py). The written-out program has the last word all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one call that is planned whole.

    Attributes:
        seconds: how long it runs.
        reads: the values it reads from memory, by number.
        makes: the values it writes.
        repeatable: whether it may run again.
        working_bytes: bytes that live only while it runs.
        in_place: whether a result may take the place of an operand that dies here.
        spared: operands whose place it cannot take.
    """

    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    repeatable: bool = True
    working_bytes: int = 0
    in_place: bool = False
    spared: tuple[int, ...] = ()


class Turn(NamedTuple):
    """What crosses one place of the line; all else that was made before it is dropped there.

    Attributes:
        at: the kernel before which it is.
        keep: values that stay on the device.
        offload: values that cross it in host memory.
    """

    at: int
    keep: frozenset[int]
    offload: frozenset[int] = frozenset()


Choice = tuple[Turn, ...]
"""The turns of a line, in order; only the first one offloads."""


class Run(NamedTuple):
    """What a choice needs.

    Attributes:
        peak_bytes: the most device bytes live at once; ``late_peak_bytes`` from the turn on.
        host_bytes: the most host bytes.
        seconds: compute, recomputation and the part of transfers that nothing hides.
        recompute_seconds: of these, the kernels that ran again.
        exposed_seconds: of these, waiting for transfers.
        again: the kernels that ran again, in order.
    """

    peak_bytes: int
    late_peak_bytes: int
    host_bytes: int
    seconds: float
    recompute_seconds: float
    exposed_seconds: float
    again: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """A line of kernels with one main turn.

    Attributes:
        kernels: in the order they run.
        nbytes: device bytes of every value.
        turn: where the first late kernel is.
        results: values that are returned; they have buffers of their own, copies do not.
        d2h_bytes_per_second: device to host, 0 where nothing can be offloaded.
        h2d_bytes_per_second: host to device.
    """

    kernels: tuple[Kernel, ...]
    nbytes: tuple[int, ...]
    turn: int
    results: frozenset[int] = frozenset()
    d2h_bytes_per_second: float = 0.0
    h2d_bytes_per_second: float = 0.0
    made: dict[int, int] = field(init=False, repr=False)
    droppable: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self):
        made = {v: index for index, k in enumerate(self.kernels) for v in k.makes}
        late = {v for k in self.kernels[self.turn :] for v in k.reads} | self.results
        wanted = self._ancestors(late, made)
        object.__setattr__(self, "made", made)
        object.__setattr__(
            self,
            "droppable",
            tuple(
                v
                for k in self.kernels[: self.turn]
                if k.repeatable
                for v in k.makes
                if v not in self.results and v in wanted
            ),
        )

    def _ancestors(self, late: Iterable[int], made: dict[int, int]) -> set[int]:
        """What the late part reads, and everything that is made from."""
        wanted: set[int] = set()
        stack = list(late)
        while stack:
            value = stack.pop()
            if value not in wanted:
                wanted.add(value)
                stack.extend(self.kernels[made[value]].reads if value in made else ())
        return wanted

    @property
    def keep_all(self) -> Choice:
        """Nothing is dropped."""
        return (Turn(self.turn, frozenset(self.droppable)),)

    def keeping(self, keep: Iterable[int], offload: Iterable[int] = ()) -> Choice:
        """The choice that drops all but these at the main turn."""
        return (Turn(self.turn, frozenset(keep), frozenset(offload)),)

    def run(self, choice: Choice) -> Run:
        """Play a choice through on paper."""
        return _Play(self, choice, self._before_turn).run()

    @functools.cached_property
    def _before_turn(self) -> _Play:
        """The way forward, which is the same for every choice."""
        play = _Play(self, ())
        for index in range(self.turn):
            play.step(index)
        return play

    @functools.cached_property
    def _may_drop(self) -> frozenset[int]:
        return frozenset(self.droppable)

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds and working bytes of every kernel, bytes of every value."""
        seconds = np.array([k.seconds for k in self.kernels], float)
        working = np.array([k.working_bytes for k in self.kernels], int)
        return seconds, working, np.array(self.nbytes, int)


class _Play:
    """One run of a line: which kernels run, in which order, and what lives meanwhile.

    Each value made is an instance; made again, or fetched, it is another one.
    """

    def __init__(self, problem: Problem, choice: Choice, before: _Play | None = None):
        self.problem, self.choice = problem, choice
        self.value: list[int] = list(before.value) if before else []
        self.start: list[int] = list(before.start) if before else []
        self.end: list[int] = list(before.end) if before else []
        self.now: dict[int, int] = dict(before.now) if before else {}
        self.steps: list[int] = list(before.steps) if before else []
        # For kernels that work in place: step, operands, and the first instance that they make.
        self.in_place: list[tuple[int, list[int], int]] = list(before.in_place) if before else []
        self.gone: set[int] = set()
        self.dropped: set[int] = set()
        self.again: list[int] = []
        self.sent: dict[int, int] = {}
        self.fetched: dict[int, int] = {}

    def run(self) -> Run:
        turns = {turn.at: turn for turn in self.choice}
        kernels, gone = self.problem.kernels, self.gone
        for index in range(self.problem.turn, len(kernels)):
            turn = turns.get(index)
            if turn is not None:
                self._pass(turn)
            reads = kernels[index].reads
            if gone and not gone.isdisjoint(reads):
                for position in self._missing(reads):
                    self.again.append(position)
                    self.step(position, again=True)
            self.step(index)
        return self._judge()

    def _pass(self, turn: Turn) -> None:
        """At a turn what is not kept is gone, and what is offloaded has to be fetched."""
        if turn.at > self.problem.turn and not self.sent and not turn.offload:
            # What was dropped at the first turn and not made again since is gone already.
            leaving = (self.now.keys() & self.problem._may_drop) - turn.keep
            for value in leaving:
                del self.now[value]
            self.gone |= leaving
            self.dropped |= leaving
            return
        for value in self.problem.droppable:
            if value in turn.offload:
                self.sent[value] = self.now[value]
                del self.now[value]
            elif value not in turn.keep:
                self.now.pop(value, None)
                self.gone.add(value)
                self.dropped.add(value)

    def _missing(self, values: Sequence[int]) -> list[int]:
        gone, made, kernels = self.gone, self.problem.made, self.problem.kernels
        positions: set[int] = set()
        stack = [v for v in values if v in gone]
        while stack:
            position = made[stack.pop()]
            if position not in positions:
                positions.add(position)
                stack.extend([v for v in kernels[position].reads if v in gone])
        return sorted(positions)

    def step(self, index: int, again: bool = False) -> None:
        kernel, step, now, end = self.problem.kernels[index], len(self.steps), self.now, self.end
        self.steps.append(index)
        for value in kernel.reads:
            instance = now.get(value)
            if instance is None:
                if value not in self.sent:
                    continue  # An argument of the line.
                instance = now[value] = self.fetched[value] = self._new(value, step)
            end[instance] = step
        if kernel.in_place:
            operands = [now[v] for v in kernel.reads if v in now and v not in kernel.spared]
            self.in_place.append((step, operands, len(self.value)))
        for value in kernel.makes:
            instance = self._new(value, step)
            if not again or value in self.dropped:
                self.gone.discard(value)
                now[value] = instance

    def _new(self, value: int, step: int) -> int:
        instance = len(self.value)
        self.value.append(value)
        self.start.append(step)
        self.end.append(step)
        return instance

    def _judge(self) -> Run:
        problem, steps = self.problem, np.array(self.steps, int)
        seconds_of, working_of, nbytes_of = problem._arrays
        seconds = seconds_of[steps]
        exposed = self._transfer(seconds) if self.sent else 0.0
        sizes = nbytes_of[self.value] if self.value else np.zeros(0, int)
        returned = [self.now[value] for value in problem.results if value in self.now]
        sizes[returned] = 0
        change = np.zeros(len(steps) + 1, int)
        np.add.at(change, self.start, sizes)
        np.subtract.at(change, np.array(self.end, int) + 1, sizes)
        timeline = np.cumsum(change[:-1]) + working_of[steps]
        for step, operands, first in self.in_place:
            timeline[step] -= self._taken(step, operands, first, sizes)
        again = seconds_of[self.again].sum() if self.again else 0.0
        host = sum([problem.nbytes[v] for v in self.sent])
        return Run(
            peak_bytes=int(timeline.max(initial=0)),
            late_peak_bytes=int(timeline[problem.turn :].max(initial=0)),
            host_bytes=host,
            seconds=float(seconds.sum()) + exposed,
            recompute_seconds=float(again),
            exposed_seconds=exposed,
            again=tuple(self.again),
        )

    def _taken(self, step: int, operands: Sequence[int], first: int, sizes: np.ndarray) -> int:
        """Bytes of results that take the place of an operand of the same size that dies here."""
        end = self.end
        dying = [sizes[n] for n in dict.fromkeys(operands) if end[n] == step]
        if not dying:
            return 0
        taken, made = 0, self.problem.kernels[self.steps[step]].makes
        for instance in range(first, first + len(made)):
            if sizes[instance] and sizes[instance] in dying:
                dying.remove(sizes[instance])
                taken += int(sizes[instance])
        return taken

    def _transfer(self, seconds: np.ndarray) -> float:
        """Time the copies; extend lifetimes to where they end and start; what stays exposed.

        Copies to the host run in the order the values are made, each as soon as the link is free.
        What has not ended when the late part starts is waited for. Copies from the host run as late
        as they can; what would have to start before the late part is waited for, too.
        """
        problem, begins = self.problem, [0.0, *np.cumsum(seconds).tolist()]
        late = problem.turn
        turn_time, link = begins[late], 0.0
        for value, instance in sorted(self.sent.items(), key=lambda item: self.start[item[1]]):
            ready = begins[self.start[instance] + 1]
            link = max(link, ready) + problem.nbytes[value] / problem.d2h_bytes_per_second
            copied = next((s for s in range(late) if begins[s + 1] >= link), late - 1)
            self.end[instance] = max(self.end[instance], copied)
        exposed = max(0.0, link - turn_time)
        following = begins[-1]
        for value, instance in sorted(self.fetched.items(), key=lambda item: -self.start[item[1]]):
            used = begins[self.start[instance]]
            following = min(used, following) - (
                problem.nbytes[value] / problem.h2d_bytes_per_second
            )
            first = next((s for s in range(late, len(begins)) if begins[s + 1] > following), late)
            self.start[instance] = min(self.start[instance], first)
        return exposed + max(0.0, turn_time - following)
