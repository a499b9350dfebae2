"""Keep, recompute or offload by mixed-integer programming, exact where it ends.

The model is a relaxation: it knows which kernels must run again, and which bytes are live whatever
the order of recomputations, but not the order itself (Checkmate, Jain et al. 2020, models it all
and needs a variable for every kernel at every step). Each answer is played through by
:meth:`Problem.run`; what turns out too large, or slower than the model thought, is excluded by a
cut and the model solved again. What the model says is a lower bound, so when it reaches the best
run that was seen that run is optimal (logic-based Benders decomposition, Hooker and Ottosson 2003).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmem.planner.problem import Choice, Problem, Run
from jaxmem.planner.solvers.answer import Answer, Clock, Limits

# Relative: what HiGHS may leave open, and what counts as equal.
_TOLERANCE = 1e-6
_MOST_CUTS = 400


def solve(
    problem: Problem, limits: Limits, start: Answer | None = None, most_cuts: int = _MOST_CUTS
) -> Answer | None:
    """The fastest choice within the limits; ``None`` if there is none.

    Args:
        problem: the line.
        limits: what may be used.
        start: a choice that is known already; only what is faster is looked for.
        most_cuts: how many choices may be excluded before it gives up.

    Returns:
        The choice with its bound; ``gap`` is 0 if it is optimal.
    """
    model, clock = _Model(problem, limits), Clock(limits.seconds)
    best = (start.choice, start.run) if start else None
    bound = 0.0
    for cut in range(most_cuts + 1):
        found = model.solve(clock.left())
        if found is None:
            if model.ended:
                bound = best[1].seconds if best else 0.0
                return _answer(best, bound, f"optimal, after {cut} cuts")
            return _answer(best, bound, "its time limit ended it")
        value, choice = found
        bound = max(bound, value)
        if best is not None and bound >= best[1].seconds * (1 - _TOLERANCE):
            return _answer(best, best[1].seconds, f"optimal, after {cut} cuts")
        run = problem.run(choice)
        if limits.allow(run) and (best is None or _better(run, best[1])):
            best = (choice, run)
        model.exclude()
    return _answer(best, bound, f"stopped after {most_cuts} cuts")


def kept_within(
    problem: Problem, free: frozenset[int], count: int, clock: Clock | None = None
) -> Iterator[frozenset[int]]:
    """For ``count`` numbers of bytes the kept sets after which the least has to be made again.

    Args:
        problem: the line; its memory is not looked at, only what is kept.
        free: values whose bytes do not count.
        count: how many numbers of bytes, from everything down to nothing.
        clock: ends it early; without one it goes on to the end.
    """
    clock = clock or Clock(math.inf)
    sizes = {v: 0 if v in free else problem.nbytes[v] for v in problem.droppable}
    total = sum(sizes.values())
    for share in range(count, -1, -1):
        model = _Model(problem, None, sizes, total * share // count)
        found = None if clock.over() else model.solve(clock.left())
        if found is not None:
            yield found[1][0].keep


def _better(run: Run, other: Run) -> bool:
    return (run.seconds, run.peak_bytes) < (other.seconds, other.peak_bytes)


def _answer(best: tuple[Choice, Run] | None, bound: float, why: str) -> Answer | None:
    return None if best is None else Answer(best[0], best[1], "MILP", why, bound)


@dataclass
class _Rows:
    """Linear constraints ``coefficients @ x >= low``, sparse."""

    entries: list[tuple[dict[int, float], float]]

    def at_least(self, coefficients: dict[int, float], low: float) -> None:
        self.entries.append((coefficients, low))


class _Model:
    """Variables: keep and offload of each droppable value, again of each early kernel."""

    def __init__(
        self,
        problem: Problem,
        limits: Limits | None,
        sizes: Mapping[int, int] | None = None,
        most: int = 0,
    ):
        self.problem, self.limits = problem, limits
        self.values = problem.droppable
        self.hosts = bool(limits and limits.host_bytes) and problem.d2h_bytes_per_second > 0
        self.keep = {v: n for n, v in enumerate(self.values)}
        first = len(self.values)
        self.offload = {v: first + n for n, v in enumerate(self.values)} if self.hosts else {}
        self.binary = first + len(self.offload)
        again = sorted({problem.made[v] for v in self.values})
        self.again = {k: self.binary + n for n, k in enumerate(again)}
        self.count = self.binary + len(self.again)
        self.exposed = (self.count, self.count + 1)
        self.count += 2
        self.rows = _Rows([])
        # Of the rows so far: coefficients, the row and the column of each, and lower bounds.
        self._scaled: tuple[list[float], list[int], list[int], list[float]] = [], [], [], []
        self.ended = False
        self.x = np.zeros(self.count)
        self.needs()
        if limits is not None:
            self.memory(limits)
        if self.hosts:
            self.transfers()
        if sizes is not None:
            self.rows.at_least({c: -float(sizes[v]) for v, c in self.keep.items()}, -float(most))

    def needs(self) -> None:
        """What is read late is there; a kernel that runs again has its operands.

        What nothing reads late is only kept for a kernel that runs again. Keeping it otherwise
        changes nothing, and each such choice would have to be excluded by a cut of its own.
        """
        readers: dict[int, dict[int, float]] = {v: {} for v in self.values}
        for kernel, column in self.again.items():
            for value in set(self.problem.kernels[kernel].reads).intersection(readers):
                readers[value][column] = 1.0
        late = {v for k in self.problem.kernels[self.problem.turn :] for v in k.reads}
        for value in self.values:
            if value in late:
                self.rows.at_least(self._there(value), 1.0)
            else:
                self.rows.at_least({**readers[value], self.keep[value]: -1.0}, 0.0)
            both = {self.keep[value]: -1.0}
            if self.hosts:
                both[self.offload[value]] = -1.0
                self.rows.at_least(both, -1.0)
        for kernel, column in self.again.items():
            for value in self.problem.kernels[kernel].reads:
                if value in self.keep:
                    self.rows.at_least({**self._there(value), column: -1.0}, 0.0)

    def _there(self, value: int) -> dict[int, float]:
        there = {self.keep[value]: 1.0, self.again[self.problem.made[value]]: 1.0}
        if self.hosts:
            there[self.offload[value]] = 1.0
        return there

    def memory(self, limits: Limits) -> None:
        """At every kernel as written: what is live whatever is chosen, and what is kept."""
        lives = _Lives(self.problem)
        seen: set[tuple] = set()
        for place, (fixed, kept) in enumerate(lives.at_every_kernel()):
            row = {self.keep[v]: -float(self.problem.nbytes[v]) for v in kept}
            if place < self.problem.turn and self.hosts:
                for v in lives.copying(place):
                    row[self.offload[v]] = -float(self.problem.nbytes[v])
            low = fixed - limits.device_bytes
            key = (tuple(sorted(row.items())), low)
            if key not in seen and (row or low > 0):
                seen.add(key)
                self.rows.at_least(row, float(low))
        if self.hosts:
            row = {self.offload[v]: -float(self.problem.nbytes[v]) for v in self.values}
            self.rows.at_least(row, -float(limits.host_bytes))

    def transfers(self) -> None:
        """Both directions: at least what their window is too short for is exposed."""
        problem = self.problem
        early = sum(k.seconds for k in problem.kernels[: problem.turn])
        late = sum(k.seconds for k in problem.kernels[problem.turn :])
        out, back = self.exposed
        send = {self.offload[v]: -self._d2h(v) for v in self.values}
        self.rows.at_least({out: 1.0, **send}, -early)
        fetch = {self.offload[v]: -self._h2d(v) for v in self.values}
        again = {column: problem.kernels[k].seconds for k, column in self.again.items()}
        self.rows.at_least({back: 1.0, **fetch, **again}, -late)
        # The last copy to the host can only start when its value is made.
        begins = np.cumsum([0.0] + [k.seconds for k in problem.kernels[: problem.turn]])
        for value in self.values:
            room = begins[-1] - begins[problem.made[value] + 1]
            self.rows.at_least({out: 1.0, self.offload[value]: -self._d2h(value)}, -room)

    def _d2h(self, value: int) -> float:
        return self.problem.nbytes[value] / self.problem.d2h_bytes_per_second

    def _h2d(self, value: int) -> float:
        return self.problem.nbytes[value] / self.problem.h2d_bytes_per_second

    def exclude(self) -> None:
        """Never give the last choice again."""
        ones = [c for c in range(self.binary) if self.x[c] > 0.5]
        row = dict.fromkeys(range(self.binary), 1.0) | dict.fromkeys(ones, -1.0)
        self.rows.at_least(row, 1.0 - len(ones))

    def solve(self, seconds: float) -> tuple[float, Choice] | None:
        """The value of the relaxation and its choice; ``None`` if it has none, or no time."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        problem = self.problem
        base = sum(k.seconds for k in problem.kernels)
        costs = np.zeros(self.count)
        for kernel, column in self.again.items():
            costs[column] = problem.kernels[kernel].seconds
        costs[list(self.exposed)] = 1.0
        scale = max(base, float(costs.max()), 1e-30)
        upper = np.ones(self.count)
        upper[list(self.exposed)] = np.inf if self.hosts else 0.0
        integrality = np.zeros(self.count)
        integrality[: self.count - 2] = 1
        coefficients, low = self._matrix(csr_array)
        if seconds <= 0:
            return None
        options = {"mip_rel_gap": _TOLERANCE / 10}
        if np.isfinite(seconds):
            options["time_limit"] = seconds
        result = milp(
            costs / scale,
            constraints=LinearConstraint(coefficients, low),
            bounds=Bounds(0, upper),  # pyright: ignore[reportArgumentType]
            integrality=integrality,
            options=options,
        )
        if result.x is None:
            self.ended = result.status == 2
            return None
        self.x = np.round(result.x[: self.binary])
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        kept = [v for v, c in self.keep.items() if self.x[c] > 0.5]
        sent = [v for v, c in self.offload.items() if self.x[c] > 0.5]
        return base + float(bound) * scale, problem.keeping(kept, sent)

    def _matrix(self, sparse) -> tuple:
        """Constraint rows, each scaled to a largest coefficient of 1; of cuts only the new ones."""
        data, rows, columns, low = self._scaled
        for number in range(len(low), len(self.rows.entries)):
            coefficients, least = self.rows.entries[number]
            largest = max((abs(c) for c in coefficients.values()), default=1.0) or 1.0
            low.append(least / largest - 1e-9)
            for column, coefficient in coefficients.items():
                data.append(coefficient / largest)
                rows.append(number)
                columns.append(column)
        shape = (len(self.rows.entries), self.count)
        return sparse((data, (rows, columns)), shape=shape), np.array(low)


class _Lives:
    """Which values are live at which kernel, as far as that does not depend on the order."""

    def __init__(self, problem: Problem):
        self.problem = problem
        kernels, turn = problem.kernels, problem.turn
        self.early: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for index, kernel in enumerate(kernels):
            for value in kernel.makes:
                (self.early if index < turn else self.last)[value] = index
            for value in kernel.reads:
                if index < turn:
                    self.early[value] = index
                else:
                    self.first.setdefault(value, index)
                    self.last[value] = index

    def at_every_kernel(self) -> Iterable[tuple[int, Sequence[int]]]:
        """For each kernel the bytes that are live there in any case, and what may be kept there."""
        problem, turn = self.problem, self.problem.turn
        droppable = set(problem.droppable)
        for place, kernel in enumerate(problem.kernels):
            fixed, kept = kernel.working_bytes, []
            for value, made in problem.made.items():
                if value in problem.results or made > place:
                    continue
                if self._surely(value, place, droppable):
                    fixed += problem.nbytes[value]
                elif value in droppable and (place < turn or self.last.get(value, -1) >= place):
                    kept.append(value)
            if kernel.in_place:
                fixed -= sum(problem.nbytes[v] for v in kernel.makes)
            yield fixed, kept

    def _surely(self, value: int, place: int, droppable: set[int]) -> bool:
        made, turn = self.problem.made[value], self.problem.turn
        if made >= turn:
            return place <= self.last.get(value, made)
        if place < turn:
            return place <= self.early[value] or (value not in droppable and value in self.last)
        if value in droppable:
            return self.first.get(value, place + 1) <= place <= self.last.get(value, -1)
        return place <= self.last.get(value, -1)

    def copying(self, place: int) -> list[int]:
        """The droppable values that cannot have been copied to the host yet at ``place``."""
        problem = self.problem
        begins = np.cumsum([0.0] + [k.seconds for k in problem.kernels])
        found = []
        for value in problem.droppable:
            done = begins[problem.made[value] + 1] + (
                problem.nbytes[value] / problem.d2h_bytes_per_second
            )
            if self.early[value] < place and begins[place] < done and problem.made[value] <= place:
                found.append(value)
        return found
