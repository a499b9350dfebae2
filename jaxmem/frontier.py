"""What every budget would cost: the trade-off of peak bytes and seconds; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.errors import ArgumentError
from jaxmem.fitted import FittedStep, fitted
from jaxmem.planner.frontier import Frontier
from jaxmem.program import nnx
from jaxmem.runtime.bound import BoundStep
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.frontier import POINTS, curve
from jaxmem.runtime.progress import Report
from jaxmem.runtime.progress import progress as show_progress
from jaxmem.targets.target import Target
from jaxmem.targets.topology import tracing_for


def frontier(
    fun: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    points: int = POINTS,
    compile: bool = False,
    progress: bool | Report | None = None,
    **kwargs: Any,
) -> Frontier:
    """The best trades of peak bytes for seconds of a step, from keep-all to the smallest program.

    Use it before choosing a budget. It runs nothing and changes nothing. The figures are those of
    jaxmem's simulator, not of the compiler, unless ``compile`` is set; :func:`jaxmem.plan` for a
    budget on the curve finds a program that the compiler confirms. Host memory is not used, a
    policy is not followed, and ``jaxmem.AUTO`` stands for 1.

    Args:
        fun: the step, or a step that is fitted already (its own settings are then used).
        *args: arrays or ``jax.ShapeDtypeStruct``s; ``**kwargs`` likewise.
        target: as for :func:`jaxmem.fit`; ``donate_argnums``, ``static_argnums`` and ``progress``
            too.
        points: how many budgets are solved for, 2 or more. What the search sees on the way is on
            the curve as well.
        compile: compile as many of the points, and the stock policies.

    Returns:
        A :class:`~jaxmem.planner.frontier.Frontier`: prints as a table, with ``.points``,
        ``.stock``, ``.at(budget)``, ``.marginal(budget)``, ``.plot()`` and ``.to_json()``.

    Raises:
        ArgumentError: ``points`` is not a number of 2 or more.
        TraceError: JAX cannot trace the function.

    Cost:
        One trace and ``points`` searches; over several devices one compile, elsewhere none; with
        ``compile`` about ``points + 8``, over several GPUs up to twice as many.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w, x):
    ...     for _ in range(4):
    ...         x = jnp.tanh(x @ w)
    ...     return (x**2).mean()
    >>> curve = jaxmem.frontier(jax.grad(loss), jnp.eye(128), jnp.ones((512, 128)), points=3)
    >>> curve.points[0].peak_bytes < curve.points[-1].peak_bytes
    True
    >>> curve.points[0].seconds > curve.points[-1].seconds == curve.at("1GiB").seconds
    True
    """
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise ArgumentError(f"points is {points!r}: it takes a whole number of 2 or more.")
    step = fitted(
        fun,
        budget=None,
        target=target,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        verify=True,
        progress=progress,
    )
    if isinstance(step, BoundStep):
        step, args = step.__func__, (step.__self__, *args)
    return _of_step(step, args, kwargs, points, compile)


def _of_step(
    step: FittedStep, args: tuple[Any, ...], kwargs: dict[str, Any], points: int, compile: bool
) -> Frontier:
    target = step._planning.target
    telling = show_progress(step._planning.progress, f"frontier of {step._caller.name}")
    with tracing_for(target), nnx.context((args, kwargs)):
        call = step._take(args, kwargs)
        with step._tracing(call):
            program = step._caller.trace(call).program
            compiler = Compiler(program, target, check=bool(step._planning.verify))
    with tracing_for(target), step._tracing(call), telling as report:
        return curve(compiler, points, compile, report)
