"""What tracking has seen, put together to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem.displayed import Displayed
from jaxmem.monitor.arrays import alive
from jaxmem.monitor.figures import DeviceMemory, HostMemory
from jaxmem.monitor.holders import Holding, holdings, stacks
from jaxmem.monitor.points import Growth, Points
from jaxmem.monitor.seen import Seen
from jaxmem.units import format_seconds

_MOST_HOLDINGS = 12


@dataclass(frozen=True)
class Summary(Displayed):
    """What was seen of a piece of a program.

    Attributes:
        name: what was tracked.
        calls: how often it began; ``seconds`` in all, of ``samples``.
        seconds: see ``calls``.
        samples: how often memory was looked at.
        devices: what each device has in use, with the peak while it was tracked.
        host: the most that the process had of its host.
        holdings: who holds the arrays that are alive now, largest first.
        live_bytes: bytes of these.
        growth: from the first to the last point; ``None`` without two.
        notes: what was left out, and what did not work.
    """

    name: str
    calls: int
    seconds: float
    samples: int
    devices: tuple[DeviceMemory, ...]
    host: HostMemory | None
    holdings: tuple[Holding, ...]
    live_bytes: int
    growth: Growth | None
    notes: tuple[str, ...]

    @property
    def headline(self) -> str:
        """What was tracked, in a sentence."""
        calls = f", {self.calls} calls" if self.calls > 1 else ""
        return f"{self.name}: {format_seconds(self.seconds)}{calls}, {self.samples} samples"


def summarised(
    name: str,
    *,
    calls: int,
    seconds: float,
    samples: int,
    skipped: int,
    seen: Seen,
    points: Points,
    problems: Sequence[str],
) -> Summary:
    """The summary of what was seen."""
    notes = list(problems)
    if skipped:
        notes.append(
            f"at {skipped} of {2 * calls} beginnings and ends nothing was looked at, to stay below "
            "1% of the time"
        )
    if points.dropped:
        notes.append(f"{points.dropped} points of the middle were not kept")
    growth = points.between(None, None) if len(points.kept) > 1 else None
    held = holdings(alive(), stacks())
    return Summary(
        name=name,
        calls=calls,
        seconds=seconds,
        samples=samples,
        devices=seen.devices,
        host=seen.host,
        holdings=held[:_MOST_HOLDINGS],
        live_bytes=sum(h.nbytes for h in held),
        growth=growth,
        notes=tuple(notes),
    )
