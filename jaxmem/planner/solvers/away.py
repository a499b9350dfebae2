"""Chains of blocks with a host: what is kept on the way forward may wait in host memory.

The table of :mod:`jaxmem.planner.solvers.chain` has one more side: how many bytes of a stage and of
those behind it are away (recomputation and offload of a chain in one dynamic program: Beaumont,
Eyraud-Dubois and Shilova 2021). That is all it needs to know of the links. What a stage leaves on
the host is ready when the stage has run, so the copies of it and of all stages behind it have the
time in which those run; on the way back they have the backward passes of those. Both bound how much
may be away from each stage on, and the whole is bounded by the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jaxmem.planner.solvers.chain import ChainTable, Solution, Visit

_ALL = slice(None)
# Bytes in host memory are counted in this many parts of the most that may be there.
_UNITS = 96


class Host(NamedTuple):
    """Where bytes may wait.

    Attributes:
        nbytes: how many bytes it has room for.
        d2h_bytes_per_second: how fast they get there, ``h2d_bytes_per_second`` back.
        exposed_seconds: how long the links may keep the device waiting.
    """

    nbytes: int
    d2h_bytes_per_second: float
    h2d_bytes_per_second: float
    exposed_seconds: float = 0.0


class _Way(NamedTuple):
    """How a segment begins: its first stage is kept so, or run ahead to ``ahead``.

    ``stays`` is the option of which the values stay on the device.
    """

    option: int = 0
    stays: int = 0
    ahead: int = 0


class AwayTable:
    """The least forward work from every stage to the end, with some of what is kept away.

    Args:
        table: the chain without a host; what runs again runs as it says.
        host: where bytes may wait.
        over: says that there is no time left; the table is then not ``complete``.

    Attributes:
        complete: whether it knows everything; ``full`` whether the links could move more than the
            host has room for.
        first: [stages, slots + 1, units + 1]: seconds of forward work from stage s on, when at most
            that many units of memory on the host are used.
    """

    def __init__(self, table: ChainTable, host: Host, over: Callable[[], bool] | None = None):
        self.table, self.stages, self.host = table, table.stages, host
        self.slots = table.slots
        self.full = host.nbytes < self._most_bytes(0, 0)
        most = max(1, min(host.nbytes, self._most_bytes(0, 0)))
        self.unit_bytes = -(-most // _UNITS)
        self.units = most // self.unit_bytes
        count = len(self.stages)
        self.first = np.full((count, table.slots + 1, self.units + 1), np.inf)
        # The same with what is handed to the stage taken from the memory, on the device and away.
        self._held, self._away = self.first.copy(), self.first.copy()
        self.complete = False
        for s in range(count - 1, -1, -1):
            if over is not None and over():
                return
            costs = [cost for _, cost in self._kept(s, 0)]
            if s < count - 2:
                costs.append(self._ahead(s).min(axis=0))
            self.first[s] = self._capped(np.min(costs, axis=0), self._most(s, s))
            if s:
                self._hand(s)
        self.complete = True

    def _hand(self, s: int) -> None:
        """What is handed to stage s stays, or is on the device only while that stage runs."""
        given = self.table.handed[s - 1]
        self._held[s] = _shifted(self.first[s], given, 0)
        if 0 < given <= self.table.slots and s < len(self.stages) - 1:
            alone = np.min([cost for _, cost in self._kept(s, given)], axis=0)
            alone = self._capped(alone, self._most(s, s))
            moved = _shifted(alone, 0, self._units_of(self.stages[s - 1].handed_bytes))
            self._away[s] = self._capped(moved, self._most(s - 1, s))
            np.minimum(self._held[s], self._away[s], out=self._held[s])

    def _units_of(self, nbytes: int) -> int:
        """To the nearest: the line has the last word, and rounding up would add up."""
        return round(nbytes / self.unit_bytes)

    def _most(self, made: int, read: int) -> int:
        """The most units that may be away of what stage ``made`` makes, and of all behind it."""
        return min(self.units, self._most_bytes(made, read) // self.unit_bytes)

    def _most_bytes(self, made: int, read: int) -> int:
        """The same in bytes; as many as the links can move.

        ``read`` is the stage whose backward pass reads it.
        """
        table, host = self.table, self.host
        ahead = table.forward[-1] - table.forward[made + 1] + host.exposed_seconds
        behind = sum(s.back_seconds for s in self.stages[read + 1 :]) + host.exposed_seconds
        return int(min(ahead * host.d2h_bytes_per_second, behind * host.h2d_bytes_per_second))

    @staticmethod
    def _capped(cost: np.ndarray, most: int) -> np.ndarray:
        """More units than these do not help."""
        cost[:, most + 1 :] = cost[:, most : most + 1]
        return cost

    def _kept(self, s: int, given: int) -> Iterator[tuple[_Way, np.ndarray]]:
        """For each way to keep stage s the cost of keeping it so and going on to s+1.

        ``given`` slots more are taken while stage s itself runs.
        """
        stage, table = self.stages[s], self.table
        last = s == len(self.stages) - 1
        pairs = [(n, n) for n in range(len(stage.options))]
        for stays, number in (*pairs, *(() if last else stage.movable)):
            whole = stage.options[number]
            kept = table.slots_of(stage.options[stays].kept_bytes)
            moved = max(0, whole.kept_bytes - stage.options[stays].kept_bytes)
            again = stage.seconds + whole.again_seconds
            if last:
                cost = np.full(self.first.shape[1:], again)
            else:
                cost = _shifted(self._held[s + 1], kept, self._units_of(moved)) + again
            need = table.slots_of(whole.working_bytes) + table.behind[s]
            least = max(table.slots_of(whole.kept_bytes) + need, table.running[s]) + given
            cost[:least] = np.inf
            yield _Way(number, stays), cost

    def _ahead(self, s: int, some: slice = _ALL, units: slice = _ALL) -> np.ndarray:
        """[stages - s - 2, slots + 1, units + 1]: the cost of running ahead to stage s+2, ..."""
        table, last = self.table, len(self.stages) - 1
        again = table.again[s, s + 1 : last, some][:, :, None]
        seconds = (table.forward[s + 2 : last + 1] - table.forward[s])[:, None, None]
        cost = self._held[s + 2 : last + 1, some, units] + again + seconds
        slots = np.arange(table.slots + 1)[None, some]
        cost[slots < table.running_ahead(s, last)[:, None]] = np.inf
        return cost

    def solution(self, slots: int) -> Solution | None:
        """The program for that much memory of the device; ``None`` if that is too little."""
        seconds = float(self.first[0, slots, self.units])
        if not np.isfinite(seconds):
            return None
        handed: set[int] = set()
        stays: dict[int, int] = {}
        visits = tuple(self._visits(0, slots, self.units, 0, (frozenset(), ()), handed, stays))
        return Solution(seconds, visits, frozenset(handed), stays)

    def _visits(
        self,
        s: int,
        slots: int,
        units: int,
        given: int,
        path: tuple[frozenset[int], tuple[tuple[int, int], ...]],
        handed: set[int],
        stays: dict[int, int],
    ) -> Iterator[Visit]:
        """The backward passes from stage s on.

        ``handed`` and ``stays`` are told what is away; ``given`` slots of it are handed to s.
        """
        units = min(units, self._most(s, s))
        way, (held, kept) = self._way(s, slots, units, given), path
        if way.ahead:
            after = (held | {way.ahead - 1}, kept)
            yield from self._next(way.ahead, slots, units, after, handed, stays)
            yield from self.table.visits(s, way.ahead - 1, slots, False, held, kept)
            return
        if s < len(self.stages) - 1:
            options = self.stages[s].options
            slots -= self.table.slots_of(options[way.stays].kept_bytes)
            if way.stays != way.option:
                stays[s] = way.stays
                moved = options[way.option].kept_bytes - options[way.stays].kept_bytes
                units -= self._units_of(max(0, moved))
            after = (held | {s}, (*kept, (s, way.option)))
            yield from self._next(s + 1, slots, units, after, handed, stays)
        yield Visit(s, way.option, held, kept)

    def _next(
        self,
        s: int,
        slots: int,
        units: int,
        path: tuple[frozenset[int], tuple[tuple[int, int], ...]],
        handed: set[int],
        stays: dict[int, int],
    ) -> Iterator[Visit]:
        """The backward passes from stage s on, to which something is handed and held meanwhile."""
        given = self.table.handed[s - 1]
        there = self.first[s, slots - given, units] if slots >= given else np.inf
        if self._away[s, slots, units] < there:
            handed.add(s - 1)
            units = min(units, self._most(s - 1, s))
            units -= self._units_of(self.stages[s - 1].handed_bytes)
            return self._visits(s, slots, units, given, path, handed, stays)
        return self._visits(s, slots - given, units, 0, path, handed, stays)

    def _way(self, s: int, slots: int, units: int, given: int) -> _Way:
        """How the best program from stage s on begins."""
        ways = [(cost[slots, units], way) for way, cost in self._kept(s, given)]
        if not given and s < len(self.stages) - 2:
            ahead = self._ahead(s, slice(slots, slots + 1), slice(units, units + 1)).ravel()
            ways.append((ahead.min(), _Way(ahead=s + 2 + int(np.argmin(ahead)))))
        return min(ways, key=lambda found: found[0])[1]


def _shifted(cost: np.ndarray, slots: int, units: int) -> np.ndarray:
    """A cost [slots + 1, units + 1] with that many of both taken by something else."""
    moved = np.full(cost.shape, np.inf)
    if slots < cost.shape[0] and units < cost.shape[1]:
        moved[slots:, units:] = cost[: cost.shape[0] - slots, : cost.shape[1] - units]
    return moved
