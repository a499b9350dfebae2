"""A fitted step: it is called like the step as written, and plans for each new signature."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxmem import _compat
from jaxmem.displayed import Displayed
from jaxmem.errors import ArgumentError
from jaxmem.monitor.oom.failed import Fitted, out_of_memory
from jaxmem.monitor.oom.steps import MOST_SEARCH_SECONDS
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.planning import Budget, Planning, Verify
from jaxmem.policies import Policy
from jaxmem.program import nnx
from jaxmem.program.call import Call, differ_only_in_memory
from jaxmem.program.calling import Caller, Traced
from jaxmem.program.microbatches import Auto, standing_for
from jaxmem.runtime import finite
from jaxmem.runtime.analysis import report_on
from jaxmem.runtime.bound import BoundStep, refuse_settings
from jaxmem.runtime.options import as_python
from jaxmem.runtime.profile import StepProfile, profiled
from jaxmem.runtime.progress import Report
from jaxmem.runtime.repeated import Repeats
from jaxmem.runtime.step import Step, inputs, rebuilding
from jaxmem.runtime.tries import Outcome
from jaxmem.state import automatic, meshed
from jaxmem.state.placement import place
from jaxmem.targets.target import Target


class FittedStep(Displayed):
    """A step that runs inside a byte budget; made by :func:`jaxmem.fit`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        budget: Budget,
        target: Target | str | None,
        donate_argnums: int | Sequence[int],
        static_argnums: int | Sequence[int],
        verify: Verify,
        progress: bool | Report | None,
        plan: Plan | None = None,
        host_budget: Budget = None,
        host: str | Sequence[str] | Auto | None = None,
        policy: Policy | None = None,
        measure: bool = False,
        time_limit: float | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        shard: Any = None,
    ):
        self._settings = {n: v for n, v in locals().items() if n not in ("self", "fun")}
        functools.update_wrapper(self, fun, updated=())
        if isinstance(fun, FittedStep):
            raise ArgumentError(f"{fun._caller.name} is fitted already: fit it once.")
        self._written = fun
        self._caller = Caller(fun, donate_argnums, static_argnums)
        elsewhere = ("donate_argnums", "static_argnums", "mesh", "shard")
        asked = {n: v for n, v in self._settings.items() if n not in elsewhere}
        self._planning = Planning.checked(self._caller, **asked)
        self._ways = automatic.ways(shard)
        first = list(self._ways[0].rules) if self._ways else shard
        waits = bool(self._planning.hosts) or plan is not None
        self._meshed = meshed.make(self._caller, mesh, first, target, host=waits)
        if measure and self._meshed is not None:
            self._meshed.check_can_run()
        self._traced: dict[Hashable, Traced] = {}
        self._outcomes: dict[Hashable, Outcome] = {}
        self._steps: dict[Hashable, Step] = {}
        self._repeats = Repeats(self._caller)
        self._one_at_a_time = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; the first call for new shapes plans and compiles it.

        Under ``jax.disable_jit()`` the step runs as written, as it does under ``jax.jit``.
        """
        try:
            return self._run(args, kwargs)
        except Exception as error:  # Told of two kinds; any other goes on as it is.
            found = _compat.not_finite(error)
            if found:
                raise finite.found_in(found, self._caller.name) from error
            failed = out_of_memory(error, functools.partial(self._told, args, kwargs))
            if failed is None:
                raise
        # The traceback keeps this frame, which must keep none of the arrays.
        args, kwargs = (), {}
        raise failed

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            with standing_for(1):
                return self._written(*args, **kwargs)
        given = self._repeats.given(args, kwargs)
        repeated = self._repeats.find(given)
        if repeated is not None:
            return repeated()
        with nnx.context((args, kwargs)):
            call = self._take(args, kwargs)
            with self._tracing(call):
                step = self._step(call)
            with rebuilding(functools.partial(_put_back, (args, kwargs))):
                ran = step(call)
                returned = nnx.put_back(ran.results)
        self._repeats.learn(given, (args, kwargs), call, step, ran, returned)
        return returned

    def _told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fitted | None:
        """What is told of a step that ran out of memory; ``None`` if it was not compiled."""
        with nnx.context((args, kwargs)):
            call = self._returned(self._take(args, kwargs))
        outcome = self._outcomes.get(call.key)
        if outcome is None:
            return None
        program = self._traced[call.key].program

        def plan(budget_bytes: int, donate: tuple[int, ...], report: Report) -> Plan:
            changed = {"budget": budget_bytes, "donate_argnums": donate, "progress": report}
            limited = {"plan": None, "measure": False, "time_limit": MOST_SEARCH_SECONDS}
            again = FittedStep(self._written, **{**self._settings, **changed, **limited})
            return again.plan(*args, **kwargs)

        arguments = [*program.consts, *call.leaves]
        donate, options = tuple(self._caller.donate), as_python(self._settings)
        report = functools.partial(self.report, *args, **kwargs)
        name, nbytes = self._caller.name, outcome.plan.compiled_bytes
        return Fitted(self, name, program, arguments, donate, options, report, plan, nbytes)

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = self._caller.take(args, kwargs)
        if self._ways:
            self._choose(args, kwargs)
        return call if self._meshed is None else self._meshed.lay_out(call, args, kwargs)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Settle how the state is split, for these arguments and all that come later."""
        with self._one_at_a_time:
            if not self._ways:
                return

            def planned(way: automatic.Way) -> tuple[FittedStep, Plan]:
                step = copy.copy(self)
                step._meshed = self._meshed and self._meshed.ruled_by(list(way.rules))
                step._ways, step._traced, step._outcomes = (), {}, {}
                limit = self._planning.time_limit
                step._planning = replace(
                    self._planning, time_limit=limit and limit / len(self._ways)
                )
                return step, step.plan(*args, **kwargs)

            chosen, note = automatic.choose(self._caller.name, self._ways, planned)
            for key, outcome in chosen._outcomes.items():
                self._traced[key] = chosen._traced[key]
                self._outcomes[key] = automatic.with_note(outcome, note)
            self._meshed, self._ways = chosen._meshed, ()

    def _tracing(self, call: Call) -> AbstractContextManager[Any]:
        return nullcontext() if self._meshed is None else self._meshed.laid(call).tracing()

    def _step(self, call: Call) -> Step:
        step = self._steps.get(call.key)
        if step is None:
            step = self._steps[call.key] = self._make(self._returned(call))
        return step

    def _returned(self, call: Call) -> Call:
        """``call``, known by the first call that differs only in the memory of hosted leaves.

        A step gives them back in host memory, wherever they were when it was planned.
        """
        # Another thread may be planning for other arguments.
        for key, outcome in list(self._outcomes.items()):
            first = len(self._traced[key].program.consts)
            hosted = frozenset(n - first for n in outcome.hosting.inputs)
            if hosted and differ_only_in_memory(call.key, key, hosted):
                return replace(call, key=key)
        return call

    def _make(self, call: Call) -> Step:
        """The step for a new signature; other threads that ask for it wait."""
        with self._one_at_a_time:
            step = self._steps.get(call.key)
            if step is None:
                if self._meshed is not None:
                    self._meshed.check_can_run()
                inputs(self._trace(call).program, call)
                step = Step.make(*self._fit(call))
                if self._planning.verify == "full":
                    step.check_against_plain(call)
                self._steps[call.key] = step
            return step

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method the step gets the instance first, as functions under ``jax.jit`` do."""
        return self if instance is None else BoundStep(self, instance)

    def __deepcopy__(self, memo: Any) -> FittedStep:
        """Itself, as of functions and of what ``jax.jit`` makes."""
        return self

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes; arrays or ``ShapeDtypeStruct``s.

        Runs nothing, unless the step was fitted with ``measure=True``.
        """
        return self._planned(args, kwargs)[1].plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that were made so far, one for each signature."""
        return tuple(outcome.plan for outcome in list(self._outcomes.values()))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """JAX's lowered object of the planned program, for the target, as ``jax.jit`` gives it.

        Its arguments are the array leaves, one by one. ``.compile()`` costs nothing more: it
        gives the executable that was planned, with its ``memory_analysis()`` and ``as_text()``.
        """
        return self._planned(args, kwargs)[1].compiled.lowered

    def report(self, *args: Any, **kwargs: Any) -> MemoryReport:
        """Where the peak of the planned program is and what fills it.

        Of a step whose state streams from host memory (``host=``), of what computes its gradients.
        """
        traced, outcome = self._planned(args, kwargs)
        program = outcome.program(traced.program)
        return report_on(program, self._planning.target, outcome.block, outcome.compiled)

    def profile(self, *args: Any, **kwargs: Any) -> tuple[Any, StepProfile]:
        """Run one step and tell what the GPU did meanwhile: computed, copied, waited for copies.

        A step like any other: what is donated is used up, and its results come first. Profile the
        second step or a later one; a first one also loads its kernels.

        Returns:
            What the step returns, and its :class:`~jaxmem.runtime.profile.StepProfile`.

        Raises:
            ArgumentError: the device is no GPU; nothing was run then.

        >>> (state, loss), profile = step.profile(state, batch)  # doctest: +SKIP
        >>> profile.exposed_seconds  # doctest: +SKIP
        0.0004
        """
        with nnx.context((args, kwargs)):
            call = self._take(args, kwargs)
            with self._tracing(call):
                self._step(call)
        told: list[Any] = []

        def run() -> Any:
            told.append(self(*args, **kwargs))
            return told

        profile = profiled(run)
        return told[0], profile

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The positional arguments, every array where the plan wants it.

        NNX objects are returned as they are, with what they hold put in place. What goes to
        host memory or to another part of a mesh has arrived when this returns, and is free on the
        device once the caller gives it up.
        """
        traced, outcome, call = self._called(args, kwargs)
        layouts, first = traced.program.layouts(outcome.hosting), len(traced.program.consts)
        # An array that is on the device as well, as another leaf, is copied by the first step.
        here = {id(a) for n, a in enumerate(call.leaves) if first + n not in outcome.hosting.inputs}
        leaves = ((n, id(call.leaves[n - first])) for n in outcome.hosting.inputs)
        there = {name: layouts[n] for n, name in leaves if name not in here}
        if self._meshed is not None:
            self._meshed.check_can_run()
            pairs = zip(call.leaves, layouts[first:], strict=True)
            arrays = ((a, layout) for a, layout in pairs if isinstance(a, jax.Array | np.ndarray))
            there |= {id(a): layout for a, layout in arrays if id(a) not in there}
        return place(args, there)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, Outcome]:
        return self._called(args, kwargs)[:2]

    def _called(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Traced, Outcome, Call]:
        with nnx.context((args, kwargs)), self._one_at_a_time:
            call = self._returned(self._take(args, kwargs))
            with self._tracing(call):
                return *self._fit(call), call

    def _trace(self, call: Call) -> Traced:
        if call.key not in self._traced:
            self._traced[call.key] = self._planning.traced(call)
        return self._traced[call.key]

    def _fit(self, call: Call) -> tuple[Traced, Outcome]:
        traced = self._trace(call)
        if call.key not in self._outcomes:
            traced, outcome = self._planning.fit(call, traced)
            if self._meshed is not None:
                plan = outcome.plan
                notes = (*plan.notes, *self._meshed.laid(call).notes)
                outcome = replace(outcome, plan=replace(plan, notes=notes))
            self._traced[call.key], self._outcomes[call.key] = traced, outcome
        return self._traced[call.key], self._outcomes[call.key]


def _put_back(arguments: Any, results: Any) -> Any:
    with nnx.context(arguments):
        nnx.split(arguments)  # The context learns which objects there are.
        return nnx.put_back(results)


def fitted(fun: Callable[..., Any], **settings: Any) -> FittedStep | BoundStep:
    """``fun`` fitted with ``settings``; a step that is fitted already as it is, with its own.

    Raises:
        ArgumentError: the step is fitted already, and other settings are given.
    """
    if isinstance(fun, FittedStep | BoundStep):
        refuse_settings(fun, **settings)
        return fun
    return FittedStep(fun, **settings)
