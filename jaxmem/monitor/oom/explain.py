"""Explain an out-of-memory error: anyone's, or that of a fitted or tracked step."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxmem.errors import ArgumentError, DeviceOutOfMemoryError
from jaxmem.monitor.arrays import Live, alive, has_failed, live_now
from jaxmem.monitor.duty import check_seconds
from jaxmem.monitor.figures import (
    DeviceMemory,
    Figure,
    HostMemory,
    devices_now,
    name_of,
    rss_now,
)
from jaxmem.monitor.holders import holdings, stacks
from jaxmem.monitor.oom import calls, release, steps, texts
from jaxmem.monitor.oom.explanation import Explanation
from jaxmem.monitor.oom.fixes import Situation, ranked
from jaxmem.targets.target import Target

_MOST_HOLDINGS = 12


def explain_oom(
    error: BaseException | None = None,
    *,
    seconds: float = steps.MOST_PLANNING_SECONDS,
    free: bool = True,
) -> Explanation:
    """Why memory ran out: what fills it, who holds that, and what would help.

    For any exception in which XLA, an allocator or NumPy says that memory ran out, of eager or
    jitted code, of a compile, of pinned host memory. Where it came out of a call of a jitted
    function whose arguments are variables, that function is traced again, and planned for what is
    left of the device.

    Args:
        error: the exception; ``None`` takes the one that is being handled, or in a notebook or a
            shell the last one that nobody handled.
        seconds: the most that planning may take; 0 plans nothing.
        free: let functions that the exception has ended give up their variables, so that its
            traceback keeps no array alive. A debugger that looks at it later finds none.

    Returns:
        An :class:`~jaxmem.monitor.oom.explanation.Explanation`, to be printed or read.

    Raises:
        ArgumentError: it is no exception, or not one of memory that ran out; or ``seconds`` is no
            number of seconds.

    Cost:
        A second at most for looking who holds arrays; for a jitted function one trace, and
        compiles as for a plan.

    >>> error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.")
    >>> explain_oom(error).requested_bytes
    4096
    """
    if error is None:
        error = sys.exc_info()[1] or getattr(sys, "last_exc", None)
        error = error or getattr(sys, "last_value", None)
        if error is None:
            raise ArgumentError(
                "there is no exception to explain: call explain_oom(error) where one was caught, "
                "or after a cell of a notebook failed."
            )
    if not isinstance(error, BaseException):
        raise ArgumentError(
            f"explain_oom takes an exception, got {type(error).__name__}: pass the one that was "
            "caught, except Exception as error: explain_oom(error)."
        )
    check_seconds("seconds", seconds, least=0.0)
    found = next(_out_of_memory(error), None)
    if found is None:
        raise ArgumentError(
            f"{type(error).__name__} is no out-of-memory error: {str(error)[:200]!r}. Memory that "
            "ran out says RESOURCE_EXHAUSTED, or that an allocation failed."
        )
    if isinstance(found, DeviceOutOfMemoryError):
        explanation = found.explanation
    else:
        explanation = explained(found, seconds=seconds)
    if free:
        release.let_go(error)
    return explanation


def _out_of_memory(error: BaseException) -> Iterator[BaseException]:
    """What an exception was made from that says so: itself, its causes, those of a group."""
    left, seen = [error], set()
    while left:
        one = left.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, DeviceOutOfMemoryError) or texts.is_out_of_memory(one):
            yield one
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
        left += [other for other in (one.__cause__, one.__context__) if other is not None]


def explained(
    error: BaseException,
    running: steps.Running | None = None,
    *,
    seconds: float = steps.MOST_PLANNING_SECONDS,
    line: str = "",
) -> Explanation:
    """The explanation of an error that says that memory ran out.

    Args:
        error: the error.
        running: the step that it came out of, if that is known.
        seconds: the most that planning may take.
        line: the user's line, if that is known.
    """
    told = texts.read(error)
    notes: list[str] = []
    frames = stacks(error.__traceback__)
    called = None
    if running is None and told.where in ("device", "compile"):
        called = calls.find(error.__traceback__)
        if called is not None and seconds > 0:
            running, why = steps.running_of(called)
            notes += [why] if why else []
    return _put_together(told, running, called, frames, notes, seconds, line or _line(error))


def _put_together(
    told: texts.Told,
    running: steps.Running | None,
    called: calls.Called | None,
    frames: Sequence[types.FrameType],
    notes: list[str],
    seconds: float,
    line: str,
) -> Explanation:
    arrays = [array for array in alive() if not has_failed(array)]
    live = live_now(arrays)
    device = fullest(live, running)
    memory = _memory_of(device, live)
    held = holdings(arrays, frames)
    own = running.arguments if running else ()
    known = set(map(id, own))
    report, why = steps.reported(running) if running else (None, "")
    notes += [why] if why else []
    needs = running.compiled_bytes if running else None
    if needs is None and report is not None:
        needs = report.compiled_bytes
    situation = Situation(
        told=told,
        device=memory,
        own_bytes=_bytes_here(own, device),
        limit_bytes=limit_of(memory, told),
        beside=holdings([a for a in arrays if id(a) not in known], frames),
        seconds=seconds if jax.process_count() == 1 else 0,
    )
    fixes, more, _ = ranked(situation, running, report, needs)
    return Explanation(
        where=told.where,
        doing=running.name if running else called.name if called else "",
        line=line,
        message=told.message,
        requested_bytes=told.requested_bytes,
        device=memory,
        host=HostMemory(rss_now(), live.pinned),
        largest_free=_largest_free(memory, told),
        program_bytes=needs,
        report=report,
        buffers=told.buffers,
        live_bytes=live.on(name_of(device)),
        holdings=held[:_MOST_HOLDINGS],
        fixes=tuple(fixes),
        notes=(*notes, *more),
    )


def _line(error: BaseException) -> str:
    return calls.line_of(error.__traceback__)


def fullest(live: Live, running: steps.Running | None) -> Any:
    """The device that ran out: the one of the step, or the one with most in use."""
    devices = jax.local_devices()
    if running is not None:
        arrays = [a for a in running.arguments if steps.is_alive(a)]
        used = {d for a in arrays for d in a.sharding.addressable_devices}
        devices = [d for d in devices if d in used] or devices
    memory = devices_now([live.on(name_of(d)) for d in devices], devices)
    most = max(range(len(devices)), key=lambda n: memory[n].in_use.nbytes)
    return devices[most]


def _memory_of(device: Any, live: Live) -> DeviceMemory:
    return devices_now([live.on(name_of(device))], [device])[0]


def limit_of(memory: DeviceMemory, told: texts.Told) -> int | None:
    """What the process may have of the device."""
    if told.limit_bytes is not None:
        return told.limit_bytes
    if memory.limit is not None:
        return memory.limit.nbytes
    try:
        return Target.local(measure=False).device_bytes
    except Exception:  # A device that jaxmem does not know: no limit is named then.
        return None


def _largest_free(memory: DeviceMemory, told: texts.Told) -> Figure | None:
    """What the allocator says of it; else what follows from the request that it refused."""
    if memory.largest_free is not None:
        return memory.largest_free
    if told.requested_bytes is not None and told.where in ("device", "compile"):
        return Figure(told.requested_bytes, "inferred")
    return None


def _bytes_here(arrays: Sequence[Any], device: Any) -> int:
    """Bytes of arrays on a device, each once."""
    unique = {id(a): a for a in arrays if steps.is_alive(a)}.values()
    here = 0
    for array in unique:
        if device in array.sharding.addressable_devices:
            shape = array.sharding.shard_shape(array.shape)
            here += math.prod(shape) * array.dtype.itemsize
    return here
