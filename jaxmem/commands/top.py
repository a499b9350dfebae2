"""``jaxmem top``: the memory of a running process that tracks itself."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from jaxmem.commands import platform
from jaxmem.errors import EntryPointError

HELP = "show the memory of a running process that uses jaxmem.track, as it changes"


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("process", metavar="PID", nargs="?", help="default: the only one there is")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="default: 1")
    parser.add_argument("--once", action="store_true", help="show it once, and end")


def run(options: Namespace) -> int:
    """Show it until the process ends, or Ctrl-C.

    Raises:
        EntryPointError: JSON is asked for, which a live view has not.
    """
    if options.json:
        raise EntryPointError(
            "jaxmem top has no JSON: jaxmem.track writes its samples to a file as they are taken."
        )
    platform.choose()
    from rich.console import Console

    from jaxmem.monitor import top

    name = options.process
    which = int(name) if name and name.isdigit() else name
    console = Console(file=options.answer)
    return top.run(which, every=options.every, once=options.once or None, console=console)
