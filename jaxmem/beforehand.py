"""What a step will need, told beforehand: its plan, and where its memory goes as written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.fitted import FittedStep, fitted
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.planning import Budget
from jaxmem.policies import Policy
from jaxmem.program import nnx
from jaxmem.program.calling import Caller
from jaxmem.runtime.analysis import report_on
from jaxmem.runtime.bound import BoundStep, refuse_settings
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.progress import Report
from jaxmem.targets.target import Target
from jaxmem.targets.topology import tracing_for


def plan(
    fun: Callable[..., Any],
    *args: Any,
    budget: Budget = None,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    verify: bool = True,
    progress: bool | Report | None = None,
    host_budget: Budget = None,
    policy: Policy | None = None,
    measure: bool = False,
    time_limit: float | None = None,
    **kwargs: Any,
) -> Plan:
    """The plan that :func:`fit` would follow; runs nothing, unless it is to ``measure``.

    Args:
        fun: the step, or a step that is fitted already (its own settings are then used).
        *args: arrays or ``jax.ShapeDtypeStruct``s; ``**kwargs`` likewise.
        budget: as for :func:`fit`; ``target``, ``donate_argnums``, ``static_argnums``,
            ``verify``, ``progress``, ``host_budget``, ``policy``, ``measure`` and ``time_limit``
            too.

    Raises:
        BudgetInfeasibleError: no plan fits; it names the smallest budget that works.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    >>> jaxmem.plan(jax.grad(lambda x: (x**2).sum()), x, budget="1MiB").predicted_bytes <= 2**20
    True
    """
    step = fitted(
        fun,
        budget=budget,
        target=target,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        verify=verify,
        progress=progress,
        host_budget=host_budget,
        policy=policy,
        measure=measure,
        time_limit=time_limit,
    )
    return step.plan(*args, **kwargs)


def analyze(
    fun: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> MemoryReport:
    """Where the memory peak of a step is and what fills it, without running anything.

    Args:
        fun: the step as written.
        *args: arrays or ``jax.ShapeDtypeStruct``s; ``**kwargs`` likewise.
        target: as for :func:`fit`; ``donate_argnums`` and ``static_argnums`` too.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    >>> report = jaxmem.analyze(jax.grad(lambda x: (x**2).sum()), x)
    >>> report.argument_bytes, report.by_argument()
    (32768, {'x': 32768})
    """
    if isinstance(fun, FittedStep | BoundStep):
        refuse_settings(
            fun,
            target=target,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )
        return fun.report(*args, **kwargs)
    caller = Caller(fun, donate_argnums, static_argnums)
    where = Target.resolve(target)
    with tracing_for(where), nnx.context((args, kwargs)):
        program = caller.trace(caller.take(args, kwargs)).program
    compiler = Compiler(program, where, pinned=False)
    return report_on(compiler.program, where, compiler.block(None), compiler.keep_all())
