"""``jaxmem analyze``: where the peak of a step is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import jaxmem
from jaxmem.commands import entry, exits, output, platform

HELP = "say where the peak of a step is and what fills it"


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    entry.add(parser)
    entry.add_target(parser)
    output.add_output(parser, ".html", ".json", ".csv", ".trace.json")


def run(options: Namespace) -> int:
    """Analyze, and print the report."""
    platform.choose()
    from jaxmem.runtime.progress import progress

    step, args = entry.asked(options, target=options.target)
    with progress(None, f"analyzing {options.entry}"), entry.users_errors(options.entry):
        report = jaxmem.analyze(step, *args, target=options.target)
    writers = {
        ".html": report.to_html,
        ".json": output.text_writer(report.to_json),
        ".csv": report.to_csv,
        ".trace.json": report.to_trace,
    }
    output.give(report, options, writers)
    return exits.FITS if report.compiled_bytes <= report.device_bytes else exits.DOES_NOT_FIT
