"""``jaxmem bench``: how long a step takes here, as written and as it is planned."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from jaxmem.commands import entry, exits, output, plan, platform

HELP = "time a step on the device that is here, as written and as planned"


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    entry.add(parser)
    plan.add_budget(parser)
    output.add_output(parser, ".json", ".csv")


def run(options: Namespace) -> int:
    """Plan, time both programs, and print what came of it."""
    platform.choose()
    step, args = entry.asked(options, budget=options.budget)
    from jaxmem.benched import bench

    with entry.users_errors(options.entry):
        found = bench(step, *args, budget=options.budget)
    writers = {".json": output.text_writer(found.to_json), ".csv": found.to_csv}
    output.give(found, options, writers)
    return exits.FITS
