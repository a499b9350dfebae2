"""Why a plan keeps, recomputes or moves what it does, from what the plan itself says."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmem.displayed import Displayed
from jaxmem.errors import Holder, PlanQueryError
from jaxmem.planner.decisions import IN_FLIGHT
from jaxmem.policies.selector import module_matches
from jaxmem.units import GIB, format_budget, format_bytes, format_seconds

if TYPE_CHECKING:
    from jaxmem.planner.decisions import Decision, Streamed
    from jaxmem.planner.plan import Plan

_MOST_NAMES = 5
_NEAR = 0.6
# Below this share of all that lives from forward to backward a value does not set the price.
_COUNTS = 1e-3


@dataclass(frozen=True)
class Reason:
    """Why a group of equal values is treated as it is.

    Attributes:
        decision: the group.
        matched: the numbers of its values that the query is about, in program order.
        recomputed: how many of these are recomputed.
        seconds_per_gib: predicted cost of making a GiB of it again, on its own.
        kept_from_bytes: the budget from which all of it would be kept, roughly: that of this plan
            and what is recomputed now and costs as much or more to make again. ``None`` where
            all of it is kept, or where keeping everything is slower.
        why: the reason in words.
    """

    decision: Decision
    matched: tuple[int, ...]
    recomputed: int
    seconds_per_gib: float
    kept_from_bytes: int | None
    why: str

    @property
    def nbytes(self) -> int:
        """Bytes of the values that the query is about."""
        return self.decision.nbytes * len(self.matched) // max(self.decision.count, 1)


@dataclass(frozen=True)
class Explanation(Displayed):
    """What a plan says about a query, or about itself.

    Attributes:
        function: name of the planned function; ``target`` what it was planned for.
        query: what was asked; ``""`` for the plan as a whole.
        sentences: what is to be said about the plan, or about all that the query matches.
        reasons: one for each group of values that matches, the largest first.
        holders: what fills the predicted peak, for the plan as a whole.
    """

    function: str
    target: str
    query: str
    sentences: tuple[str, ...]
    reasons: tuple[Reason, ...]
    holders: tuple[Holder, ...] = ()


def explain(plan: Plan, query: str = "") -> Explanation:
    """See :meth:`jaxmem.Plan.explain`."""
    found = [(d, _matched(d, query)) for d in plan.decisions]
    reasons = [_reason(plan, d, matched) for d, matched in found if matched]
    reasons.sort(key=lambda r: (-r.nbytes, r.decision.key))
    if not query:
        whole = tuple(_about(plan))
        return Explanation(
            plan.function, plan.target, "", whole, tuple(reasons), tuple(plan.holders)
        )
    hosted = [path for path in plan.hosted if _names_path(query, path)]
    if not reasons and not hosted:
        raise PlanQueryError(_nothing(plan, query))
    moved = tuple(f"argument {path} lives in host memory between steps" for path in hosted)
    return Explanation(plan.function, plan.target, query, moved, tuple(reasons))


def dearest_recomputed(plan: Plan) -> Decision | None:
    """Of what is recomputed the group that costs most to make again for its bytes.

    Scalars and the like are left out: per byte they cost the most, and no budget is about them.
    """
    least = _COUNTS * sum(d.nbytes for d in plan.decisions)
    again = [d for d in plan.decisions if d.recomputed and d.recomputed_bytes >= least]
    return max(again, key=lambda d: (d.seconds_per_byte, d.key), default=None)


def _matched(decision: Decision, query: str) -> tuple[int, ...]:
    """The values of a group that a query is about."""
    everything = tuple(range(decision.count))
    names = (decision.checkpoint_name, decision.primitive, decision.key)
    if not query or any(name and fnmatch.fnmatchcase(name, query) for name in names):
        return everything
    place = decision.source.split(" (")[0]
    if place and query in (place, place.rpartition(":")[0], decision.source):
        return everything
    modules = decision.modules or (decision.module,) * decision.count
    return tuple(n for n, module in enumerate(modules) if _names_path(query, module))


def _names_path(query: str, path: str) -> bool:
    wanted = query.replace(".", "/").strip("/")
    return bool(wanted) and module_matches(wanted, path.replace(".", "/"))


def _nothing(plan: Plan, query: str) -> str:
    names = [
        (d.checkpoint_name, *(d.modules or (d.module,)), d.source.split(" (")[0], d.primitive)
        for d in plan.decisions
    ]
    known = list(
        dict.fromkeys(name for several in (*names, plan.hosted) for name in several if name)
    )
    wanted = (query, query.replace(".", "/"), query.replace(".", "/").rpartition("/")[2])
    near = [_near(w, known, lambda name: name) for w in wanted[:2]]
    near.append(_near(wanted[2], known, lambda name: name.rpartition("/")[2]))
    names = list(dict.fromkeys(name for several in near for name in several))[:_MOST_NAMES]
    listed = f"The nearest are {', '.join(map(repr, names))}."
    if not names:
        there = ", ".join(map(repr, known[:_MOST_NAMES]))
        listed = f"There is, for instance, {there}." if there else "It has none."
    return (
        f"nothing that lives from the forward to the backward pass of {plan.function} matches "
        f"{query!r}: not a module path, a checkpoint name, a source line or a primitive. {listed}"
    )


def _near(wanted: str, known: Sequence[str], part: Callable[[str], str]) -> list[str]:
    """The names of which a part looks like what is wanted."""
    parts = list(dict.fromkeys(map(part, known)))
    close = difflib.get_close_matches(wanted.strip("*?"), parts, _MOST_NAMES, _NEAR)
    return [name for c in close for name in known if part(name) == c]


def _reason(plan: Plan, decision: Decision, matched: Sequence[int]) -> Reason:
    again = set(decision.again)
    recomputed = len(again.intersection(matched))
    if decision.recomputed and not again:
        recomputed = min(decision.recomputed, len(matched))
    return Reason(
        decision=decision,
        matched=tuple(matched),
        recomputed=recomputed,
        seconds_per_gib=decision.seconds_per_byte * GIB,
        kept_from_bytes=_kept_from(plan, decision) if decision.recomputed and _pays(plan) else None,
        why=_why(plan, decision),
    )


def _pays(plan: Plan) -> bool:
    """Whether keeping everything is quicker than the plan; not always where loops keep it."""
    return not plan.predicted_seconds < plan.keep_all_seconds


def _fits_as_written(plan: Plan) -> bool:
    written = plan.keep_all_compiled_bytes
    return written is not None and written <= plan.budget_bytes


def _kept_from(plan: Plan, decision: Decision) -> int:
    """The budget from which a group would be kept, if the dearest come back first."""
    dearer = [d for d in plan.decisions if d.seconds_per_byte >= decision.seconds_per_byte]
    most = plan.keep_all_compiled_bytes or plan.keep_all_predicted_bytes
    return max(plan.budget_bytes, min(most, plan.budget_bytes + _recomputed_bytes(dearer)))


def _recomputed_bytes(decisions: Sequence[Decision]) -> int:
    return sum(d.recomputed_bytes for d in decisions)


def _why(plan: Plan, decision: Decision) -> str:
    cost = _rate(decision.seconds_per_byte)
    if decision.recomputed:
        return _why_recomputed(plan, decision)
    dearest = dearest_recomputed(plan)
    if decision.action == "offload":
        return (
            f"{_some_of(decision)}in host memory from the forward to the backward pass: device "
            f"memory is for what is read sooner, and making it again would cost {cost}"
        )
    if dearest is None:
        return f"kept: nothing is recomputed (it would cost {cost})"
    other = f"{dearest.label} ({_rate(dearest.seconds_per_byte)}), the dearest that is recomputed"
    if decision.seconds_per_byte > dearest.seconds_per_byte:
        return f"kept: making it again costs {cost}, more than {other}"
    if decision.feeds:
        return (
            f"kept: {decision.feeds} operations that run again read it, so its bytes save more "
            f"than its own {cost}"
        )
    return (
        f"kept, although making it again costs {cost}, no more than {other}: dropping it does not "
        "lower the peak, or the budget has room for it"
    )


def _why_recomputed(plan: Plan, decision: Decision) -> str:
    cost = _rate(decision.seconds_per_byte)
    if not decision.seconds_per_byte:
        return "recomputed: it is part of the kernels that read it and costs next to nothing"
    if _fits_as_written(plan) and not _pays(plan):
        return (
            f"recomputed: making it again costs {cost}. There is room for it, but loops copy what "
            "they keep, and the plan is quicker than keeping everything"
        )
    if decision.recomputed < decision.count:
        kept = decision.count - decision.recomputed - decision.offloaded
        away = f", {decision.offloaded} wait in host memory" if decision.offloaded else ""
        return (
            f"recomputed in {decision.recomputed} of {decision.count}: the budget has room for "
            f"{kept}{away}, and a GiB of them costs "
            f"{format_seconds(decision.seconds_per_byte * GIB)} to make again"
        )
    kept = [d for d in plan.decisions if not d.recomputed and d.seconds_per_byte]
    cheapest = min(kept, key=lambda d: (d.seconds_per_byte, d.key), default=None)
    if cheapest is None or cheapest.seconds_per_byte < decision.seconds_per_byte:
        return f"recomputed: making it again costs {cost}, and the budget has no room for its bytes"
    return (
        f"recomputed: making it again costs {cost}, no more than anything that is kept "
        f"({cheapest.label}, {_rate(cheapest.seconds_per_byte)})"
    )


def _some_of(decision: Decision) -> str:
    whole = decision.offloaded == decision.count
    return "" if whole else f"{decision.offloaded} of {decision.count} "


def _rate(seconds_per_byte: float) -> str:
    return f"{format_seconds(seconds_per_byte * GIB)} per GiB"


def _about(plan: Plan) -> Iterator[str]:
    """The plan as a whole, in sentences."""
    share = plan.compiled_bytes / max(plan.budget_bytes, 1)
    yield (
        f"it uses {format_bytes(plan.compiled_bytes)} of the budget of "
        f"{format_bytes(plan.budget_bytes)} ({100 * share:.0f}%)"
    )
    if plan.policy:
        yield "it follows a policy: what its rules are about is as they say, whatever that costs"
    if plan.solver == "keep-all":
        yield "keep-all: the step fits as written, so nothing is recomputed"
    else:
        yield (
            f"{plan.solver}: the quickest of what was proposed and, once compiled, fits "
            f"({len(plan.rounds)} compiles)"
        )
    yield from _price(plan)
    yield from _in_host_memory(plan)
    yield from _waits(plan)
    yield from plan.notes


def _in_host_memory(plan: Plan) -> Iterator[str]:
    if plan.hosted:
        yield f"in host memory between steps: {', '.join(plan.hosted[:_MOST_NAMES])}" + (
            f" and {len(plan.hosted) - _MOST_NAMES} more" * (len(plan.hosted) > _MOST_NAMES)
        )
    if plan.updates_last:
        yield "they are updated after all else: in the backward pass did not fit where it was tried"
    if plan.in_flight != IN_FLIGHT:
        sent, fetched = plan.in_flight
        yield (
            f"outside loops at most {sent} of the largest copies are on their way to the host at "
            f"once, and {fetched} back: what is on its way takes room"
        )
    if not plan.in_order:
        yield (
            "in backward iterations the compiler makes gradients when it likes: "
            "that takes less than 1% more"
        )
    if plan.slack_seconds:
        given = format_seconds(plan.slack_seconds)
        yield f"copies are given up to {given} each: the compiler starts those with less too late"
    if plan.streamed is not None:
        yield _streamed(plan.streamed)


def _waits(plan: Plan) -> Iterator[str]:
    if plan.exposed_seconds > 0:
        yield f"copies that nothing hides take {format_seconds(plan.exposed_seconds)} of a step"
    if plan.compiled_exposed_seconds is not None:
        waits = format_seconds(plan.compiled_exposed_seconds)
        yield f"the compiled program waits {waits} for copies, by its own order of operations"
    if plan.measured_exposed_seconds is not None:
        yield f"measured were {format_seconds(plan.measured_exposed_seconds)} of such copies"


def _streamed(s: Streamed) -> str:
    window = f"at most {format_bytes(s.window_bytes)} of it on the device at a time"
    ahead = f"; loops fetch {s.ahead} of them row by row, one iteration ahead" * (s.ahead > 0)
    if not s.updates and not s.along:
        return (
            f"these are read in {s.stages} stages, with {format_bytes(s.fetched_bytes)} fetched in "
            f"a step, {window}{ahead}"
        )
    copied = (
        f"with {format_bytes(s.fetched_bytes)} fetched and {format_bytes(s.sent_bytes)} sent back "
        f"in a step, {window}"
    )
    ways = []
    if s.along:
        ways.append(f"{s.along} in the loops that make their gradients")
    if s.updates:
        by_rows = f", {s.by_rows} of them some rows at a time" * (s.by_rows > 0)
        ways.append(f"in {s.updates} pieces ({s.programs} different programs{by_rows})")
    stages = f", gradients in {s.stages} stages" * (s.stages > 1)
    if s.kept_bytes:
        stages += (
            f", {format_bytes(s.kept_bytes)} of gradients wait there too, row by row as they are "
            "made, because every update needs all of them"
        )
    return f"these are updated {' and '.join(ways)}{stages}, {copied}{ahead}"


def _price(plan: Plan) -> Iterator[str]:
    if plan.larger is None:
        return
    more, saved = plan.larger.more_bytes, plan.larger.saved_seconds
    if saved <= 0:
        yield f"{format_bytes(more)} more would not make it faster, as far as was searched"
    else:
        rate = "" if more == GIB else f" ({_rate(plan.marginal_seconds_per_byte)})"
        yield f"{format_bytes(more)} more would save {format_seconds(saved)} a step{rate}"
    if plan.keep_all_compiled_bytes is not None and _pays(plan):
        yield (
            f"from a budget of {format_budget(plan.keep_all_compiled_bytes)} on nothing would be "
            f"recomputed, and a step would take {format_seconds(plan.keep_all_seconds)} instead of "
            f"{format_seconds(plan.predicted_seconds)}"
        )
