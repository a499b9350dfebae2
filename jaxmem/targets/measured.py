"""Rates that were measured here, once for each machine: in memory, and on disk between processes.

The same plan has to come out tomorrow, and a measurement never comes out the same twice, so what
was measured first counts until it is measured again on purpose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import jax
from jaxlib.version import __version__ as jaxlib_version

from jaxmem.targets import measuring

# 2: what a device does that is nearly full is no longer kept. 3: links are measured while all
# devices of the process copy. 4: products of float32 are tuned, and starting is no part of a rate.
SCHEMA = 4
WHEN_FREE = "jaxmem doctor --measure, while the device is free, measures these and keeps them"
_DRIVER = Path("/proc/driver/nvidia/version")
_LINKS = ("h2d_bytes_per_second", "d2h_bytes_per_second", "duplex_bytes_per_second")
_BYTES = ("hbm_bytes_per_second", *_LINKS, "d2d_bytes_per_second")


@dataclass(frozen=True)
class Measurement:
    """What was measured on one device; ``None`` where there is nothing to measure, or it failed.

    Attributes:
        flops: FLOP/s of matrix products by dtype name.
        hbm_bytes_per_second: device memory, read and written by one kernel.
        h2d_bytes_per_second: from pinned host memory, one way, while every other device of this
            process copies as much: that of the slowest of them.
        d2h_bytes_per_second: to pinned host memory, likewise.
        duplex_bytes_per_second: each way while both run, likewise.
        d2d_bytes_per_second: to another device of this process, one way.
        when: date and time, UTC.
        seconds: how long it took.
        notes: what could not be measured, and why.
        part_seconds: how long each part took, and of that its data and its compile.
        crowded: whether a part was left out, or failed, as too little of the device was free.
    """

    flops: dict[str, float]
    hbm_bytes_per_second: float | None
    h2d_bytes_per_second: float | None
    d2h_bytes_per_second: float | None
    duplex_bytes_per_second: float | None
    d2d_bytes_per_second: float | None
    when: str
    seconds: float
    notes: tuple[str, ...] = ()
    part_seconds: dict[str, float] = field(default_factory=dict)
    crowded: bool = False

    @property
    def rates(self) -> dict[str, float]:
        """The fields of a target that were measured, but for ``flops``."""
        found = {name: getattr(self, name) for name in _BYTES}
        return {name: rate for name, rate in found.items() if rate is not None}

    @property
    def summary(self) -> str:
        """One line that says what was measured, and when; the same wherever it is read."""
        what = [*sorted(self.flops), *(name.split("_")[0] for name in self.rates)]
        return f"rates measured {self.when}: {', '.join(what)}"


@dataclass(frozen=True)
class Found:
    """Where the rates of this machine come from.

    Attributes:
        how: ``"measured"`` now, ``"cached"`` by an earlier process, or ``"assumed"``.
        measurement: what was measured; ``None`` where the rates are assumed.
        why: why they are assumed, or why the measurement could not be kept; else ``""``.
        path: the file that keeps it.
    """

    how: Literal["measured", "cached", "assumed"]
    measurement: Measurement | None = None
    why: str = ""
    path: str = ""


@dataclass
class _Known:
    lock: threading.RLock = field(default_factory=threading.RLock)
    found: dict[str, Found] = field(default_factory=dict)


_known = _Known()


def rates_of(device: Any, fields: dict[str, Any], *, again: bool = False) -> Found:
    """What was measured on ``device``, now or before.

    Args:
        device: a device of this process.
        fields: of its target as the table has it, or as they are assumed.
        again: measure even if it was measured before.
    """
    key = key_of(device)
    name = json.dumps(key, sort_keys=True)
    with _known.lock:
        if again or name not in _known.found:
            _known.found[name] = _found(device, fields, key, again)
        return _known.found[name]


def _found(device: Any, fields: dict[str, Any], key: dict[str, Any], again: bool) -> Found:
    path = cache_folder() / f"rates-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"
    if not again and (kept := load(path, key)):
        return Found("cached", kept, path=str(path))
    try:
        made = measure(device, fields)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Found("assumed", why=f"measuring failed: {reason[:200]}")
    # Of two processes that measured at the same time, both go on with what the first one kept.
    if not again and (kept := load(path, key)):
        return Found("cached", kept, path=str(path))
    if not made.flops and not made.rates:
        return Found("assumed", why="; ".join([*made.notes, *_way_out(made)]))
    if made.crowded:
        why = "not kept for the next process, as too little of the device was free for all of it"
        return Found("measured", made, why=why)
    try:
        store(path, key, made)
    except OSError as error:
        return Found("measured", made, why=f"not kept for the next process: {error}")
    return Found("measured", made, path=str(path))


def measure(device: Any, fields: dict[str, Any]) -> Measurement:
    """Measure a device.

    Args:
        device: a device of this process.
        fields: of its target as the table has it, or as they are assumed.

    Cost:
        A few seconds, with six compiles on a GPU; at most half of the device memory that is free
        on all devices of this process, and 1.5 GiB of it; and, on a GPU, 0.4 GiB of pinned host
        memory for each of them, which XLA's pool keeps for the process.
    """
    started = time.perf_counter()
    with measuring.undisturbed():
        others = [d for d in jax.local_devices(backend=device.platform) if d != device]
        free = min(measuring.free_bytes(d, fields["device_bytes"]) for d in (device, *others))
        gauge = measuring.Gauge(device, free, others)
        flops = gauge.flops(fields["flops"])
        memory = gauge.memory()
        links = peer = None
        if device.platform != "cpu":
            if fields["pinned_host_bytes"]:
                links = gauge.links()
            peer = gauge.peer(others[0]) if others else None
    down, up, both = links or (None, None, None)
    return Measurement(
        flops=flops,
        hbm_bytes_per_second=memory,
        h2d_bytes_per_second=up,
        d2h_bytes_per_second=down,
        duplex_bytes_per_second=both,
        d2d_bytes_per_second=peer,
        when=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        seconds=round(time.perf_counter() - started, 2),
        notes=tuple(gauge.notes),
        crowded=gauge.crowded,
        part_seconds={part: round(seconds, 3) for part, seconds in gauge.seconds.items()},
    )


# --- on disk -----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where measurements are kept: ``JAXMEM_CACHE_DIR``, or the user's cache directory."""
    if given := os.environ.get("JAXMEM_CACHE_DIR"):
        return Path(given)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "jaxmem"
    with contextlib.suppress(RuntimeError):  # a user without a home directory
        home = Path.home()
        return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "jaxmem"
    return Path(tempfile.gettempdir()) / "jaxmem"


def key_of(device: Any) -> dict[str, Any]:
    """What a measurement holds for; another driver or jaxlib is measured anew."""
    key = {
        "device_kind": device.device_kind,
        "devices": jax.local_device_count(),
        "jaxlib": jaxlib_version,
        "platform_version": device.client.platform_version,
    }
    if device.platform == "cpu":
        return {**key, "machine": platform.machine(), "cores": os.cpu_count()}
    driver = ""
    with contextlib.suppress(OSError):
        driver = _DRIVER.read_text().splitlines()[0]
    return {**key, "driver": driver}


def load(path: Path, key: dict[str, Any]) -> Measurement | None:
    """What a file keeps; ``None`` where it is missing, damaged, or of something else."""
    try:
        kept = json.loads(path.read_text())
        if kept["schema"] != SCHEMA or kept["key"] != key:
            return None
        values = kept["measured"]
        made = Measurement(**{**values, "notes": tuple(values["notes"])})
        rates = [*made.flops.values(), *made.rates.values()]
        sound = all(math.isfinite(rate) and rate > 0 for rate in rates) and rates
        return made if sound and isinstance(made.when, str) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def store(path: Path, key: dict[str, Any], made: Measurement) -> None:
    """Write a measurement, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "key": key, "measured": dataclasses.asdict(made)}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _way_out(made: Measurement) -> list[str]:
    return [WHEN_FREE] if made.crowded else []


def applied(fields: dict[str, Any], found: Found) -> dict[str, Any]:
    """The fields of a target with what was measured in the place of what was assumed."""
    made = found.measurement
    if made is None:
        reason = (f"rates assumed: {found.why}",) if found.why else ()
        return {**fields, "sources": (*reason, *fields["sources"])}
    # The devices that JAX makes of one processor share it.
    share = fields["devices_per_host"] if fields["platform"] == "cpu" else 1
    rates = {name: rate / share for name, rate in made.rates.items()}
    flops = {**fields["flops"], **{name: rate / share for name, rate in made.flops.items()}}
    said = (made.summary, *made.notes, *_way_out(made), "the rest:")
    return {**fields, **rates, "flops": flops, "sources": (*said, *fields["sources"])}
