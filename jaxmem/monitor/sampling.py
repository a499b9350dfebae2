"""A thread that looks at memory a few times a second, for all that is tracked in a process.

It never waits for a device and never blocks a step: it asks allocators what they say anyway, reads
two files of the operating system, and goes through the live arrays as rarely as it must to stay
within its share of the time.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from typing import Protocol

import jax

from jaxmem import _compat
from jaxmem.monitor.arrays import Live, bytes_on, live_now
from jaxmem.monitor.figures import DeviceMemory, Figure, HostMemory, devices_now, rss_now

# The thread ends when nothing was tracked for so long.
_IDLE_SECONDS = 5.0


class Watcher(Protocol):
    """What gets samples."""

    every: float
    """Seconds between two samples, at least."""

    def look(self, devices: tuple[DeviceMemory, ...], host: HostMemory) -> None:
        """Take what is in use now; called on the sampler's thread."""
        ...


class Sampler:
    """Looks for all watchers at once.

    Attributes:
        share: of the time, that samples may take.
        live_share: of the time, that looks at the arrays for them may take.
        spent: seconds of its thread so far.
        looking: of these, seconds in which it went through the live arrays.
    """

    def __init__(self, share: float = 0.002, live_share: float = 0.002):
        self.share, self.live_share = share, live_share
        self.spent = self.looking = 0.0
        self._watchers: dict[int, Watcher] = {}
        # When each is told next, in seconds of ``perf_counter``: of what is tracked for a moment,
        # again and again, too.
        self._due: weakref.WeakKeyDictionary[Watcher, float] = weakref.WeakKeyDictionary()
        self._rests_until = self._wakes = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._live = Live({}, 0.0)
        self._looked = -1e9

    def add(self, watcher: Watcher) -> None:
        """Have a watcher told from now on."""
        with self._changed:
            self._watchers[id(watcher)] = watcher
            due = self._due.setdefault(watcher, 0.0)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="jaxmem-sampler", daemon=True
                )
                self._thread.start()
            elif due < self._wakes:
                self._changed.notify()

    def remove(self, watcher: Watcher) -> None:
        """Tell a watcher no more."""
        with self._changed:
            self._watchers.pop(id(watcher), None)

    def now(self, live: Live | None = None) -> tuple[tuple[DeviceMemory, ...], HostMemory]:
        """What is in use now.

        Args:
            live: the arrays that are alive, where the caller has just looked.
        """
        if not _compat.has_started():  # To ask for devices would start it.
            return (), HostMemory(rss_now(), Figure(0, "estimated"))
        now = time.perf_counter()
        if live is not None or now - self._looked > self._live.seconds / self.live_share:
            self._live, self._looked = live or live_now(), now
            self.looking += 0.0 if live else self._live.seconds
        devices = jax.local_devices()
        host = HostMemory(rss_now(), self._live.pinned)
        return devices_now(bytes_on(self._live, devices), devices), host

    def _run(self) -> None:
        idle_since = time.perf_counter()
        while True:
            with self._changed:
                now = time.perf_counter()
                if not self._watchers:
                    if now - idle_since > _IDLE_SECONDS:
                        self._thread = None
                        return
                    self._wakes = math.inf
                    self._changed.wait(_IDLE_SECONDS)
                    continue
                idle_since = now
                due = min(self._due[w] for w in self._watchers.values())
                self._wakes = max(self._rests_until, due)
                if self._wakes > now:
                    self._changed.wait(min(self._wakes - now, threading.TIMEOUT_MAX))
                    continue
                watchers = [w for w in self._watchers.values() if self._due[w] <= now]
                self._due.update((w, now + w.every) for w in watchers)
            started, looking = time.thread_time(), self.looking
            # A backend that is being cleared, or Python that ends: the next look may work.
            with contextlib.suppress(RuntimeError):
                seen = self.now()
                for watcher in watchers:
                    watcher.look(*seen)
            took = time.thread_time() - started
            self.spent += took
            took -= self.looking - looking
            self._rests_until = time.perf_counter() + took / self.share


SAMPLER = Sampler()
