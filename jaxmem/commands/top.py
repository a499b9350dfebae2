"""``jaxmem top``: the memory of a running process that tracks itself."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from jaxmem.commands import completion, exits, output, platform

HELP = "show the memory of a running process that uses jaxmem.track, as it changes"
ENDS = (
    "exit codes: 0 it was shown (also when the process ended, or Ctrl-C), 64 wrong usage, 1 there\n"
    "is no such process, it tracks nothing, or a file cannot be read or written"
)


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    process = parser.add_argument(
        "process",
        metavar="PID",
        nargs="?",
        help="a process, or a file that jaxmem.track(jsonl=...) writes; default: all that track",
    )
    completion.completed(process, completion.tracked)
    parser.add_argument("--every", type=_seconds, default=1.0, metavar="SECONDS", help="default: 1")
    parser.add_argument(
        "--once",
        action="store_true",
        help="show it once, and end; so do --json, -o, and where there is no terminal",
    )
    output.add_output(parser, ".json")


def _seconds(text: str) -> float:
    from jaxmem.errors import ArgumentError
    from jaxmem.monitor.duty import check_seconds

    try:
        return check_seconds("it", float(text))
    except (ValueError, ArgumentError) as error:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0") from error


def run(options: Namespace) -> int:
    """Show it until the process ends, or Ctrl-C."""
    platform.choose()
    from rich.console import Console

    from jaxmem.monitor import top

    console = Console(file=options.answer)
    if not (options.once or options.json or options.output) and top.is_live(console):
        return top.run(options.process, every=options.every, once=False, console=console)
    now = top.screen(options.process)
    output.give(now, options, {".json": output.text_writer(now.to_json)})
    return exits.FITS
