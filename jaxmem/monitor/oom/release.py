"""Let go of what a failed step's traceback would keep alive.

An exception keeps its traceback, that keeps frames, and those keep every variable of every function
on the way, arguments of the step included. A notebook or shell keeps the last exception until the
next one, so the memory that ran out stays full, and the next cell fails as well.
"""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from jaxmem.errors import DeviceOutOfMemoryError


def let_go(error: BaseException) -> None:
    """Have functions that an exception has ended give up their variables.

    Those that still run, such as the one that handles it, keep theirs.
    """
    for one in _chain(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            _clear(frame)


def _clear(frame: types.FrameType) -> None:
    """What ``traceback.clear_frames`` does, and the copy of the variables that was looked at."""
    try:
        frame.clear()
    except RuntimeError:
        return  # It still runs.
    # Up to Python 3.12 whoever asked for the variables, such as a notebook that shows where an
    # error came from, left a dictionary of them in the frame. Asking again brings it up to date.
    _ = frame.f_locals


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    left, seen = [error], set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


def after_cell() -> None:
    """In IPython, let go of the functions of a cell that fails with an OOM, once it is shown."""
    shell = _shell()
    if shell is None or getattr(shell, "jaxmem_lets_go", False):
        return
    shell.jaxmem_lets_go = True
    shell.events.register("post_run_cell", _after)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _after(result: Any) -> None:
    error = getattr(result, "error_in_exec", None)
    if error is not None and any(isinstance(e, DeviceOutOfMemoryError) for e in _chain(error)):
        let_go(error)
