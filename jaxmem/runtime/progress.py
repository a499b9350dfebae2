"""Say what planning is doing: a status line in a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[str], None]


@contextlib.contextmanager
def progress(wanted: bool | Report | None, title: str) -> Iterator[Report]:
    """A function to report steps to.

    Args:
        wanted: ``None`` shows progress where standard error is a terminal, ``True`` and
            ``False`` always or never; a function is called with each message.
        title: what is being planned.
    """
    if callable(wanted) and not isinstance(wanted, bool):
        yield wanted
        return
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda message: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"jaxmem: {title}") as status:
        yield lambda message: status.update(f"jaxmem: {title}: {message}")
