"""The error that a fitted step raises when memory runs out in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.errors import DeviceOutOfMemoryError, StepInterruptedError
from jaxmem.monitor.oom import calls, release, texts
from jaxmem.monitor.oom.explain import explained
from jaxmem.monitor.oom.explanation import Explanation
from jaxmem.monitor.oom.steps import Running, donation, is_alive, spare_bytes
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.program.ir import Program

Report = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fitted step tells of itself.

    Attributes:
        step: the step.
        name: of its function.
        program: what it does.
        arguments: the arrays of the call.
        donate: numbers of the arguments that are donated.
        options: its other options, as Python: ``', host="*"'``; ``None`` without a short form.
        report: where its bytes are.
        plan: plans it for a budget, with these arguments donated.
        compiled_bytes: what was compiled needs.
    """

    step: Any
    name: str
    program: Program
    arguments: Sequence[Any]
    donate: tuple[int, ...]
    options: str | None
    report: Callable[[], MemoryReport]
    plan: Callable[[int, tuple[int, ...], Report], Plan]
    compiled_bytes: int


def out_of_memory(
    error: Exception, tell: Callable[[], Fitted | None]
) -> DeviceOutOfMemoryError | None:
    """The error to raise in place of one; ``None`` where memory is not what it is about.

    A step that can be resumed keeps its error, which gets the explanation as a note.

    Args:
        error: what came out of a step.
        tell: what the step tells of itself; it may fail.
    """
    if isinstance(error, StepInterruptedError):
        cause = error.__cause__
        if cause is not None and texts.is_out_of_memory(cause):
            error.add_note(explained(cause, seconds=0).text())
        return None
    if not texts.is_out_of_memory(error):
        return None
    try:
        running, line = _running(tell)
        explanation = explained(error, running, line=line)
    except Exception as another:  # The error itself is what the caller must hear of.
        error.add_note(f"jaxmem could not explain it: {type(another).__name__}: {another}")
        return None
    return raised(error, explanation)


def raised(error: BaseException, explanation: Explanation) -> DeviceOutOfMemoryError:
    """The error to raise for one that is explained; no array is alive because of it.

    Of the functions that it ended none keeps its variables; its caller must drop its own.
    """
    found = DeviceOutOfMemoryError(explanation.text(), explanation=explanation)
    found.__cause__ = error
    release.let_go(error)
    release.after_cell()
    return found


def _running(tell: Callable[[], Fitted | None]) -> tuple[Running | None, str]:
    """The step as explanations know it, ``None`` where it cannot tell, and the line of its call."""
    try:
        fitted = tell()
    except Exception:  # It has failed already, and that is what its caller must hear of.
        fitted = None
    if fitted is None:
        return None, calls.line_here()
    called = calls.going_on(fitted.step)
    return _running_of(fitted, called), calls.line_here() if called is None else called.line


def _running_of(fitted: Fitted, called: calls.Called | None) -> Running:
    donating = () if called is None else called.replaced
    new = tuple(n for n in donating if n not in fitted.donate)
    donate = tuple(sorted({*fitted.donate, *new}))
    name = fitted.name if called is None else called.name
    options = "" if fitted.options is None else donation(donate) + fitted.options
    code = f'{name} = jaxmem.fit({name}.__wrapped__, budget="{{budget}}"{options})'

    def plan(budget_bytes: int, report: Report) -> Plan:
        return fitted.plan(budget_bytes, donate, report)

    return Running(
        name=name,
        code="" if fitted.options is None else code,
        program=fitted.program,
        arguments=[leaf for leaf in fitted.arguments if is_alive(leaf)],
        report=fitted.report,
        plan=plan,
        compiled_bytes=fitted.compiled_bytes,
        donating=bool(new),
        spare_bytes=0 if new else spare_bytes(fitted.program),
    )
