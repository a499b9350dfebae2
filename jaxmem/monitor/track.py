"""Watch the memory of a piece of a program while it runs."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, overload

from jaxmem.errors import ArgumentError, DeviceOutOfMemoryError
from jaxmem.monitor.arrays import live_now
from jaxmem.monitor.duty import AT_POINTS, check_seconds
from jaxmem.monitor.figures import DeviceMemory, HostMemory
from jaxmem.monitor.marks import mark, nvtx_library
from jaxmem.monitor.oom.explain import explained
from jaxmem.monitor.oom.failed import raised
from jaxmem.monitor.oom.texts import is_out_of_memory
from jaxmem.monitor.points import Growth, Points
from jaxmem.monitor.published import PUBLISHER
from jaxmem.monitor.samples import Sample
from jaxmem.monitor.sampling import SAMPLER
from jaxmem.monitor.seen import Seen
from jaxmem.monitor.summary import Summary, summarised
from jaxmem.monitor.writers import Lines, Scalars, Writer

START, END = "start", "end"
_SECONDS = 0.25


@overload
def track(
    name: str = "tracked",
    *,
    every: float = _SECONDS,
    jsonl: str | os.PathLike[str] | None = None,
    tensorboard: Any = None,
    nvtx: bool | None = None,
    publish: bool = True,
) -> Tracker: ...
@overload
def track(name: Callable[..., Any]) -> Tracked: ...
def track(
    name: str | Callable[..., Any] = "tracked",
    *,
    every: float = _SECONDS,
    jsonl: str | os.PathLike[str] | None = None,
    tensorboard: Any = None,
    nvtx: bool | None = None,
    publish: bool = True,
) -> Tracker | Tracked:
    """Watches device and host memory while a block or a function runs.

    A thread looks a few times a second; nothing waits for the device, and nothing that is computed
    changes. What each figure stands on is said beside it: the allocator's own peak, the largest of
    some samples, or an estimate from the arrays that are alive, where the allocator says nothing
    (CPUs, and ``XLA_PYTHON_CLIENT_ALLOCATOR=platform``). An out-of-memory error inside is raised as
    :class:`jaxmem.DeviceOutOfMemoryError`, which explains itself.

    Args:
        name: of what is tracked, in displays, files and profiler traces; or, without parentheses,
            the function that is decorated.
        every: seconds between two samples, at least. There are fewer where looking takes more than
            0.2% of the time.
        jsonl: a file that each sample is appended to, as a line of JSON.
        tensorboard: a folder for TensorBoard (needs the extra ``tracking``), or a writer that has
            ``add_scalar(tag, value, step)``.
        nvtx: NVTX ranges, which Nsight Systems shows; ``None`` sets them where the package nvtx is
            installed. ``jax.profiler`` traces get a range in any case.
        publish: let ``jaxmem top`` of the same user see it.

    Returns:
        A context manager and decorator; ``with track(...) as t`` has ``t.point(label)``,
        ``t.growth(start, end)`` and ``t.summary()``. A decorated function has it as ``.track``.

    Raises:
        ArgumentError: an argument is of another kind, or a coroutine or generator is decorated:
            it would only be tracked until it is made.
        TrackError: the file cannot be written.
        MissingExtraError: what was asked for needs a library that is not installed.

    Cost:
        Its own code takes less than 1% of the time, and 5 us of a call in which it does not look.
        Steps of 33 ms with 1200 arrays of state took 0.4% longer where each call was tracked, with
        0.8% to either side (``benchmarks/tracking.py``, on an H200's host). Going through the live
        arrays, at the beginning, the end and at points, takes 1 to 2 us for each of them; at
        the beginning and end of what is called often it is left out where it would take more than
        0.3% of the time.

    >>> import jax.numpy as jnp, jaxmem
    >>> kept = []
    >>> with jaxmem.track("epoch") as t:
    ...     kept.append(jnp.ones((128, 128)))
    >>> t.growth().nbytes
    65536
    """
    if callable(name):
        return Tracker(getattr(name, "__name__", "tracked"))(name)
    return Tracker(
        name, every=every, jsonl=jsonl, tensorboard=tensorboard, nvtx=nvtx, publish=publish
    )


class Tracker:
    """What :func:`track` returns.

    Attributes:
        name: what is tracked.
        every: seconds between samples.
        calls: how often it has begun.
        own_seconds: what beginning, ending and points have taken of their threads.
    """

    def __init__(
        self,
        name: str,
        *,
        every: float = _SECONDS,
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
        nvtx: bool | None = None,
        publish: bool = True,
    ):
        if not isinstance(name, str):
            raise ArgumentError(
                f'track({name!r}): it takes a name, as in track("epoch"), or a function.'
            )
        self.name, self.every, self.calls = name, check_seconds("every", every), 0
        self.own_seconds = 0.0
        self._nvtx, self._publish = nvtx_library(nvtx), publish
        self._writers: list[Writer] = [] if jsonl is None else [Lines(jsonl)]
        self._writers += [] if tensorboard is None else [Scalars(tensorboard)]
        self._problems: list[str] = []
        self._points, self._seen = Points(), Seen()
        self._lock = threading.RLock()
        self._depth = self._skipped = self._samples = 0
        self._seconds = self._began = 0.0
        self._marks = threading.local()

    # --- blocks and functions ----------------------------------------------------------------

    def __enter__(self) -> Tracker:
        marks: list[AbstractContextManager[Any]] = self._marks.__dict__.setdefault("open", [])
        self.begin()
        marks.append(mark(self.name, self._nvtx))
        marks[-1].__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._marks.open.pop().__exit__(None, None, None)
        self.end()
        if isinstance(error, Exception) and is_out_of_memory(error):
            failed = self._explained(error)
            # The traceback keeps this frame, which must keep none of the arrays.
            del error, trace
            raise failed

    def __call__(self, fun: Callable[..., Any]) -> Tracked:
        """``fun``, tracked whenever it is called."""
        return Tracked(fun, self)

    def begin(self) -> None:
        """Watch from here on; ``with`` does it."""
        with self._lock:
            self.calls += 1
            self._depth += 1
            if self._depth > 1:
                return
            self._began = time.perf_counter()
            self._take(START)
            SAMPLER.add(self)

    def end(self) -> None:
        """Watch no more; ``with`` does it."""
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            SAMPLER.remove(self)
            self._take(END)
            self._seconds += time.perf_counter() - self._began

    def _explained(self, error: Exception) -> DeviceOutOfMemoryError:
        return raised(error, explained(error))

    # --- points --------------------------------------------------------------------------------

    def point(self, label: str) -> None:
        """Take down what is alive here, to compare it with another point.

        Args:
            label: its name for :meth:`growth`; may be used again, as in a loop.
        """
        if not isinstance(label, str):
            raise ArgumentError(f'point({label!r}): it takes a name, as in point("loaded").')
        with self._lock:
            self._take(label, always=True)

    def growth(self, start: str | None = None, end: str | None = None) -> Growth:
        """What has grown between two points: arrays by kind, with who holds them.

        Args:
            start: label of the first; by default the beginning.
            end: label of the second; by default the last point.

        Raises:
            TrackError: there is no such point.
        """
        with self._lock:
            return self._points.between(start, end)

    def _take(self, label: str, always: bool = False) -> None:
        if not always and not AT_POINTS.may():
            self._skipped += 1
            self._seen.missed()
            return
        started = time.thread_time()
        live = live_now(remember=True)
        devices, host = SAMPLER.now(live)
        self._points.add(label, devices, host, live)
        self._notice(devices, host, label)
        took = time.thread_time() - started
        AT_POINTS.spend(took)
        self.own_seconds += took

    # --- samples -------------------------------------------------------------------------------

    def look(self, devices: tuple[DeviceMemory, ...], host: HostMemory) -> None:
        """Take what is in use now; the sampler's thread calls it."""
        with self._lock:
            if self._depth:
                self._notice(devices, host, "")

    def _notice(self, devices: tuple[DeviceMemory, ...], host: HostMemory, label: str) -> None:
        self._samples += 1
        self._seen.add(devices, host, begins=label == START, ends=label == END)
        sample = Sample(time.time(), self.name, self.calls, devices, host)
        for writer in list(self._writers):
            try:
                writer.write(sample)
            except Exception as error:
                # Neither a full disk nor somebody's own writer may end a training run, or the
                # thread that samples: it is said in the summary.
                self._writers.remove(writer)
                what = str(error) or type(error).__name__
                self._problems.append(f"samples are no longer written: {what}")
        if self._publish:
            PUBLISHER.publish(sample)

    def summary(self) -> Summary:
        """What was seen so far: to be printed, or shown by a notebook."""
        with self._lock:
            running = time.perf_counter() - self._began if self._depth else 0.0
            problems = [*self._problems, *filter(None, [PUBLISHER.problem * self._publish])]
            return summarised(
                self.name,
                calls=self.calls,
                seconds=self._seconds + running,
                samples=self._samples,
                skipped=self._skipped,
                seen=self._seen,
                points=self._points,
                problems=problems,
            )

    def close(self) -> None:
        """Close the files that samples go to."""
        with self._lock:
            while self._writers:
                self._writers.pop().close()

    def __repr__(self) -> str:
        return f"<jaxmem.track({self.name!r}), {self.calls} calls>"


class Tracked:
    """A function that is tracked whenever it is called; else like the function itself.

    Attributes:
        track: its :class:`Tracker`.
    """

    def __init__(self, fun: Callable[..., Any], tracker: Tracker):
        if not callable(fun):
            raise ArgumentError(f"track decorates functions, got {type(fun).__name__}: {fun!r}")
        if isinstance(fun, type):
            raise ArgumentError(
                f"track decorates functions, and {fun.__name__} is a class, which would not be one "
                "any more: decorate those of its methods that are to be tracked."
            )
        made = "coroutine" if inspect.iscoroutinefunction(fun) else "generator"
        if made == "coroutine" or inspect.isgeneratorfunction(fun):
            name = getattr(fun, "__name__", "the function")
            raise ArgumentError(
                f"{name} makes a {made}, which runs after the call has returned: use "
                f'with jaxmem.track("{name}") inside it.'
            )
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__, self.track = fun, tracker

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.track:
                return self.__wrapped__(*args, **kwargs)
        except DeviceOutOfMemoryError:
            args, kwargs = (), {}  # Its traceback keeps this frame.
            raise

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method it gets the instance first; a bound method has ``.track`` as well."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: Any) -> Tracked:
        """Itself, as of functions."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)
