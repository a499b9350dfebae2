"""``jaxmem frontier``: what every budget would cost."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import jaxmem
from jaxmem.commands import entry, exits, output, platform

HELP = "say what every budget would cost; nothing is compiled"


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    entry.add(parser)
    entry.add_target(parser)
    output.add_output(parser, ".html", ".json", ".csv")


def run(options: Namespace) -> int:
    """Solve for many budgets, and print the curve."""
    platform.choose()
    step, args = entry.asked(options, target=options.target)
    with entry.users_errors(options.entry):
        curve = jaxmem.frontier(step, *args, target=options.target)
    writers = {
        ".html": curve.to_html,
        ".json": output.text_writer(curve.to_json),
        ".csv": curve.to_csv,
    }
    output.give(curve, options, writers)
    return exits.FITS if curve.points[0].peak_bytes <= curve.device_bytes else exits.DOES_NOT_FIT
