"""When the copies of a line to and from the host run."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxmem.planner.decisions import IN_FLIGHT, InFlight
from jaxmem.planner.facts import Facts
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Value


@dataclass(frozen=True)
class Windows:
    """When the transfers of a line run.

    Attributes:
        land: for each operation, the values whose copies must be on the host after it.
        fetch: for each operation, the values that start to come back before it.
    """

    land: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)
    fetch: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Copies:
    """The copies of a line that was written out without knowing when they should run.

    Attributes:
        facts: of the line.
        turns: its turns, and what is in host memory from each on.
        across: for each turn the values that cross it in host memory.
        leaving: what is sent, in the order in which it is made.
        fetched: what comes back, and the operation before which it is needed.
        bounds: how many operations were written out when each of the line's was.
    """

    facts: Facts
    turns: tuple[tuple[int, frozenset[Value]], ...]
    across: Mapping[int, frozenset[Value]]
    leaving: tuple[Value, ...]
    fetched: tuple[tuple[Value, int], ...]
    bounds: tuple[int, ...]

    def at_once(self) -> Windows:
        """Every copy to the host ends where its value is made."""
        made: dict[int, tuple[Value, ...]] = {}
        for value in self.leaving:
            place = max(self._position(value), 0)
            made[place] = (*made.get(place, ()), value)
        return Windows(land=made)

    def well_placed(
        self,
        seconds: Sequence[float],
        rates: Rates,
        slack_seconds: float = 0.0,
        in_flight: InFlight = IN_FLIGHT,
    ) -> Windows:
        """When each transfer should run, judged by how long what was written out takes.

        Copies to the host follow each other in program order, each from when its value is made;
        copies back end when they are needed and start as late as that allows. None crosses the turn
        across which its value is in host memory, whatever time that costs. Where a link is slower
        than the computation it is busy all the time with a few copies on the way, and more would
        only fill the device.

        Args:
            seconds: of each operation that was written out.
            rates: of the links.
            slack_seconds: each may take so long, from when its value is made or until it is needed.
            in_flight: so many of the largest copies there, and back, may be on the way.
        """
        clock = list(itertools.accumulate(seconds, initial=0.0))
        after = [clock[bound] for bound in self.bounds]
        sent, fetched = in_flight
        before = [0.0, *after]
        return Windows(
            self._landings(after, rates, slack_seconds, sent) if sent else self.at_once().land,
            self._arrivals(before, rates, slack_seconds, fetched) if fetched else {},
        )

    def _position(self, value: Value) -> int:
        return self.facts.made.get(value, -1)

    def _start(self, index: int, earliest: int) -> int:
        """The first operation of what is fused with ``index``, from ``earliest`` on."""
        ends = self.facts.kernel_end
        while index > earliest and ends[index - 1] >= index:
            index -= 1
        return max(index, earliest)

    def _end(self, index: int) -> int:
        """The last operation of what is fused with ``index``.

        In the middle of a kernel a barrier makes the half of it that is done write out its results.
        """
        return self.facts.kernel_end[index]

    def _landings(
        self, after: Sequence[float], rates: Rates, slack: float, most: int
    ) -> dict[int, tuple[Value, ...]]:
        free, land = 0.0, {}
        leaving = self.leaving
        room = most * _largest(leaving)
        for number, value in enumerate(leaving):
            index = self._position(value)
            made = after[index] if index >= 0 else 0.0
            free = max(made, free) + rates.link_seconds("send", value.nbytes)
            landed = max(made + slack, free)
            turns = [turn - 1 for turn, moved in self.across.items() if value in moved]
            behind = leaving[number + _together(leaving[number:], room) :][:1]
            behind = [self._position(v) for v in behind]
            place = self._end(min(bisect.bisect_left(after, landed), len(after) - 1))
            place = max(min([place, *turns, *behind]), index, 0)
            land[place] = (*land.get(place, ()), value)
        return land

    def _arrivals(
        self, before: Sequence[float], rates: Rates, slack: float, most: int
    ) -> dict[int, tuple[Value, ...]]:
        fetch: dict[int, tuple[Value, ...]] = {}
        values = [value for value, _ in self.fetched]
        room = most * _largest(values)
        for number in range(len(self.fetched) - 1, -1, -1):
            value, index = self.fetched[number]
            start = before[-1]
            together = _together(values[number:], room)
            for other, use in reversed(self.fetched[number:][:together]):
                start = min(before[use], start) - rates.link_seconds("fetch", other.nbytes)
            start = min(start, before[index] - slack)
            earlier = number + 1 - _together(values[number::-1], room)
            before_it = self.fetched[:earlier][-1:]
            passed = [turn for turn, away in self.turns if turn <= index and value in away]
            earliest = max([*passed, *(use for _, use in before_it)], default=0)
            place = self._start(bisect.bisect_right(before, start) - 1, earliest)
            if place < index:
                fetch[place] = (value, *fetch.get(place, ()))
        return fetch


def _largest(values: Iterable[Value]) -> int:
    return max((v.nbytes for v in values), default=0)


def _together(values: Iterable[Value], room: int) -> int:
    """How many of the first ``values`` may be on the way together."""
    return sum(total <= room for total in itertools.accumulate(v.nbytes for v in values))
