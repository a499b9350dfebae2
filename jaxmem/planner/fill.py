"""Greedy: keep more, group by group of equal values, as long as it fits; then exchange groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from jaxmem.planner.candidates import Candidate
from jaxmem.planner.decisions import IN_FLIGHT, InFlight
from jaxmem.planner.schedule import Keep, StillKept, Turn
from jaxmem.planner.segments import Segments

Members = list[tuple[Turn, Candidate]]
KeptSets = dict[Turn, frozenset[str]]

# Groups that are tried one by one before filling.
_MOST_TRIED = 40


@dataclass(frozen=True, eq=False)
class Solution:
    """A point of the search: what is kept, and what its schedule needs on paper.

    Attributes:
        keep: for each turn the names kept across it.
        temp_bytes: predicted temporary bytes at the peak.
        seconds: predicted seconds of one step.
        solver: who proposed it.
        segments: for the scan pairs that run in segments how many, outermost first.
        offload: for each turn the names kept across it in host memory.
        hosted: argument leaves that live in host memory, by their positions.
        host_bytes: predicted temporary bytes in host memory.
        settle: whether more element-wise results are written out early, for XLA to follow closer.
        updates_last: whether leaves in host memory are updated after all else, and not as soon as
            their gradients are there.
        slack_seconds: what every copy of the outermost line is given, as far as turns and the
            copies around it allow.
        in_flight: so many of the largest copies to the host, and back, may be on the way at once,
            outside pairs of scans.
        in_order: whether gradients that backward iterations of loops only hand out are tied to what
            comes next, where putting them off would take more.
        why: why that solver, and how it ended, in words.
        bound_seconds: within the bytes that the search was given no program is faster on paper
            that makes values again at one turn; ``None`` where that is not known.
    """

    keep: KeptSets
    temp_bytes: int
    seconds: float
    solver: str = ""
    segments: Segments = field(default_factory=dict)
    offload: Keep = field(default_factory=dict)
    hosted: frozenset[int] = frozenset()
    host_bytes: int = 0
    settle: bool = False
    updates_last: bool = False
    slack_seconds: float = 0.0
    in_flight: InFlight = IN_FLIGHT
    in_order: bool = True
    why: str = ""
    bound_seconds: float | None = None

    @property
    def key(self) -> frozenset:
        """Equal for equal decisions."""
        away = [("offload", turn, names) for turn, names in self.offload.items()]
        hosted = [("hosted", position) for position in self.hosted]
        how = ["settle"] * self.settle + ["untied"] * (not self.in_order)
        how += ["updates last"] * (self.updates_last and bool(hosted))
        slack = [("slack", self.slack_seconds)] * (self.slack_seconds > 0)
        moves = bool(away or hosted) and self.in_flight != IN_FLIGHT
        in_flight = [("in_flight", self.in_flight)] * moves
        decided = *self.keep.items(), *self.segments.items(), *away, *hosted
        return frozenset([*decided, *how, *slack, *in_flight])

    @property
    def cost(self) -> tuple[float, int]:
        """What is better is smaller."""
        return self.seconds, self.temp_bytes


class Filler:
    """Fills kept sets up to a limit.

    Args:
        groups: values that are equal in repeated layers, by the name of their group.
        evaluate: what a kept set needs.
        most: how many kept sets may be evaluated before exchanges stop.
        over: says that there is no time left; the best so far is then the answer.
    """

    def __init__(
        self,
        groups: Mapping[str, Members],
        evaluate: Callable[[KeptSets], Solution],
        most: int,
        over: Callable[[], bool] = lambda: False,
    ):
        self.groups, self.most, self.over = groups, most, over
        self._evaluate = evaluate
        self._known: dict[frozenset, Solution] = {}

    def evaluate(self, keep: KeptSets) -> Solution:
        """What a kept set needs; each is asked for once."""
        key = frozenset(keep.items())
        if key not in self._known:
            self._known[key] = self._evaluate(keep)
        return self._known[key]

    def best(self, starts: list[Solution], limit_bytes: int, *, thorough: bool = True) -> Solution:
        """The best that filling the starts leads to, and unless in haste exchanging groups."""
        if not thorough:
            return self.fill(min(starts, key=lambda s: s.cost), limit_bytes)
        filled = [self.fill(start, limit_bytes) for start in starts]
        filled.append(self.fill(starts[0], limit_bytes, self._by_trial(starts[0])))
        return self.improve(min(filled, key=lambda s: s.cost), limit_bytes)

    def improve(self, best: Solution, limit_bytes: int) -> Solution:
        """Drop one group at a time and fill again, as long as that saves time."""
        for members in sorted(self.groups.values(), key=lambda m: -sum(c.nbytes for _, c in m)):
            if len(self._known) >= self.most or self.over():
                break
            held = [(t, c) for t, c in members if c.name in best.keep[t]]
            dropped = self.evaluate(_without(best.keep, held)) if held else best
            if dropped is not best and dropped.temp_bytes <= limit_bytes:
                again = self.fill(dropped, limit_bytes)
                best = min(best, again, key=lambda s: s.cost)
        return best

    def fill(
        self, start: Solution, limit_bytes: int, order: list[Members] | None = None
    ) -> Solution:
        """Keep more, group by group, as long as it fits."""
        best = start
        for _ in range(2):
            before = best
            for members in order or self._by_value(best):
                left = [(t, c) for t, c in members if c.name not in best.keep[t]]
                if left and not self.over():
                    best = self._keep_more(best, left, limit_bytes)
            if best is before:
                break
        return best

    def _by_trial(self, solution: Solution) -> list[Members]:
        """Groups by what keeping one whole group saves in simulation, per byte it adds."""
        worth = []
        for left in self._by_value(solution)[:_MOST_TRIED]:
            if self.over():
                break
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
        return most(attempt, len(members), likely) or best


def most(attempt: Callable[[int], Solution | None], count: int, likely: int) -> Solution | None:
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


def _with(keep: KeptSets, more: Iterable[tuple[Turn, Candidate]]) -> KeptSets:
    return _changed(keep, more, frozenset.union)


def _without(keep: KeptSets, less: Iterable[tuple[Turn, Candidate]]) -> KeptSets:
    return _changed(keep, less, frozenset.difference)


def _changed(
    keep: KeptSets,
    candidates: Iterable[tuple[Turn, Candidate]],
    change: Callable[[frozenset[str], set[str]], frozenset[str]],
) -> KeptSets:
    """What happens to a value at its turn happens to it at the turns inside the late part, too."""
    names: dict[Turn, set[str]] = {}
    for turn, candidate in candidates:
        names.setdefault(turn, set()).add(candidate.name)
    changed = dict(keep)
    for (path, _), values in list(names.items()):
        for turn, kept in keep.items():
            if turn[0] == path and isinstance(kept, StillKept):
                changed[turn] = StillKept(change(kept, values))
    for turn, values in names.items():
        changed[turn] = change(keep[turn], values)
    return changed
