"""Cut a line into stages where little is live, and find the ways to keep each stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxmem.planner.problem import Choice, Kernel, Problem, Turn
from jaxmem.planner.solvers import milp
from jaxmem.planner.solvers.answer import Clock
from jaxmem.planner.solvers.chain import Option, Solution, Stage, Visit
from jaxmem.planner.valleys import low_positions, valley_positions

# With fewer valleys than this the forward pass is a plain chain, and any low place is a cut.
_FEWEST_VALLEYS = 2
# A path of more places than this is cut in fewer: the table takes the third power of them.
_MOST_PLACES = 64
# How many ways to keep a stage are looked at, from nothing to everything.
_MOST_OPTIONS = 12


@dataclass(frozen=True, eq=False)
class Cut:
    """One stage of a line.

    Attributes:
        early: its kernels on the way forward, first and one past the last.
        late: its kernels on the way back.
        handed: what crosses to the next stage.
        options: for each option of ``stage`` the values that are kept.
        stage: what the chain solver is told.
    """

    early: tuple[int, int]
    late: tuple[int, int]
    handed: frozenset[int]
    options: tuple[frozenset[int], ...]
    stage: Stage


class Stages:
    """The stages of a line, equal ones looked at once.

    Args:
        problem: the line.
        clock: when its time is over, stages are only looked at kept whole and not kept at all.
    """

    def __init__(self, problem: Problem, clock: Clock | None = None):
        self.problem, self.clock = problem, clock or Clock(math.inf)
        self._known: dict[tuple, tuple[tuple[frozenset[int], ...], Stage]] = {}
        places = [(at + 1, held) for at, held in cut_places(problem) if at < problem.turn]
        bounds = [0, *(at for at, _ in places), problem.turn]
        crossing = [*(held for _, held in places), frozenset[int]()]
        early = list(itertools.pairwise(bounds))
        late = self._late(early, crossing)
        given = [frozenset[int](), *crossing[:-1]]
        behind = self._behind(late)
        self.cuts = [
            self._cut(*parts) for parts in zip(early, late, crossing, given, behind, strict=True)
        ]

    def _late(
        self, early: Sequence[tuple[int, int]], crossing: Sequence[frozenset[int]]
    ) -> list[tuple[int, int]]:
        """The late kernels of each stage: back from the last stage, as far as order allows.

        What a stage was handed belongs to it: the gradient of a weight reads the layer's input.
        """
        problem, stage_of = self.problem, {}
        for number, (start, end) in enumerate(early):
            for kernel in problem.kernels[start:end]:
                stage_of.update(dict.fromkeys(kernel.makes, number))
        for number, handed in enumerate(crossing):
            stage_of.update(dict.fromkeys(handed, number + 1))
        spans = {number: [len(problem.kernels)] * 2 for number in range(len(early))}
        current, start = len(early) - 1, problem.turn
        droppable = set(problem.droppable)
        for index in range(problem.turn, len(problem.kernels)):
            own = [stage_of[v] for v in problem.kernels[index].reads if v in droppable]
            if own and max(own) < current:
                spans[current] = [start, index]
                for skipped in range(max(own) + 1, current):
                    spans[skipped] = [index, index]
                current, start = max(own), index
        spans[current] = [start, len(problem.kernels)]
        return [(spans[n][0], spans[n][1]) for n in range(len(early))]

    def _behind(self, late: Sequence[tuple[int, int]]) -> list[int]:
        """For each stage the bytes that late values hold all the while its late kernels run.

        Those of the first stage end with the last that reads an early value: the updates follow.
        """
        problem, droppable = self.problem, set(self.problem.droppable)
        last = {v: n for n, kernel in enumerate(problem.kernels) for v in kernel.reads}
        through: list[tuple[int, int, int]] = []
        for index in range(problem.turn, len(problem.kernels)):
            for value in problem.kernels[index].makes:
                if value not in problem.results and value in last:
                    through.append((index, last[value], problem.nbytes[value]))
        behind = []
        for start, end in late:
            own = [
                n for n in range(start, end) if not droppable.isdisjoint(problem.kernels[n].reads)
            ]
            done = own[-1] + 1 if own else end
            behind.append(
                sum(size for made, read, size in through if made < start and read >= done)
            )
        return behind

    def _cut(
        self,
        early: tuple[int, int],
        late: tuple[int, int],
        handed: frozenset[int],
        given: frozenset[int],
        behind_bytes: int,
    ) -> Cut:
        sub, numbers = self._alone(early, late)
        inside = frozenset(n for n, v in enumerate(numbers) if v in handed)
        before = tuple([n for n, v in enumerate(numbers) if v in given])
        key = (sub.kernels, sub.nbytes, sub.turn, inside, before)
        if key not in self._known:
            self._known[key] = _options(sub, inside, before, self.clock)
        kept, stage = self._known[key]
        handed_bytes = sum(self.problem.nbytes[v] for v in handed)
        stage = replace(stage, handed_bytes=handed_bytes, behind_bytes=behind_bytes)
        options = tuple(frozenset(numbers[n] for n in keep) for keep in kept)
        return Cut(early, late, handed, options, stage)

    def _alone(self, early: tuple[int, int], late: tuple[int, int]) -> tuple[Problem, list[int]]:
        """The stage as a problem of its own; what comes from outside is given."""
        numbers: dict[int, int] = {}
        kernels = []
        for index in (*range(*early), *range(*late)):
            kernel = self.problem.kernels[index]
            reads = tuple([numbers.setdefault(v, len(numbers)) for v in kernel.reads])
            makes = tuple([numbers.setdefault(v, len(numbers)) for v in kernel.makes])
            spared = tuple([numbers[v] for v in kernel.spared])
            kernels.append(replace(kernel, reads=reads, makes=makes, spared=spared))
        values = list(numbers)
        results = frozenset(numbers[v] for v in self.problem.results if v in numbers)
        nbytes = tuple([self.problem.nbytes[v] for v in values])
        return Problem(tuple(kernels), nbytes, early[1] - early[0], results), values

    @property
    def distinct(self) -> int:
        """How many stages differ from one another."""
        return len(self._known)

    @property
    def chain(self) -> list[Stage]:
        """What the chain solver is told."""
        return [cut.stage for cut in self.cuts]

    def choice(self, solution: Solution) -> Choice:
        """The turns that a solution of the chain stands for.

        What one visit holds and the visit before did not is made after the turn between them.
        """
        turns: dict[int, Turn] = {}
        before = frozenset(self.problem.droppable)
        for number, visit in enumerate(solution.visits):
            at = self.problem.turn if number == 0 else self.cuts[visit.stage].late[0]
            held = self._held(visit)
            if at < len(self.problem.kernels):
                both = turns[at].keep & held if at in turns else before & held
                turns[at] = Turn(at, both)
            before = held
        main, *inner = (turns[at] for at in sorted(turns))
        away = self._away(solution) & main.keep
        return (Turn(main.at, main.keep - away, away), *inner)

    def _away(self, solution: Solution) -> frozenset[int]:
        """What waits in host memory."""
        away = [self.cuts[stage].handed for stage in solution.handed_away]
        options = dict(solution.visits[0].kept)
        for stage, stays in solution.kept_away.items():
            cut = self.cuts[stage]
            away.append(cut.options[options[stage]] - cut.options[stays] - cut.handed)
        return frozenset[int]().union(*away)

    def _held(self, visit: Visit) -> frozenset[int]:
        held = set(self.cuts[visit.stage].options[visit.option])
        held.update(*(self.cuts[stage].handed for stage in visit.held))
        held.update(*(self.cuts[stage].options[option] for stage, option in visit.kept))
        return frozenset(held.intersection(self.problem.droppable))


def _options(
    sub: Problem, handed: frozenset[int], given: tuple[int, ...], clock: Clock
) -> tuple[tuple[frozenset[int], ...], Stage]:
    """The ways to keep one stage, nothing first; what it hands on costs nothing more."""
    keeps = [frozenset[int]()]
    if clock.over():
        keeps.append(frozenset(sub.droppable))
    for keep in milp.kept_within(sub, handed, _MOST_OPTIONS, clock):
        if keep not in keeps:
            keeps.append(keep)
    runs = [sub.run(sub.keeping(keep)) for keep in keeps]
    sizes = [sum(sub.nbytes[v] for v in keep - handed) for keep in keeps]
    options = tuple(
        Option(size, run.recompute_seconds, max(0, run.late_peak_bytes - size))
        for size, run in zip(sizes, runs, strict=True)
    )
    movable = tuple(
        (stays, whole)
        for stays, whole in itertools.permutations(range(len(keeps)), 2)
        if keeps[stays] - handed < keeps[whole] - handed
        and (not keeps[stays] or len(keeps[whole]) == max(map(len, keeps)))
    )
    seconds = sum(k.seconds for k in sub.kernels[: sub.turn])
    back = sum(k.seconds for k in sub.kernels[sub.turn :])
    forward = Problem(sub.kernels[: sub.turn], sub.nbytes, sub.turn)
    running = forward.run(()).peak_bytes
    giving = (Kernel(0.0, (), given), *forward.kernels)
    passing = Problem(giving, sub.nbytes, len(giving)).run(()).peak_bytes
    stage = Stage(seconds, 0, running, options, passing, back_seconds=back, movable=movable)
    return tuple(keeps), stage


def cut_places(problem: Problem) -> Iterator[tuple[int, frozenset[int]]]:
    """The early kernels after which little crosses to the rest of the way forward."""
    last: dict[int, int] = {}
    for index, kernel in enumerate(problem.kernels[: problem.turn]):
        for value in kernel.reads:
            last[value] = index
    live: set[int] = set()
    held: list[frozenset[int]] = []
    droppable = set(problem.droppable)
    for index, kernel in enumerate(problem.kernels[: problem.turn]):
        live.update(v for v in kernel.makes if last.get(v, -1) > index and v in droppable)
        live.difference_update([v for v in kernel.reads if last[v] == index])
        held.append(frozenset(live))
    widths = [sum(problem.nbytes[v] for v in values) for values in held]
    positions = list(valley_positions(widths))
    if len(positions) < _FEWEST_VALLEYS:
        positions = list(_path_positions(held) or low_positions(widths, held))
        loss = _read_first(problem, positions[-1] if positions else -1)
        if loss and sum(problem.nbytes[v] for v in loss) <= max(widths):
            positions = [p for p in positions if p < problem.turn - 1] + [problem.turn - 1]
            held[-1] = loss
    return ((p, held[p]) for p in positions if held[p])


def _path_positions(held: Sequence[frozenset[int]]) -> list[int]:
    """Every place of a path, where one value after the other crosses; none if there is more to it.

    The cuts of a path need not be low: what one stage hands on is nothing that another does, and
    the more cuts the closer to the optimum.
    """
    if max(map(len, held), default=0) > 1:
        return []
    pairs = enumerate(itertools.pairwise([frozenset[int](), *held]))
    places = [p for p, (before, values) in pairs if values and values != before]
    return places if len(places) <= _MOST_PLACES else []


def _read_first(problem: Problem, after: int) -> frozenset[int]:
    """What the late part reads before anything else, if that was made after the last place.

    The loss is a stage of its own: held over while it runs, what the last layer was handed would
    be one value too many.
    """
    droppable = set(problem.droppable)
    reads = (droppable.intersection(k.reads) for k in problem.kernels[problem.turn :])
    first = frozenset(next((values for values in reads if values), ()))
    return first if all(problem.made[v] > after for v in first) else frozenset()
