"""How long a step takes on the device that is here, as written and as planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmem.errors import ArgumentError
from jaxmem.fitted import FittedStep, fitted
from jaxmem.planning import Budget
from jaxmem.program import nnx
from jaxmem.program.calling import Traced
from jaxmem.program.ir import Hosting
from jaxmem.runtime.bench import Bench
from jaxmem.runtime.benchmark import Benchmark, Timed
from jaxmem.runtime.bound import BoundStep
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.planned import Chosen
from jaxmem.runtime.progress import Report
from jaxmem.runtime.progress import progress as show_progress
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.target import Target
from jaxmem.targets.topology import tracing_for
from jaxmem.units import format_bytes


def bench(
    fun: Callable[..., Any],
    *args: Any,
    budget: Budget = None,
    progress: bool | Report | None = None,
    **kwargs: Any,
) -> Benchmark:
    """The seconds and bytes of a step as written and as planned, on the device that is here.

    The two take turns, on copies of what is donated, or on zeros where there are only shapes; so
    the arguments are as they were afterwards. A program that needs more than the device has is not
    run, and says so.

    Args:
        fun: the step, or a step that is fitted already (its own settings are then used).
        *args: arrays or ``jax.ShapeDtypeStruct``s; ``**kwargs`` likewise.
        budget: as for :func:`jaxmem.fit`; ``progress`` too.

    Raises:
        ArgumentError: the step is fitted for another device or with ``host=``, or has effects.
        BudgetInfeasibleError: no plan fits.

    Cost:
        What planning costs, one compile more, and 7 to 27 runs of each program.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    >>> found = bench(jax.grad(lambda x: (x**2).sum()), x, budget="1MiB")
    >>> [program.name for program in found.programs]
    ['as written', 'planned']
    >>> found.programs[0].median_seconds > 0
    True
    """
    step = fitted(
        fun,
        budget=budget,
        target=None,
        donate_argnums=(),
        static_argnums=(),
        verify=True,
        progress=progress,
    )
    if isinstance(step, BoundStep):
        step, args = step.__func__, (step.__self__, *args)
    return _of_step(step, args, kwargs)


def _of_step(step: FittedStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Benchmark:
    target = step._planning.target
    with nnx.context((args, kwargs)):
        call = step._take(args, kwargs)
        with step._tracing(call):
            bench = Bench(call, target, asked="jaxmem bench")
            bench.check(step._trace(call).program)
            traced, outcome = step._fit(call)
            if outcome.stream is not None:
                raise ArgumentError(
                    f"{outcome.plan.function}: jaxmem bench times steps that are one program, and "
                    "this one updates leaves in host memory piece by piece (host=). Profile its "
                    "second call, which says the seconds of the step and what its copies cost: "
                    "results = step(state, batch), then results, profile = step.profile(state, "
                    "batch) with the new state; print(profile)."
                )
            telling = show_progress(step._planning.progress, f"timing {outcome.plan.function}")
            with telling as report, tracing_for(target):
                written = _written(step, call, traced, outcome)
                report("compiling the step as written")
                plain = Chosen(None, Compiler(written.program, target, pinned=False).keep_all(), 0)
                planned = Chosen(None, outcome.compiled, outcome.plan.predicted_bytes)
                report("running both programs")
                return _timed(bench, (written, plain), (traced, planned), outcome, target)


def _written(step: FittedStep, call: Any, traced: Traced, outcome: Outcome) -> Traced:
    """The step without microbatches that the planner chose, and split as the compiler splits it."""
    as_it_is = outcome.plan.microbatches == 1 and not outcome.plan.pinned
    return traced if as_it_is else step._caller.trace(call, 1)


def _timed(
    bench: Bench,
    written: tuple[Traced, Chosen],
    planned: tuple[Traced, Chosen],
    outcome: Outcome,
    target: Target,
) -> Benchmark:
    plan = outcome.plan
    pairs = [(written[0].program, written[1]), (planned[0].program, planned[1])]
    hostings = [Hosting(), outcome.hosting]
    missing = [bench.missing_bytes(program, chosen) for program, chosen in pairs]
    # The planned program has to have room; as it was written a step may be too large to run.
    run = [n for n in (0, 1) if n == 1 or missing[n] <= 0]
    taken = bench.seconds([(*pairs[n], hostings[n]) for n in run])
    seconds = dict(zip(run, map(tuple, taken), strict=True))
    why = f"not run: it needs {format_bytes(missing[0])} more than {target.name} has"
    told = [("as written", plan.keep_all_seconds), ("planned", plan.predicted_seconds)]
    return Benchmark(
        plan.function,
        target.name,
        plan.budget_bytes,
        tuple(
            Timed(name, pairs[n][1].compiled.memory.total_bytes, predicted, seconds[n], "")
            if n in seconds
            else Timed(name, pairs[n][1].compiled.memory.total_bytes, predicted, (), why)
            for n, (name, predicted) in enumerate(told)
        ),
        plan.solver,
    )
