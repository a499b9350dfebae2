"""Choose which argument leaves wait in host memory: what ``host=jaxmem.AUTO`` stands for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxmem.errors import BudgetError, BudgetInfeasibleError, CutError, JaxmemError, PolicyError
from jaxmem.planner.deadline import Deadline
from jaxmem.planner.plan import Plan
from jaxmem.program.ir import Program
from jaxmem.program.lending import OF_ONE_LEAF, lend
from jaxmem.runtime.asked import FEWEST_BYTES, Asked, NotQuickerError
from jaxmem.runtime.progress import Report, within
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.target import Target
from jaxmem.units import format_bytes, format_seconds

# What takes host memory must be quicker than what takes none by this share: predicted 0.6% quicker,
# a GPT of 1.3e9 parameters was 0.2% slower on an H100.
_CLEARLY = 0.02


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
    sizes = dict(enumerate(program.input_bytes[consts:]))
    updated = {position - consts for position in program.places.values() if position >= consts}
    large = sorted((n for n in updated if sizes[n] >= FEWEST_BYTES), key=lambda n: (-sizes[n], n))
    read = {program.block.inputs.index(v) - consts for v in lend(program, large).leaves.values()}
    # With so few results, what all gradients depend on looks like what one update does.
    few = len(updated) <= OF_ONE_LEAF
    waiting = [] if few else [n for n in large if n not in read]
    named: dict[tuple[int, ...], str] = {}
    for what, leaves in (
        ("half of what only updates read", waiting[::2]),
        ("what only updates read", waiting),
        ("all that is updated", large),
    ):
        if leaves:
            named[tuple(sorted(leaves))] = what
    found = [Way(what, leaves, sum(sizes[n] for n in leaves)) for leaves, what in named.items()]
    return sorted(found, key=lambda way: way.nbytes)


def fit(
    program: Program,
    one_program: Callable[[Report], Outcome],
    streaming: Callable[[Asked, Report], Outcome],
    target: Target,
    host_bytes: int | None,
    deadline: Deadline,
    report: Report,
) -> Outcome:
    """The quickest of what fits: the step as it is without ``host=``, or with leaves that wait.

    Args:
        program: the step.
        one_program: fits it as it is without ``host=``.
        streaming: fits it with leaves that wait, if that is as quick as is asked.
        target: what it is compiled for.
        host_bytes: host memory for each device; ``None`` for what there is.
        deadline: when it is over and something fits, nothing else is tried.
        report: shows progress.

    Raises:
        JaxmemError: nothing fits; as it is without ``host=``, with what came of the others.
    """
    tried = _Tried()
    possible = [] if target.platform == "cpu" else ways(program)
    most = 1 + len(possible)
    telling = within(report, f"way 1 of {most}, one program")
    tried.attempt("one program", functools.partial(one_program, telling))
    if target.platform == "cpu":
        tried.said.append("no leaves were streamed, as a CPU has one memory")
    elif not possible:
        least = format_bytes(FEWEST_BYTES)
        tried.said.append(
            f"no argument of {least} and more is donated and updated: host= may name those that "
            "are only read"
        )
    rate = min(target.d2h_bytes_per_second, target.h2d_bytes_per_second)
    for number, way in enumerate(possible, 2):
        if tried.nothing_to_win:
            break
        if tried.best is not None and deadline.over():
            tried.said.append(f"{way.what} on the host: not tried, the time limit is over")
            continue
        copies = way.nbytes / rate if rate else 0.0
        if tried.best is not None and copies >= _seconds_of(tried.best.plan):
            told = f"{way.what} on the host: copies alone {format_seconds(copies)}"
            tried.said.append(told)
            continue
        asked = Asked(way.leaves, host_bytes=host_bytes, quicker_than=tried.seconds)
        telling = within(report, f"way {number} of {most}, {way.what} on the host")
        tried.attempt(f"{way.what} on the host", functools.partial(streaming, asked, telling))
    return tried.outcome(deadline)


class _Tried:
    """What came of each way.

    Attributes:
        best: the quickest, on paper.
        chosen: which way that is.
        said: what came of each, in words.
        errors: of those that do not fit.
    """

    def __init__(self) -> None:
        self.best: Outcome | None = None
        self.chosen = ""
        self.said: list[str] = []
        self.errors: list[JaxmemError] = []

    @property
    def seconds(self) -> float:
        """Predicted seconds that another way must be quicker than."""
        if self.best is None:
            return math.inf
        return _seconds_of(self.best.plan) * (1 if self.best.plan.host_bytes else 1 - _CLEARLY)

    @property
    def nothing_to_win(self) -> bool:
        """Whether the best is as quick as the step as written, and moves nothing."""
        if self.best is None or self.best.plan.host_bytes:
            return False
        return self.best.plan.predicted_seconds <= self.best.plan.keep_all_seconds

    def attempt(self, what: str, fitting: Callable[[], Outcome]) -> None:
        try:
            found = fitting()
        except BudgetInfeasibleError as error:
            self.errors.append(error)
            self.said.append(f"{what}: {format_bytes(error.smallest_bytes)} or more")
        except (BudgetError, CutError, PolicyError) as error:
            self.errors.append(error)
            self.said.append(f"{what}: {_cause(error)}")
        except NotQuickerError as error:
            self.said.append(f"{what}: {error}")
        else:
            self.said.append(f"{what}: {_moved(found.plan)}{_seconds(found.plan)}")
            if _seconds_of(found.plan) < self.seconds:
                self.best, self.chosen = found, what

    def outcome(self, deadline: Deadline) -> Outcome:
        if self.best is None:
            raise self._error()
        plan, compared = self.best.plan, "; ".join(self.said)
        notes = [*plan.notes, f"host=AUTO took {self.chosen}; predicted were {compared}"]
        # A plan that was made before the time was over does not know of it.
        if deadline.ran_out and not any("the time limit of" in note for note in plan.notes):
            notes.append(
                f"the time limit of {deadline.seconds:g} s ended the search: this is the quickest "
                "of what was found until then"
            )
        return replace(self.best, plan=replace(plan, notes=tuple(notes)))

    def _error(self) -> JaxmemError:
        """The error without ``host=``, whose budget was compiled, with what came of the others.

        Of a step that streams, the smallest budget is that of one of its parts.
        """
        first = self.errors[0]
        if not isinstance(first, BudgetInfeasibleError):
            return first
        compared = "; ".join(self.said)
        return BudgetInfeasibleError(
            f"{first}\n  host=jaxmem.AUTO compared: {compared}.",
            budget_bytes=first.budget_bytes,
            smallest_bytes=first.smallest_bytes,
            holders=first.holders,
        )


def _seconds_of(plan: Plan) -> float:
    """Predicted seconds of a step, with what the compiled program waits for."""
    if plan.compiled_exposed_seconds is None:
        return plan.predicted_seconds
    return plan.predicted_seconds - plan.exposed_seconds + plan.compiled_exposed_seconds


def _seconds(plan: Plan) -> str:
    return format_seconds(_seconds_of(plan))


def _moved(plan: Plan) -> str:
    """What one program moves by itself, in words."""
    if plan.streamed is not None or not plan.host_bytes:
        return ""
    return f"{format_bytes(plan.host_bytes)} moved within it, "


def _cause(error: JaxmemError) -> str:
    """The first sentence: what follows is advice for patterns that nobody gave."""
    return str(error).splitlines()[0].split(". ")[0].rstrip(".")
