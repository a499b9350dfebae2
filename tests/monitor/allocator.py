"""An allocator that says what a test wants, in place of that of a device."""

from __future__ import annotations

from jaxmem.monitor import figures


class Allocator:
    """What an allocator says; its peak never falls."""

    def __init__(self, monkeypatch, **more: int):
        self.more, self.used, self.peak = more, 0, 0
        monkeypatch.setattr(figures, "stats_of", lambda device: self.stats())

    def uses(self, nbytes: int) -> None:
        self.used, self.peak = nbytes, max(self.peak, nbytes)

    def stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.used, "peak_bytes_in_use": self.peak, **self.more}
