"""What was in use at most, as far as that can be known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxmem.monitor.figures import DeviceMemory, Figure, HostMemory


@dataclass
class _Device:
    """One device.

    Attributes:
        last: what it had in use last.
        sampled: the most that was seen in use.
        exact: the allocator's peak, where it was set while something was tracked.
        before: the allocator's peak when what is tracked began.
    """

    last: DeviceMemory
    sampled: int
    exact: int = 0
    before: int | None = None


@dataclass
class Seen:
    """The largest amounts while something was tracked.

    An allocator knows its peak since the process started, and nobody can set that back. Where it
    rises while something is tracked, it is the peak of that; where it does not, the peak of what
    is tracked is at least the most that a sample saw.
    """

    _devices: dict[str, _Device] = field(default_factory=dict)
    _rss: int = 0
    _pinned: Figure | None = None
    _host: HostMemory | None = None

    def add(
        self, devices: tuple[DeviceMemory, ...], host: HostMemory, *, begins: bool, ends: bool
    ) -> None:
        """Take what is in use at some moment, at the beginning or end of what is tracked or not."""
        for memory in devices:
            kept = self._devices.setdefault(memory.device, _Device(memory, 0))
            kept.last, kept.sampled = memory, max(kept.sampled, memory.in_use.nbytes)
            if memory.peak is None:
                continue
            if begins:
                kept.before = memory.peak.nbytes
            elif kept.before is not None and memory.peak.nbytes > kept.before:
                kept.exact = max(kept.exact, memory.peak.nbytes)
            if ends:
                kept.before = None
        self._host = host
        self._rss = max(self._rss, host.rss.nbytes if host.rss else 0)
        if self._pinned is None or host.pinned.nbytes > self._pinned.nbytes:
            self._pinned = host.pinned

    def missed(self) -> None:
        """A beginning or end at which nothing was looked at: the peak may be another's."""
        for kept in self._devices.values():
            kept.before = None

    @property
    def devices(self) -> tuple[DeviceMemory, ...]:
        """The last of each device, with the peak of what was tracked."""
        return tuple(replace(d.last, peak=_peak(d)) for d in self._devices.values())

    @property
    def host(self) -> HostMemory | None:
        """The most that the process had of its host."""
        if self._host is None or self._pinned is None:
            return None
        rss = Figure(self._rss, "sampled") if self._rss else None
        return HostMemory(rss, Figure(self._pinned.nbytes, "estimated"))


def _peak(device: _Device) -> Figure:
    if device.exact >= device.sampled and device.exact:
        return Figure(device.exact, "allocator peak")
    return Figure(device.sampled, "sampled")
