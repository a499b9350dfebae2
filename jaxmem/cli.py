"""The command line: what it takes, and how each command ends.

Exit codes: 0 it fits, 2 it does not fit, 64 the command line is wrong, 130 interrupted, 1 anything
else; ``jaxmem diff`` ends as ``diff(1)`` does, ``jaxmem top`` and ``jaxmem doctor`` say theirs.
Nothing here imports jax before a command needs it, so that ``jaxmem --help`` is quick.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

import jaxmem
from jaxmem.commands import (
    analyze,
    bench,
    completion,
    diff,
    doctor,
    entry,
    frontier,
    output,
    plan,
    top,
)
from jaxmem.commands.exits import (
    CLOSED_PIPE,
    DIFF_HELP,
    DOES_NOT_FIT,
    FAILED,
    HELP,
    INTERRUPTED,
    TROUBLE,
    WRONG_USAGE,
)
from jaxmem.errors import BudgetError, BudgetInfeasibleError, JaxmemError, UnknownTargetError

_OF_A_STEP = {"analyze": analyze, "plan": plan, "frontier": frontier, "bench": bench}
# What --budget and --target say; BudgetInfeasibleError is another thing.
_WRONG_OPTIONS = (BudgetError, UnknownTargetError)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of a command line.

    Args:
        argv: the words after ``jaxmem``; those of this process by default.

    Raises:
        SystemExit: after ``--help`` and ``--version``, and with code 64 on wrong usage.
    """
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        completion.answer(parser)
    options = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and "utf" not in (stream.encoding or "utf").lower():
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with output.answering(options.json, to_the_end=argv is None) as options.answer:
            code = _answered(options)
            options.answer.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # The reader (head, less) has seen enough.
        _drop(options.answer)
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _drop(options.answer)
        print(f"the answer cannot be written: {error.strerror}", file=sys.stderr)
        return options.failed
    return code


def _drop(stream: TextIO) -> None:
    """Lets what is left of a stream go nowhere: Python's own flush at exit must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _answered(options: argparse.Namespace) -> int:
    try:
        return options.run(options)
    except JaxmemError as error:
        if options.traceback:
            traceback.print_exception(error)
        if isinstance(error, BudgetInfeasibleError):
            output.report_infeasible(error, options)
            return DOES_NOT_FIT
        if not options.traceback:
            print(output.cleaned(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return WRONG_USAGE if isinstance(error, _WRONG_OPTIONS) else options.failed


class _Parser(argparse.ArgumentParser):
    """Exits with 64 on wrong usage: argparse's own 2 means "does not fit" here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(WRONG_USAGE, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    look = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="jaxmem",
        description="Run any JAX train step inside a byte budget.",
        epilog=f"{entry.HELP}\n{HELP}",
        formatter_class=look,
    )
    parser.add_argument("--version", action="version", version=f"jaxmem {jaxmem.__version__}")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of tables")
    common.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, module: Any, ends: str = HELP, failed: int = FAILED) -> None:
        made = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            parents=[common],
            epilog=ends,
            formatter_class=look,
        )
        module.add(made)
        made.set_defaults(run=module.run, failed=failed)

    command("doctor", doctor, doctor.ENDS)
    for name, module in _OF_A_STEP.items():
        command(name, module, f"{entry.HELP}\n{HELP}")
    command("diff", diff, f"{entry.HELP}\n{DIFF_HELP}", TROUBLE)
    command("top", top, top.ENDS)
    command("completion", completion, f"{completion.HOW}\n{HELP}")
    return parser
