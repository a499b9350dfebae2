"""Put off what would interrupt a step between two of its parts, and go on where one failed."""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from jaxmem.errors import StepInterruptedError

# By then the call has returned and its result has a name.
_AFTERWARDS_SECONDS = 0.1


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put off Ctrl-C until the block is through, and a moment longer.

    A step that updates its state part by part must not stop in between: some leaves would be new,
    the others old. Its caller gets the complete result, and the interrupt then reaches whatever
    runs. Python hands signals to the main thread; in others nothing has to be put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None or before in (signal.SIG_IGN, signal.SIG_DFL):
        yield  # Not Python's to handle.
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            # A signal of its own, which also ends a system call that waits.
            main = threading.main_thread().ident
            timer = threading.Timer(_AFTERWARDS_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
            timer.daemon = True
            timer.start()


def interrupted(
    where: str, error: Exception, resume: Callable[[], list[Any]]
) -> StepInterruptedError:
    """What a caller is told of a step that failed half way, with the way to go on."""
    lacking = "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError)
    room = "Make room (jaxmem doctor says how much host memory may be pinned), then "
    return StepInterruptedError(
        f"{where} failed twice: {first_line(error)}\n"
        f"  The state that was given is used up in part. {room if lacking else 'Mend that, then '}"
        "error.resume() runs what is left and returns the results of the step.",
        resume=resume,
    )


def first_line(error: Exception) -> str:
    """What an error says, on one line; ``MemoryError`` often says nothing.

    >>> first_line(ValueError("no room")), first_line(MemoryError())
    ('ValueError: no room', 'MemoryError')
    """
    said = str(error).strip().split("\n", 1)[0][:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def finish(run: Any) -> list[Any]:
    """Go on with a step until it is complete, if need be with as little under way as possible."""
    try:
        run.go_on()
        return run.results()
    except Exception as error:  # Told below. With nothing else under way it may well work.
        where, said = run.where(), first_line(error)
        run.settle()
    try:
        run.go_on(alone=True)
        results = run.results()
    except Exception as again:  # Given to the caller, with the way to go on.
        run.settle()
        raise _interrupted(run, again) from again
    warnings.warn(f"{where} failed, and worked with nothing else under way: {said}", stacklevel=2)
    return results


def _interrupted(run: Any, error: Exception) -> StepInterruptedError:
    def resume() -> list[Any]:
        with undisturbed():
            return finish(run)

    return interrupted(run.where(), error, resume)
