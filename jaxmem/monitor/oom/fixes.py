"""What would help against an out-of-memory error, ranked, with the bytes that each saves."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxmem.monitor.figures import DeviceMemory
from jaxmem.monitor.holders import Holding
from jaxmem.monitor.oom.explanation import Fix
from jaxmem.monitor.oom.steps import MOST_PLANNING_SECONDS, Running, planned
from jaxmem.monitor.oom.texts import Told
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.targets.pinned import DEFAULT_BYTES, LIMIT_VARIABLE
from jaxmem.units import GIB, KIB, floor_budget, format_bytes

# Of what is free, so much is left for what the compiler's figure lacks and for gaps between blocks.
_KEPT_BACK = 0.05
# Of what a program took that failed although there was room for it on paper.
_SMALLER = 0.9
_FRACTION, _DEFAULT_FRACTION, _MOST_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75, 0.95
# Holders below this share of the device are not worth a line.
_WORTH = 0.01
_MOST_FREED = 3
_CLEARED = ("list", "dict", "set", "deque", "defaultdict", "OrderedDict")


@dataclass(frozen=True)
class Situation:
    """What fixes are chosen by.

    Attributes:
        told: what the error says.
        device: what the device has in use.
        own_bytes: of that, arrays of the step that failed.
        limit_bytes: what the device has for this process; ``None`` where that is not known.
        beside: who holds arrays that are not the step's.
        seconds: for planning; 0 plans nothing.
    """

    told: Told
    device: DeviceMemory
    own_bytes: int
    limit_bytes: int | None
    beside: Sequence[Holding]
    seconds: float = MOST_PLANNING_SECONDS

    @property
    def others_bytes(self) -> int:
        """What is in use beside the step."""
        return max(0, self.device.in_use.nbytes - self.own_bytes)

    @property
    def missing_bytes(self) -> int | None:
        """What has to be freed for what was asked for; ``None`` if unknown, or nothing helps."""
        if self.told.requested_bytes is None or self.limit_bytes is None:
            return None
        if self.told.requested_bytes > self.limit_bytes:
            return None
        free = max(0, self.limit_bytes - self.device.in_use.nbytes)
        return max(0, self.told.requested_bytes - free)


def ranked(
    situation: Situation, running: Running | None, report: MemoryReport | None, needs: int | None
) -> tuple[list[Fix], list[str], Plan | None]:
    """The fixes, best first, and what could not be found out.

    The call of ``fit`` that was planned and compiled comes first, then what is held beside the
    step, then what was not tried.

    Args:
        situation: what there is.
        running: the step that failed.
        report: where its bytes are.
        needs: what it needs, compiled or predicted.
    """
    notes = list(_remarks(situation))
    if situation.told.where == "pinned host":
        return list(_on_host(situation)), notes, None
    fixes, plan = [], None
    if running is not None and situation.seconds > 0:
        fix, plan, why = _fitted(situation, running, needs)
        fixes += [fix] if fix else []
        notes += [why] if why else []
    freed = list(_freed(situation))
    fixes += sorted(freed, key=lambda fix: (not fix.enough, -(fix.saves_bytes or 0)))
    fixes += _untried(situation, running, report, fitted=plan is not None)
    return fixes, notes, plan


def _remarks(situation: Situation) -> Iterator[str]:
    """What follows from the amounts alone."""
    asked, limit = situation.told.requested_bytes, situation.limit_bytes
    if asked is None or limit is None or situation.told.where not in ("device", "compile"):
        return
    free = max(0, limit - situation.device.in_use.nbytes)
    if asked > limit:
        yield (
            f"{format_bytes(asked)} is more than the device has ({format_bytes(limit)}): nothing "
            "that is freed makes room for that. It has to be made in parts, or split over devices."
        )
    elif asked <= free and situation.told.where == "device":  # A compiler allocates nothing.
        yield (
            f"{format_bytes(free)} are free, but in pieces: none of {format_bytes(asked)}. "
            "Allocate what stays before what comes and goes, or try another allocator: "
            "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async, before Python starts."
        )


def _fitted(
    situation: Situation, running: Running, needs: int | None
) -> tuple[Fix | None, Plan | None, str]:
    """The call of ``fit`` that works beside what is in use, or why there is none."""
    if situation.limit_bytes is None:
        return None, None, "what the device has is not known, so no budget can be named"
    room = int((situation.limit_bytes - situation.others_bytes) * (1 - _KEPT_BACK))
    if needs is not None:
        # It failed: there was less room than there seems to be.
        room = min(room, int(needs * _SMALLER))
    if room < KIB:
        return None, None, f"beside the rest {max(0, room)} bytes are left: no step fits there"
    plan, why = planned(running, room, situation.seconds)
    if plan is None:
        return (
            None,
            None,
            f"no fit(...) was found for the {format_bytes(room)} that are left: {why}",
        )
    saves = None if needs is None else max(0, needs - plan.compiled_bytes)
    done = []
    if running.donating:
        done.append("donating what the same line assigns again")
    again = sum(d.recomputed for d in plan.decisions)
    if again:
        done.append(f"{again} values are computed again")
    if plan.microbatches > 1:
        done.append(f"{plan.microbatches} microbatches")
    if plan.host_bytes:
        done.append(f"{format_bytes(plan.host_bytes)} wait in host memory")
    how = ", ".join(done) or "as it is"
    what = f"fit {running.name} into what is left ({how}; it compiles to "
    what += f"{format_bytes(plan.compiled_bytes)})"
    if not running.code:
        what += f": its budget={floor_budget(room)!r}, all else as it is"
    return Fix(what, running.code_for(room), saves, "compiled", True), plan, ""


def _freed(situation: Situation) -> Iterator[Fix]:
    """What is held beside the step and could go."""
    worth = (situation.limit_bytes or situation.device.in_use.nbytes) * _WORTH
    missing, count = situation.missing_bytes, 0
    for holding in situation.beside:
        if holding.nbytes < worth or not holding.reachable or count == _MOST_FREED:
            continue
        count += 1
        enough = missing is not None and holding.nbytes >= missing
        where = f" in {holding.scope}" if holding.scope else ""
        what = f"let go of {holding.name}{where}"
        code = f"del {holding.name}"
        if holding.count > 1 and holding.container in _CLEARED:
            what = f"let go of the {holding.count} arrays that {holding.name}{where} has gathered"
            code = f"{holding.name}.clear()"
        made = f", made at {holding.source}" if holding.source else ""
        yield Fix(f"{what}{made}", code, holding.nbytes, "counted", enough)


def _untried(
    situation: Situation, running: Running | None, report: MemoryReport | None, *, fitted: bool
) -> Iterator[Fix]:
    if running is not None and running.spare_bytes:
        yield Fix(
            f"donate the state to {running.name}, fit(..., donate_argnums=...), if what it is "
            "given is not used afterwards",
            "",
            running.spare_bytes,
            "estimated",
        )
    if report is not None and running is not None and not fitted:
        kept = report.by_category()
        activations = kept.get("residual", 0) + kept.get("temporary", 0)
        if activations:
            yield Fix(
                "go through the batch in parts: jaxmem.accumulate(..., jaxmem.AUTO) in the step",
                "",
                activations // 2,
                "estimated",
            )
    too_large = (situation.told.requested_bytes or 0) > (situation.limit_bytes or math.inf)
    if running is None and situation.told.where in ("device", "compile") and not too_large:
        yield Fix(
            "run it as one step that fits: step = jaxmem.fit(step, budget=...), which frees what "
            "is made on the way",
            "",
            None,
            "estimated",
        )
    limit = situation.limit_bytes
    if limit and situation.device.limit and not os.environ.get(_FRACTION):
        whole = limit / _DEFAULT_FRACTION
        yield Fix(
            f"let JAX take more than its 75% of the device: {_FRACTION}={_MOST_FRACTION}, before "
            "Python starts",
            "",
            int(whole * _MOST_FRACTION - limit),
            "setting",
        )


def _on_host(situation: Situation) -> Iterator[Fix]:
    given = os.environ.get(LIMIT_VARIABLE, "")
    limit = int(given) * GIB if given.isdigit() else DEFAULT_BYTES
    asked = situation.told.requested_bytes or 0
    more = -(-(limit + asked) // GIB)
    yield Fix(
        f"let XLA pin more host memory than {format_bytes(limit)}, if the host has it: "
        f"{LIMIT_VARIABLE}={more}, before Python starts",
        "",
        more * GIB - limit,
        "setting",
    )
    yield Fix(
        "name fewer arguments in fit(..., host=...), or less host memory: host_budget=...",
        "",
        None,
        "estimated",
    )
    yield from _freed(situation)
