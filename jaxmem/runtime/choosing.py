"""Choose which argument leaves wait in host memory: what ``host=jaxmem.AUTO`` stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxmem.errors import BudgetError, BudgetInfeasibleError, CutError, JaxmemError
from jaxmem.program.ir import Program
from jaxmem.program.lending import lend
from jaxmem.runtime.streamed import FEWEST_BYTES, Asked
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.target import Target
from jaxmem.units import format_bytes, format_seconds

_NOTHING = "nothing"


@dataclass(frozen=True)
class Way:
    """Leaves that may wait together.

    Attributes:
        what: they are, in words.
        leaves: their numbers among the arguments.
        nbytes: of all of them.
    """

    what: str
    leaves: tuple[int, ...]
    nbytes: int


def ways(program: Program) -> list[Way]:
    """What may wait: half of what only updates read, all of it, and all that is updated.

    Those with the fewest bytes come first: each byte is copied twice a step.
    """
    consts = len(program.consts)
    sizes = {n: program.block.inputs[consts + n].nbytes for n in range(len(program.arguments))}
    updated = {position - consts for position in program.places.values() if position >= consts}
    large = sorted((n for n in updated if sizes[n] >= FEWEST_BYTES), key=lambda n: (-sizes[n], n))
    read = {program.block.inputs.index(v) - consts for v in lend(program, large).leaves.values()}
    waiting = [n for n in large if n not in read]
    found: dict[tuple[int, ...], str] = {}
    for what, leaves in (
        ("half of what only updates read", waiting[::2]),
        ("what only updates read", waiting),
        ("all that is updated", large),
    ):
        if leaves:
            found.setdefault(tuple(sorted(leaves)), what)
    return [Way(what, leaves, sum(sizes[n] for n in leaves)) for leaves, what in found.items()]


def fit(
    program: Program,
    plain: Callable[[int | None], Outcome],
    streaming: Callable[[Asked], Outcome],
    target: Target,
    host_bytes: int | None,
) -> Outcome:
    """The quickest of what fits: the step in one program, or with leaves that wait on the host.

    Args:
        program: the step.
        plain: fits it in one program, given the host memory that may be used for each device.
        streaming: fits it with leaves that wait.
        target: what it is compiled for.
        host_bytes: host memory for each device; ``None`` for what there is.

    Raises:
        BudgetInfeasibleError: nothing fits; of all that was tried the smallest budget.
    """
    tried = _Tried()
    tried.attempt(_NOTHING, lambda: plain(host_bytes or 0))
    if program.sharded or target.platform == "cpu":
        why = "arrays are split over devices" if program.sharded else "a CPU has one memory"
        tried.said.append(f"no other was tried: {why}")
    else:
        slower = min(target.d2h_bytes_per_second, target.h2d_bytes_per_second)
        for way in ways(program):
            if tried.recomputes_nothing:
                break
            seconds = way.nbytes / slower
            if tried.best is not None and seconds >= tried.best.plan.predicted_seconds:
                tried.said.append(f"{way.what}: {format_seconds(seconds)} of copies alone")
                continue
            tried.attempt(way.what, lambda way=way: streaming(Asked(way.leaves, (), host_bytes)))
    if tried.best is None and host_bytes is None:
        # Values that cross from forward to backward may wait as well, within one program.
        tried.attempt("what one program can move by itself", lambda: plain(None))
    return tried.outcome()


class _Tried:
    """What came of each way."""

    def __init__(self) -> None:
        self.best: Outcome | None = None
        self.chosen = ""
        self.said: list[str] = []
        self.errors: list[JaxmemError] = []

    @property
    def recomputes_nothing(self) -> bool:
        """Whether the best is as quick as the step as written: there is nothing to win."""
        plan = self.best and self.best.plan
        return plan is not None and plan.predicted_seconds <= plan.keep_all_seconds

    def attempt(self, what: str, fit: Callable[[], Outcome]) -> None:
        try:
            found = fit()
        except BudgetInfeasibleError as error:
            self.errors.append(error)
            self.said.append(f"{what}: at least {format_bytes(error.smallest_bytes)}")
        except (BudgetError, CutError) as error:
            self.errors.append(error)
            self.said.append(f"{what}: {str(error).splitlines()[0]}")
        else:
            seconds = found.plan.predicted_seconds
            self.said.append(f"{what}: {format_seconds(seconds)}")
            if self.best is None or seconds < self.best.plan.predicted_seconds:
                self.best, self.chosen = found, what

    def outcome(self) -> Outcome:
        if self.best is None:
            raise self._least()
        plan, others = self.best.plan, "; ".join(self.said)
        note = f"host=AUTO: {self.chosen} waits in host memory. Of what was tried, {others}"
        return replace(self.best, plan=replace(plan, notes=(*plan.notes, note)))

    def _least(self) -> JaxmemError:
        """The error that names the smallest budget, with what came of the others."""
        infeasible = [e for e in self.errors if isinstance(e, BudgetInfeasibleError)]
        if not infeasible:
            return self.errors[0]
        least, said = min(infeasible, key=lambda error: error.smallest_bytes), "; ".join(self.said)
        return BudgetInfeasibleError(
            f"{least}\n  host=jaxmem.AUTO tried to keep in host memory {said}.",
            budget_bytes=least.budget_bytes,
            smallest_bytes=least.smallest_bytes,
            holders=least.holders,
        )
