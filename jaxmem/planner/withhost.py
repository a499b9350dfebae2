"""Search for plans with values in host memory, from what is found without."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxmem.planner.fill import Filler, KeptSets, Solution
from jaxmem.planner.offloading import Offloader, outside
from jaxmem.planner.schedule import Keep, is_nested

if TYPE_CHECKING:
    from jaxmem.planner.search import Search

# How often a limit is moved until what is written out fits what was proposed on paper.
_MOST_CORRECTIONS = 6
_CLOSER = 0.99
_ROOM_FOR_COPIES = 0.9
# What loops carry goes to the host with as many kept sets, filled up with so many trials.
_MOST_STARTS, _MOST_TRIALS = 2, 60
_CARRIED = "loops carry through host memory"
_WHY_CARRIED = "what loops carry waits in host memory, and the room it leaves is filled up"
_WHY_SIMPLE = "what loops carry waits in host memory, and all else is as a simple answer has it"


class WithHost:
    """Finds what host memory makes quicker within one limit.

    Args:
        search: of the program.
        limit_bytes: temporary bytes on the device.
        host_bytes: bytes of host memory that values may be moved to.
    """

    def __init__(self, search: Search, limit_bytes: int, host_bytes: int):
        self.search, self.limit, self.host_bytes = search, limit_bytes, host_bytes
        self.over = search.deadline.over

    def quicker_than(self, best: Solution | None) -> Solution | None:
        """``best``, or what is faster with values in host memory."""
        aim = self.limit
        for _ in range(0 if self.over() else _MOST_CORRECTIONS):
            proposal = self._propose(best, aim)
            if proposal is None or not proposal.offload or self.over():
                return best
            judged = self.search.judged(proposal)
            if judged.temp_bytes <= self.limit and judged.host_bytes <= self.host_bytes:
                return judged if best is None or judged.cost < best.cost else best
            aim = int(aim * _CLOSER * min(1.0, self.limit / max(judged.temp_bytes, 1)))
        return best

    def _propose(self, best: Solution | None, aim: int) -> Solution | None:
        """The fastest on paper of what offloads instead of recomputing, or of keeping."""
        search = self.search
        groups = outside(search.ruled.free(search.groups), search.scheduler.unrolled)
        rate = search.simulator.rates.d2h_bytes_per_second
        offloader = Offloader(groups, search.on_paper, self.host_bytes, rate, self.over)
        everything = {c.turn: frozenset(k.name for k in c.candidates) for c in search.choices}
        chain, carried = self._chain(aim), self._carried(aim)
        starts = [best, chain, carried]
        # What is on its way needs room: this start leaves some.
        if not self.over():
            starts.append(search.within(int(aim * _ROOM_FOR_COPIES)))
        moved = offloader.fastest(
            search.on_paper(everything),
            [
                search.on_paper(start.keep, start.offload)
                for start in starts
                if start is not None and not start.segments and not is_nested(start.keep)
            ],
            aim,
        )
        found = [f for f in (moved, chain, carried) if f is not None and f.temp_bytes <= aim]
        quickest = min(found, key=lambda s: s.cost, default=None)
        return quickest and offloader.worthwhile(quickest, aim)

    def _chain(self, aim: int) -> Solution | None:
        """What the solver for chains offloads, as far as the policy allows it."""
        search = self.search
        if search.line is None or self.over():
            return None
        found = search.line_solver().offloading(aim, self.host_bytes)
        if found is None:
            return None
        offload = search.ruled.movable(found.offload)
        return replace(search.on_paper(found.keep, offload), solver=found.solver, why=found.why)

    def _carried(self, aim: int) -> Solution | None:
        """What loops carry waits in host memory, and the room is filled with kept values."""
        away = self._carried_away()
        if not away or self.over():
            return None
        search, evaluate = self.search, functools.partial(self._evaluate, away)
        starts = [s for s in self._starts(away) if s.temp_bytes <= aim]
        if not starts:
            return None
        groups = outside(search.ruled.free(search.groups), search.scheduler.unrolled)
        filler = Filler(groups, evaluate, _MOST_TRIALS, self.over)
        filled = filler.best(sorted(starts, key=lambda s: s.cost)[:_MOST_STARTS], aim)
        return replace(filled, solver=_CARRIED, why=_WHY_CARRIED)

    def simple(self) -> list[Solution]:
        """The simple answers with what loops carry in host memory; none where that is nothing."""
        away = self._carried_away()
        found = [self.search.judged(s) for s in self._starts(away)] if away else []
        return [replace(s, solver=_CARRIED, why=_WHY_SIMPLE) for s in found]

    def _starts(self, away: Keep) -> Iterator[Solution]:
        """The simple answers with what loops carry in host memory."""
        for base in self.search.bases():
            if not is_nested(base.keep):
                yield self._evaluate(away, base.keep)

    def _evaluate(self, away: Keep, keep: KeptSets) -> Solution:
        kept = {turn: names | away.get(turn, frozenset()) for turn, names in keep.items()}
        return self.search.on_paper(kept, away)

    def _carried_away(self) -> Keep:
        """The names of what loops carry, the largest first as far as there is host memory."""
        search, left = self.search, self.host_bytes
        groups = outside(search.ruled.free(search.carried), search.scheduler.unrolled)
        away: dict = {}
        members = [member for group in groups.values() for member in group]
        for turn, candidate in sorted(members, key=lambda m: -m[1].nbytes):
            if candidate.nbytes <= left:
                left -= candidate.nbytes
                away[turn] = away.get(turn, frozenset()) | {candidate.name}
        return away
