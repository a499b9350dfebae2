"""What a step will need, told beforehand: its plan, and where its memory goes as written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxmem.errors import ArgumentError
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
        ArgumentError: one of ``**kwargs`` is a setting that only :func:`fit` has.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    >>> jaxmem.plan(jax.grad(lambda x: (x**2).sum()), x, budget="1MiB").predicted_bytes <= 2**20
    True
    """
    _refuse_settings_of_fit(fun, kwargs, "plan")
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
    _refuse_settings_of_fit(fun, kwargs, "analyze")
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


def _refuse_settings_of_fit(fun: Callable[..., Any], kwargs: Collection[str], asked: str) -> None:
    """What is meant for :func:`fit` must not be taken for an argument of the step."""
    settings = inspect.signature(FittedStep).parameters.keys() - {"fun"}
    wrong = sorted(settings.intersection(kwargs))
    if not wrong:
        return
    takes = inspect.signature(fun).parameters.values()
    if any(p.kind is p.VAR_KEYWORD or p.name in wrong for p in takes):
        return
    name = getattr(fun, "__name__", "the step")
    told = {"plan": "plan", "analyze": "report"}[asked]
    raise ArgumentError(
        f"{wrong[0]}= is a setting of jaxmem.fit and not of jaxmem.{asked}, and {name} has no "
        f"argument of that name. Use jaxmem.fit({name}, {wrong[0]}=...).{told}(...)."
    )
