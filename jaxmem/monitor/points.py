"""What is alive at points of a run, and what has grown from one to another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxmem.displayed import Displayed
from jaxmem.errors import TrackError
from jaxmem.monitor.arrays import Kind, Live, alive, kind_of
from jaxmem.monitor.figures import DeviceMemory, HostMemory
from jaxmem.monitor.holders import Holding, holdings, stacks
from jaxmem.units import format_bytes

# Of a long run the first and the last ones are kept.
_MOST_KEPT = 256
# So many of the first, and of the last, know which arrays were alive; the others how many.
_MOST_WITH_IDS = 4
# Kinds of arrays of which is said who holds them.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Point:
    """What was in use at one point.

    Attributes:
        label: its name.
        time: seconds since 1970.
        devices: what each device had in use.
        host: what the process had of its host.
        live: the arrays that were alive.
    """

    label: str
    time: float
    devices: tuple[DeviceMemory, ...]
    host: HostMemory
    live: Live


@dataclass(frozen=True)
class Grown:
    """Arrays of one kind of which there are more.

    Attributes:
        kind: their shape, dtype and memory.
        count: how many more.
        nbytes: bytes of these.
        holdings: who holds those that are still alive, largest first.
    """

    kind: Kind
    count: int
    nbytes: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True)
class Growth(Displayed):
    """What changed from one point to another.

    Attributes:
        start: the first point; ``end`` the second.
        seconds: from one to the other.
        nbytes: how many more bytes of arrays are alive; negative for fewer.
        rss_bytes: how much more resident memory the process has; ``None`` if unknown.
        grown: what there is more of, most bytes first.
    """

    start: str
    end: str
    seconds: float
    nbytes: int
    rss_bytes: int | None
    grown: tuple[Grown, ...]

    @property
    def headline(self) -> str:
        """The change in a sentence."""
        sign = "+" if self.nbytes >= 0 else ""
        return f"from {self.start!r} to {self.end!r}: {sign}{format_bytes(self.nbytes)} of arrays"


@dataclass
class Points:
    """The points of a run, in order.

    Attributes:
        kept: those that are remembered.
        dropped: how many of the middle are not.
    """

    kept: list[Point] = field(default_factory=list)
    dropped: int = 0

    def add(
        self, label: str, devices: tuple[DeviceMemory, ...], host: HostMemory, live: Live
    ) -> None:
        """Remember a point. Which arrays were alive is kept of the first and the last few."""
        self.kept.append(Point(label, time.time(), devices, host, live))
        if len(self.kept) > 2 * _MOST_WITH_IDS:
            at = -_MOST_WITH_IDS - 1
            live = replace(self.kept[at].live, ids=frozenset())
            self.kept[at] = replace(self.kept[at], live=live)
        if len(self.kept) > _MOST_KEPT:
            del self.kept[len(self.kept) // 2]
            self.dropped += 1

    def between(self, start: str | None, end: str | None) -> Growth:
        """What has grown from a point to another, by default from the first to the last.

        Of several points of one name it is the first that starts, and the last that ends.

        Raises:
            TrackError: there is no such point, or there are not two.
        """
        if not self.kept:
            raise TrackError(
                "nothing was tracked yet, so nothing has grown: with jaxmem.track(...) as t: ..."
            )
        first = self.kept[0] if start is None else self._named(start, self.kept)
        last = self.kept[-1] if end is None else self._named(end, self.kept[::-1])
        if first is last:
            raise TrackError(
                f"growth needs two points, and {first.label!r} is the only one that was taken: "
                't.point("a name") takes another.'
            )
        if self.kept.index(first) > self.kept.index(last):
            raise TrackError(
                f"{first.label!r} was taken after {last.label!r}: name the earlier point first."
            )
        return _growth(first, last)

    def _named(self, label: str | None, points: Sequence[Point]) -> Point:
        found = next((point for point in points if point.label == label), None)
        if found is None:
            names = ", ".join(repr(n) for n in dict.fromkeys(p.label for p in self.kept)) or "none"
            raise TrackError(f"there is no point {label!r}: taken were {names}.")
        return found


def _growth(first: Point, last: Point) -> Growth:
    more = {
        kind: count - first.live.counts.get(kind, 0)
        for kind, count in last.live.counts.items()
        if count > first.live.counts.get(kind, 0)
    }
    ordered = sorted(more, key=lambda kind: (-kind.nbytes * more[kind], kind.shape))
    held = _held(ordered[:_MOST_NAMED], first.live)
    grown = tuple(
        Grown(kind, more[kind], kind.nbytes * more[kind], held.get(kind, ())) for kind in ordered
    )
    rss = None
    if first.host.rss is not None and last.host.rss is not None:
        rss = last.host.rss.nbytes - first.host.rss.nbytes
    nbytes = last.live.nbytes - first.live.nbytes
    return Growth(first.label, last.label, last.time - first.time, nbytes, rss, grown)


def _held(kinds: Sequence[Kind], before: Live) -> dict[Kind, tuple[Holding, ...]]:
    """Who holds the arrays of these kinds that were not there before and are alive now."""
    wanted = set(kinds)
    new = [a for a in alive() if id(a) not in before.ids and kind_of(a) in wanted]
    by_kind: dict[Kind, list[Holding]] = {}
    names = {(k.shape, k.dtype): k for k in kinds}
    for holding in holdings(new, stacks()) if new else ():
        kind = names.get((holding.shape, holding.dtype))
        if kind is not None:
            by_kind.setdefault(kind, []).append(holding)
    return {kind: tuple(found) for kind, found in by_kind.items()}
