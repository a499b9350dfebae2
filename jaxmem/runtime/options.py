"""The options of a fitted step that have to agree with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmem.errors import ArgumentError
from jaxmem.planner.deadline import check_time_limit
from jaxmem.planner.plan import Plan
from jaxmem.program.microbatches import Auto
from jaxmem.runtime import policed
from jaxmem.runtime.bench import check_measure

# Those that a step keeps when it is fitted again for another budget, and types with a short form.
_KEPT = ("static_argnums", "target", "host_budget", "host", "policy", "mesh", "shard")
_WRITTEN = (str, int, tuple, list, Auto)


def check_options(verify: Any, plan: Any, policy: Any, measure: Any, time_limit: Any) -> None:
    """Check what ``fit`` was given, but for budgets and the step itself.

    Raises:
        ArgumentError: an option is of another kind, or two contradict each other.
    """
    if verify not in (True, False, "full"):
        raise ArgumentError(f'verify is {verify!r}: it takes True, False or "full".')
    if not (plan is None or isinstance(plan, Plan)):
        raise ArgumentError(
            f"plan is a {type(plan).__name__}: it takes a jaxmem.Plan, such as "
            'Plan.load("plan.json").'
        )
    policed.check_type(policy)
    check_measure(measure, plan)
    check_time_limit(time_limit)
    if plan is not None and time_limit is not None:
        raise ArgumentError(
            "fit(plan=..., time_limit=...): a plan has decided already and nothing is "
            "searched. Leave time_limit out."
        )
    if plan is not None and policy is not None:
        raise ArgumentError(
            "fit(plan=..., policy=...): a plan has decided already. Leave one of them out."
        )


def as_python(settings: Mapping[str, Any]) -> str | None:
    """The options of a step that are not the usual ones, as they are written in a call.

    ``None`` where one of them has no short form, such as a policy or a mesh.

    >>> options = {"host": "*", "static_argnums": (), "target": None, "policy": None}
    >>> as_python(options), as_python(options | {"policy": object()})
    (", host='*'", None)
    """
    given = {n: settings[n] for n in _KEPT if settings.get(n) not in (None, ())}
    if not all(isinstance(value, _WRITTEN) for value in given.values()):
        return None
    return "".join(f", {name}={value!r}" for name, value in given.items())
