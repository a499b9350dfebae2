"""One look at all memory of a process, as data and as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from jaxmem.errors import TrackError
from jaxmem.monitor.figures import DeviceMemory, Figure, HostMemory, How

_FIGURES = ("in_use", "peak", "reserved", "largest_free", "limit")


@dataclass(frozen=True)
class Sample:
    """What was in use at one moment.

    Attributes:
        time: seconds since 1970.
        name: what was tracked.
        calls: how often it had begun by then.
        devices: what each device had in use.
        host: what the process had of its host.
    """

    time: float
    name: str
    calls: int
    devices: tuple[DeviceMemory, ...]
    host: HostMemory

    def to_dict(self) -> dict[str, Any]:
        """The sample as what JSON knows; each figure says how it came about."""
        return {
            "time": self.time,
            "name": self.name,
            "calls": self.calls,
            "devices": [
                {"device": d.device, **{n: _figure(getattr(d, n)) for n in _FIGURES}}
                for d in self.devices
            ],
            "rss": _figure(self.host.rss),
            "pinned": _figure(self.host.pinned),
        }

    def to_json(self) -> str:
        """The sample as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, kept: Any) -> Sample:
        """A sample as it was before :meth:`to_dict`.

        Raises:
            TrackError: this is none.
        """
        try:
            devices = tuple(
                DeviceMemory(str(d["device"]), **{n: _read(d[n]) for n in _FIGURES})
                for d in kept["devices"]
            )
            if any(d.in_use is None for d in devices) or kept["pinned"] is None:
                raise ValueError
            host = HostMemory(_read(kept["rss"]), _read(kept["pinned"]))  # pyright: ignore
            return cls(float(kept["time"]), str(kept["name"]), int(kept["calls"]), devices, host)
        except (KeyError, TypeError, ValueError) as error:
            raise TrackError("this is no sample of jaxmem.track") from error


def _figure(figure: Figure | None) -> dict[str, Any] | None:
    return None if figure is None else {"bytes": figure.nbytes, "how": figure.how}


def _read(kept: Any) -> Any:
    if kept is None:
        return None
    if kept["how"] not in get_args(How):
        raise ValueError
    return Figure(int(kept["bytes"]), kept["how"])
