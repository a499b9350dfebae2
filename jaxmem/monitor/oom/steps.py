"""The step that ran out of memory: what it needs, and how it would fit into what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmem.errors import JaxmemError
from jaxmem.monitor.oom.calls import Called
from jaxmem.monitor.oom.texts import is_out_of_memory
from jaxmem.planner.deadline import Deadline
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.program import nnx
from jaxmem.program.calling import Caller
from jaxmem.program.ir import Program
from jaxmem.runtime import rounds
from jaxmem.runtime.analysis import report_on
from jaxmem.runtime.compiler import Compiler
from jaxmem.targets.target import Target
from jaxmem.targets.topology import tracing_for
from jaxmem.units import floor_budget

# An explanation must come before whoever waits for it has lost patience.
MOST_PLANNING_SECONDS = 45.0
MOST_SEARCH_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class Running:
    """A step that ran out of memory.

    Attributes:
        name: how the user's code calls it.
        code: Python that makes it fit a budget, with ``{budget}`` where that goes; ``""`` where an
            option has no short form.
        program: what it does.
        arguments: its arrays that are alive, constants included.
        report: where its bytes are.
        plan: plans it within so many bytes.
        compiled_bytes: what the program that ran needs; ``None`` where it did not compile.
        donating: whether the code donates what it did not before.
        spare_bytes: results that could take the place of arguments if those were donated.
    """

    name: str
    code: str
    program: Program
    arguments: Sequence[Any]
    report: Callable[[], MemoryReport]
    plan: Callable[[int, Callable[[str], None]], Plan]
    compiled_bytes: int | None
    donating: bool = False
    spare_bytes: int = 0

    def code_for(self, budget_bytes: int) -> str:
        """The code for a budget, which is rounded down."""
        return self.code.replace("{budget}", floor_budget(budget_bytes))


@dataclass
class _Clock:
    """Stops planning that takes too long, between two compiles."""

    seconds: float
    started: float = field(default_factory=time.perf_counter)

    def __call__(self, text: str) -> None:
        if time.perf_counter() - self.started > self.seconds:
            raise _TooLongError


class _TooLongError(Exception):
    """Planning took longer than an explanation may take."""


def planned(running: Running, budget_bytes: int, seconds: float) -> tuple[Plan | None, str]:
    """A plan of the step within a budget, and why there is none.

    Raises nothing: this is for the message of another error.
    """
    try:
        return running.plan(budget_bytes, _Clock(seconds)), ""
    except _TooLongError:
        return None, f"planning it anew takes more than {seconds:.0f} s"
    except JaxmemError as error:
        return None, str(error).split("\n", 1)[0]
    except Exception as error:
        # Whatever goes wrong here must not hide the error that is being explained.
        if is_out_of_memory(error):
            return None, "there is no memory left to compile another program"
        return None, f"planning it anew failed: {type(error).__name__}"


def reported(running: Running) -> tuple[MemoryReport | None, str]:
    """Where the bytes of the step are, and why that is not known."""
    try:
        return running.report(), ""
    except Exception as error:  # See above.
        return None, f"what fills {running.name} could not be told: {type(error).__name__}"


def running_of(called: Called) -> tuple[Running | None, str]:
    """The step of a call of a jitted function, and why it cannot be had."""
    if called.args is None:
        return None, f"the arguments of {called.name} at {called.line} are expressions"
    try:
        return _traced(called), ""
    except Exception as error:  # The user's own function is traced; see above.
        return None, f"{called.name} could not be traced anew: {type(error).__name__}"


def _traced(called: Called) -> Running:
    assert called.args is not None
    target = Target.local(measure=False)
    given, kwargs = called.args, called.kwargs
    caller = Caller(called.fun)
    donating = tuple(n for n in called.replaced if n not in caller.donate)
    fitting = Caller(called.fun, donating)
    with tracing_for(target), nnx.context((given, kwargs)):
        as_called = caller.trace(caller.take(given, kwargs)).program
        call = fitting.take(given, kwargs)
        # One of its own: over a mesh a plan may have values split in another way.
        program = fitting.trace(call).program

    def report() -> MemoryReport:
        compiled = Compiler(as_called, target, pinned=False).keep_all()
        return report_on(as_called, target, as_called.block, compiled)

    def plan(budget_bytes: int, progress: Callable[[str], None]) -> Plan:
        compiler = Compiler(program, target, deadline=Deadline(MOST_SEARCH_SECONDS))
        return rounds.fit(compiler, budget_bytes, progress, host_bytes=0).plan

    option = donation({*donating, *caller.donate})
    leaves = jax.tree.leaves((called.args, called.kwargs))
    return Running(
        name=called.name,
        code=f'{called.name} = jaxmem.fit({called.name}, budget="{{budget}}"{option})',
        program=program,
        arguments=[leaf for leaf in (*leaves, *program.consts) if is_alive(leaf)],
        report=report,
        plan=plan,
        compiled_bytes=None,
        donating=bool(donating),
        spare_bytes=0 if donating else spare_bytes(program),
    )


def donation(numbers: Iterable[int]) -> str:
    """The option of ``fit`` that donates arguments.

    >>> donation([0]), donation([1, 0]), donation([])
    (', donate_argnums=0', ', donate_argnums=(0, 1)', '')
    """
    donate = sorted(numbers)
    if len(donate) == 1:
        return f", donate_argnums={donate[0]}"
    return f", donate_argnums={tuple(donate)}" if donate else ""


def spare_bytes(program: Program) -> int:
    """Results that have the shape of an argument that is not donated, and take more room for it."""
    free: dict[tuple[Any, ...], int] = {}
    values = program.block.inputs[len(program.consts) :]
    for leaf, value in zip(program.arguments, values, strict=True):
        if not leaf.donated:
            key = (tuple(value.aval.shape), value.aval.dtype)
            free[key] = free.get(key, 0) + 1
    spare, aliased = 0, program.aliased_results
    for number, atom in enumerate(program.block.outputs):
        key = (tuple(getattr(atom.aval, "shape", ())), getattr(atom.aval, "dtype", None))
        if number not in aliased and free.get(key, 0):
            free[key] -= 1
            spare += getattr(atom, "nbytes", 0)
    return spare


def is_alive(leaf: Any) -> bool:
    """Whether it is an array that holds data."""
    return isinstance(leaf, jax.Array) and not leaf.is_deleted()
