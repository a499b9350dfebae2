"""``jaxmem doctor``: what is installed and works."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from jaxmem.commands import exits, output, platform

HELP = "say what is installed, what works, and how to fix the rest"

ENDS = "exit codes: 0 all works, 1 there is a problem or another error, 64 wrong usage"


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--measure", action="store_true", help="measure the device's rates again")
    output.add_output(parser, ".json")


def run(options: Namespace) -> int:
    """Look, and print what was found."""
    platform.choose()
    from jaxmem.monitor.doctor import diagnose

    diagnosis = diagnose(measure=options.measure)

    def as_json() -> str:
        return output.json_text(asdict(diagnosis))

    try:
        output.write(options.output, {".json": output.text_writer(as_json)})
    finally:  # What cannot be written is printed all the same.
        print(as_json() if options.json else output.cleaned(str(diagnosis)), file=options.answer)
    return exits.FAILED if diagnosis.problems else exits.FITS
