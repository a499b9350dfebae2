"""Say what planning is doing: a line with a bar in a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[str], None]


class Part(str):
    """A message about one of several parts of the work; any function of messages takes it.

    >>> said = Part("solving for budget 3 of 8", 2, 8)
    >>> said, said.done, said.total
    ('solving for budget 3 of 8', 2, 8)
    """

    done: int
    total: int

    def __new__(cls, message: str, done: int, total: int) -> Part:
        """A message, how many parts were done before, and how many there are."""
        made = super().__new__(cls, message)
        made.done, made.total = done, total
        return made


def within(report: Report, what: str) -> Report:
    """A function that reports steps of ``what``, which is one of several things to do.

    >>> within(print, "half of it")("compiling")
    half of it: compiling
    """

    def told(message: str) -> None:
        said = f"{what}: {message}"
        is_part = isinstance(message, Part)
        report(Part(said, message.done, message.total) if is_part else said)

    return told


@contextlib.contextmanager
def progress(wanted: bool | Report | None, title: str) -> Iterator[Report]:
    """A function to report steps to.

    Args:
        wanted: ``None`` shows progress where standard error is a terminal, ``True`` also elsewhere,
            in lines, and ``False`` never; a function is called with each message.
        title: what is being planned.
    """
    if callable(wanted) and not isinstance(wanted, bool):
        yield wanted
        return
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not (is_terminal if wanted is None else wanted):
        yield lambda message: None
        return
    if is_terminal:
        with _bar(title) as report:
            yield report
    else:
        yield lambda message: print(f"jaxmem: {title}: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Report]:
    """A line that is gone when the work is done; the bar moves where parts are counted."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=16),
        TimeElapsedColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(escape(f"jaxmem: {title}"), total=None)

        def report(message: str) -> None:
            told = escape(f"jaxmem: {title}: {message}")
            if isinstance(message, Part):
                bars.update(task, description=told, completed=message.done, total=message.total)
            else:
                bars.update(task, description=told)

        yield report
