"""``jaxmem diff``: what two plans do differently, or a plan and what would be planned now."""

from __future__ import annotations

import traceback
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxmem
from jaxmem.commands import completion, entry, exits, output, platform
from jaxmem.errors import EntryPointError

if TYPE_CHECKING:
    from jaxmem.planner.plan import Plan

HELP = "say what two plans do differently, or a plan and what would be planned now"
_WHAT = "a plan that was saved, or module:function, which is planned for the other's budget"


def add(parser: ArgumentParser) -> None:
    """Declare the options."""
    for name in ("before", "after"):
        side = parser.add_argument(name, metavar=name.upper(), help=_WHAT)
        completion.completed(side, completion.plans_and_entries)
    output.add_output(parser, ".json", ".csv")


def run(options: Namespace) -> int:
    """Compare, and print the difference.

    An error that nobody foresaw must not end with the code of a difference.
    """
    try:
        return _run(options)
    except (KeyboardInterrupt, BrokenPipeError, jaxmem.JaxmemError):
        raise
    except Exception as error:
        traceback.print_exception(error)
        return exits.TROUBLE


def _run(options: Namespace) -> int:
    sides = (options.before, options.after)
    entries = [name for name in sides if not Path(name).is_file() and ":" in name]
    if len(entries) == len(sides):
        raise EntryPointError(
            f"{sides[0]} and {sides[1]} are both module:function. One of them must be a plan that "
            "was saved, jaxmem plan ... -o plan.json: its budget and target are those of both."
        )
    platform.choose()
    plans = {name: _load(name) for name in sides if name not in entries}
    for name in entries:
        (other,) = plans.values()
        plans[name] = _planned(name, other)
    found = plans[options.before].diff(plans[options.after])
    writers = {".json": output.text_writer(found.to_json), ".csv": found.to_csv}
    output.give(found, options, writers)
    return exits.DIFFERENT if found else exits.SAME


def _load(name: str) -> Plan:
    try:
        return jaxmem.Plan.load(name)
    except FileNotFoundError as error:
        raise EntryPointError(
            f"{name!r} is neither a file with a plan nor module:function. jaxmem plan train:entry "
            "-o plan.json writes one."
        ) from error
    except OSError as error:
        raise EntryPointError(f"{name!r} cannot be read: {error}") from error


def _planned(name: str, other: Plan) -> Plan:
    """The plan of an entry now, as the other plan was asked for; a fitted step has its own way."""
    from jaxmem.fitted import FittedStep
    from jaxmem.policies import Policy
    from jaxmem.runtime.bound import BoundStep

    step, args = entry.load_entry(name)
    settings: dict[str, Any] = {}
    if not isinstance(step, FittedStep | BoundStep):
        here = jaxmem.Target.local(measure=False).name
        settings = {
            "budget": other.budget_bytes,
            "target": None if other.target == here else other.target,
            "policy": Policy.from_json(other.policy) if other.policy else None,
        }
    with entry.users_errors(name):
        return jaxmem.plan(step, *args, **settings)
