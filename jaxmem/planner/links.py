"""When copies between a device and its host end, on paper: each way is slower beside the other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from jaxmem.program.cost import Rates
from jaxmem.program.ir import Transfer

_OTHER: dict[Transfer, Transfer] = {"send": "fetch", "fetch": "send"}


def _at_zero() -> dict[Transfer, float]:
    return dict.fromkeys(_OTHER, 0.0)


@dataclass
class Links:
    """Both ways of a link, each of which takes one copy after the other.

    A program of an H200 that sent 18.3 GB and fetched 23.6 took 757 ms. One after the other the
    copies alone are 862 ms; with each way as fast as it is alone the program is 674, and 725 with
    the 42 GB/s that each was measured to keep while both are busy, instead of 48 and 49.

    Attributes:
        rates: of the link.
        free: when each way has done what it was asked to.
        ended: when each copy has arrived.
    """

    rates: Rates
    free: dict[Transfer, float] = field(default_factory=_at_zero)
    ended: dict[Hashable, float] = field(default_factory=dict)
    _busy_since: dict[Transfer, float] = field(default_factory=_at_zero)
    _last: dict[Transfer, Hashable] = field(default_factory=dict)

    def copy(self, way: Transfer, result: Hashable, nbytes: int, earliest: float) -> None:
        """Put a copy into the queue of its way.

        Args:
            way: to the host or from it.
            result: the copy; ``ended`` says when it is there.
            nbytes: of it.
            earliest: when what is copied is there and the copy is asked for.
        """
        other, left = _OTHER[way], self.rates.link_seconds(way, nbytes)
        start = max(earliest, self.free[way])
        if start > self.free[way]:
            self._busy_since[way] = start
        before = min(left, max(0.0, self._busy_since[other] - start))
        shared_from = start + before
        room = max(0.0, self.free[other] - shared_from)
        # Seconds that either has left alone take longer beside the other.
        beside = min(room / self._share(other), (left - before) / self._share(way))
        self.free[way] = shared_from + beside + left - before - beside * self._share(way)
        if beside:
            # What goes the other way was taken to be alone there.
            self.free[other] += beside * (1 - self._share(other))
            self.ended[self._last[other]] = self.free[other]
        self.ended[result], self._last[way] = self.free[way], result

    def _share(self, way: Transfer) -> float:
        """What a way keeps of its rate while the other is busy."""
        both = self.rates.duplex_bytes_per_second
        alone = self.rates.d2h_bytes_per_second, self.rates.h2d_bytes_per_second
        return min(1.0, both / alone[way == "fetch"]) if both else 1.0
