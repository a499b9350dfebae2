"""Choose how the state is split over a mesh: what ``shard="auto"`` stands for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxmem.errors import (
    ArgumentError,
    BudgetError,
    BudgetInfeasibleError,
    JaxmemError,
    PlanMismatchError,
    ShardingError,
)
from jaxmem.planner.plan import Plan
from jaxmem.units import format_bytes, format_seconds

AUTO = "auto"
# Those with the fewest collectives come first: of equals the first is taken.
_NAMES = ("whole on each device", "zero1", "zero3")
# Relative: seconds that differ by less are the same.
_SAME = 1e-6


class Way(NamedTuple):
    """One of the ways in which a state may be split: its name, and the rules that say it."""

    name: str
    rules: tuple[Any, ...]


def ways(shard: Any) -> tuple[Way, ...]:
    """What is compared for ``"auto"``, alone or beside patterns that hold in each; else nothing.

    >>> [way.name for way in ways("auto")], ways("zero3")
    (['whole on each device', 'zero1', 'zero3'], ())

    Raises:
        ArgumentError: beside ``"auto"`` there is something else than patterns.
    """
    given = (shard,) if isinstance(shard, str) else shard
    if type(given) not in (list, tuple) or AUTO not in [r for r in given if isinstance(r, str)]:
        return ()
    patterns = [rule for rule in given if not isinstance(rule, str) or rule != AUTO]
    if len(patterns) + 1 != len(given) or not all(isinstance(r, Mapping) for r in patterns):
        raise ArgumentError(
            f'shard={shard!r:.80}: beside "auto", once, it takes patterns of paths, which hold '
            'whatever is chosen: shard=["auto", {"*up*": PartitionSpec(None, "model")}]. To fix '
            'the rest as well leave "auto" out.'
        )
    named = zip(_NAMES, ((), ("zero1",), ("zero3",)), strict=True)
    return tuple(Way(name, (*patterns, *rules)) for name, rules in named)


@dataclass(frozen=True)
class _Found:
    """A way that fits."""

    way: Way
    step: Any
    plan: Plan
    told: tuple[warnings.WarningMessage, ...]


def choose(
    name: str, possible: Sequence[Way], planned: Callable[[Way], tuple[Any, Plan]]
) -> tuple[Any, str]:
    """The step that is predicted to be the quickest of those that fit, and a note about all.

    Args:
        name: of the user's function.
        possible: the ways.
        planned: makes a step of one of them, and its plan.

    Raises:
        JaxmemError: nothing fits.
    """
    found: list[_Found] = []
    said: list[str] = []
    errors: list[JaxmemError] = []
    for way in possible:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                step, plan = planned(way)
            except BudgetInfeasibleError as error:
                errors.append(error)
                said.append(f"{way.name}: {format_bytes(error.smallest_bytes)} or more")
                continue
            except (BudgetError, PlanMismatchError, ShardingError) as error:
                errors.append(error)
                said.append(f"{way.name}: {_cause(error)}")
                continue
        found.append(_Found(way, step, plan, tuple(told)))
        said.append(
            f"{way.name}: {format_seconds(_seconds(plan))} in {format_bytes(plan.compiled_bytes)}"
        )
    if not found:
        raise _error(name, errors, said)
    least = min(_seconds(each.plan) for each in found)
    best = next(each for each in found if _seconds(each.plan) <= least * (1 + _SAME))
    for message in best.told:
        warnings.warn(str(message.message), message.category, stacklevel=4)
    how = "measured" if best.plan.measured_seconds is not None else "predicted"
    return best.step, f'shard="auto" took {best.way.name}; {how} were {"; ".join(said)}'


def with_note(outcome: Any, note: str) -> Any:
    """An outcome whose plan says what was compared."""
    return replace(outcome, plan=replace(outcome.plan, notes=(*outcome.plan.notes, note)))


def _seconds(plan: Plan) -> float:
    measured = plan.measured_seconds
    return plan.predicted_seconds if measured is None else measured


def _error(name: str, errors: Sequence[JaxmemError], said: Sequence[str]) -> JaxmemError:
    """The error of the way that needs least, with what came of the others."""
    over = [error for error in errors if isinstance(error, BudgetInfeasibleError)]
    if not over:
        return errors[0]
    least = min(over, key=lambda error: error.smallest_bytes)
    compared = "; ".join(said)
    return BudgetInfeasibleError(
        f'{least}\n  shard="auto" of {name} compared: {compared}.',
        budget_bytes=least.budget_bytes,
        smallest_bytes=least.smallest_bytes,
        holders=least.holders,
    )


def _cause(error: JaxmemError) -> str:
    """The first sentence: what follows is advice for rules that nobody gave."""
    return str(error).splitlines()[0].split(". ")[0].rstrip(".")
