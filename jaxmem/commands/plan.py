"""``jaxmem plan``: what to recompute so that a step fits a budget."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import jaxmem
from jaxmem.commands import entry, exits, output, platform

HELP = "say what to recompute so that a step fits a budget"


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    entry.add(parser)
    entry.add_target(parser)
    add_budget(parser)
    output.add_output(parser, ".html", ".json", ".csv")


def add_budget(parser: ArgumentParser) -> None:
    """Declare ``--budget``."""
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help='bytes on each device: 20GiB, 512MiB, "80%%"; default: all of the device',
    )


def run(options: Namespace) -> int:
    """Plan, print the plan, and write it."""
    platform.choose()
    step, args = entry.asked(options, budget=options.budget, target=options.target)
    with entry.users_errors(options.entry):
        plan = jaxmem.plan(step, *args, budget=options.budget, target=options.target)

    def page(path: Path) -> None:
        """The planned step, beside the step as written unless that is fitted already."""
        is_fitted, before = hasattr(step, "report"), None
        with entry.users_errors(options.entry):
            asked = {"budget": options.budget, "target": options.target}
            fitted = step if is_fitted else jaxmem.fit(step, plan=plan, **asked)
            report = fitted.report(*args)  # pyright: ignore[reportFunctionMemberAccess]
            if not is_fitted:
                before = jaxmem.analyze(step, *args, target=options.target)
        report.to_html(path, plan=plan, before=before)

    output.give(plan, options, {".html": page, ".json": plan.save, ".csv": plan.to_csv})
    return exits.FITS if plan.compiled_bytes <= plan.budget_bytes else exits.DOES_NOT_FIT
