"""Where answers go: standard output that nothing else writes to, tables, JSON, and files."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from jaxmem.errors import BudgetInfeasibleError, EntryPointError, JaxmemError
from jaxmem.files import check_replaceable, replacing

Writer = Callable[[Path], object]


class NamedFile:
    """A file that an answer is to be written to, with the suffix that says in which form."""

    def __init__(self, path: Path, suffix: str):
        self.path, self.suffix = path, suffix


def add_output(parser: argparse.ArgumentParser, *suffixes: str) -> None:
    """Declare ``-o``, for files with one of these suffixes."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        action="append",
        default=[],
        type=partial(_writable, suffixes),
        help=f"write it to a file as well, by its suffix: {', '.join(suffixes)}; may be repeated",
    )


def _writable(suffixes: Sequence[str], name: str) -> NamedFile:
    """Finds out before minutes of planning that the answer could not be written.

    The path is made absolute: the user's own code may go to another directory.
    """
    path = Path(name).absolute()
    fitting = [suffix for suffix in suffixes if path.name.lower().endswith(suffix)]
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is not a file in an existing directory")
    if not fitting:
        raise argparse.ArgumentTypeError(
            f"{name!r} does not say what to write: its suffix must be {' or '.join(suffixes)}"
        )
    try:
        check_replaceable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name!r}: {error.strerror}") from error
    return NamedFile(path, max(fitting, key=len))


def write(files: Sequence[NamedFile], writers: Mapping[str, Writer]) -> None:
    """Write each of the files that were asked for.

    Raises:
        EntryPointError: one cannot be written.
    """
    for file in files:
        try:
            writers[file.suffix](file.path)
        except JaxmemError:
            raise
        except OSError as error:
            raise EntryPointError(
                f"{file.path} cannot be written: {error.strerror or error}"
            ) from error


def text_writer(text: Callable[[], str]) -> Writer:
    """Writes what a function returns."""

    def write_to(path: Path) -> None:
        with replacing(path) as file:
            file.write(text() + "\n")

    return write_to


def json_text(found: Any) -> str:
    """JSON of plain data, always in the same order."""
    return json.dumps(found, indent=1, sort_keys=True)


@contextlib.contextmanager
def answering(only_answer: bool, to_the_end: bool) -> Iterator[TextIO]:
    """The stream that answers are printed to.

    Args:
        only_answer: with ``--json`` nothing else may reach it: not what the user's own code prints
            while it is imported or traced, nor what C code or a child process of it writes. All of
            that goes to standard error.
        to_the_end: also what is printed when the process ends.
    """
    out = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")
    if not only_answer:
        yield out
        return
    out.flush()
    moved = _descriptor(out) == 1 and _descriptor(sys.stderr) == 2
    answer = out
    if moved:
        answer = os.fdopen(os.dup(1), "w", encoding=out.encoding, errors="replace", closefd=False)
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield answer
        answer.flush()
    finally:
        if not to_the_end:
            sys.stdout = out
            if moved:
                os.dup2(answer.fileno(), 1)
                os.close(answer.fileno())


def _descriptor(stream: TextIO | None) -> int | None:
    """The number that C code knows the stream by; ``None`` for one that only Python knows."""
    try:
        return stream.fileno() if stream else None
    except OSError:
        return None


def cleaned(message: str) -> str:
    """A message that cannot steer the terminal."""
    from jaxmem.show.rows import clean

    return "\n".join(clean(line, 2000) for line in message.split("\n"))


def give(found: Any, options: argparse.Namespace, writers: Mapping[str, Writer]) -> None:
    """Write what was found to the files that were asked for, and print it.

    In this order: a reader that has seen enough (``| head``) must not keep a file from being
    written; what cannot be written is printed all the same.

    Raises:
        EntryPointError: a file cannot be written.
    """
    try:
        write(options.output, writers)
    finally:
        show(found, options)


def show(found: Any, options: argparse.Namespace) -> None:
    """Print what was found: JSON if that is asked for, else as it shows itself."""
    from jaxmem.show.shown import shown

    if options.json:
        print(found.to_json(), file=options.answer)
    else:
        show_view(shown(found).view, options.answer)


def show_view(view: Callable[[int], Any], stream: TextIO) -> None:
    """Print a view of a certain width: with colours in a terminal, as plain text elsewhere."""
    from rich.console import Console

    from jaxmem.show.terminal import plain_text, print_view, terminal_width

    width = terminal_width()
    console = Console(width=width, file=stream)
    if console.is_terminal:
        print_view(console, view(width))
    else:
        print(plain_text(view(width), width), file=stream)


def report_infeasible(error: BudgetInfeasibleError, options: argparse.Namespace) -> None:
    """Print what does not fit, and what fills the memory."""
    from jaxmem.show.terminal import infeasible_view

    if options.json:
        holders = [asdict(holder) for holder in error.holders]
        sizes = {"budget_bytes": error.budget_bytes, "smallest_bytes": error.smallest_bytes}
        found = {"fits": False, "error": str(error), **sizes, "holders": holders}
        print(json_text(found), file=options.answer)
    else:
        show_view(lambda width: infeasible_view(error, width), sys.stderr)
