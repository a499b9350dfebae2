"""A fitted step: trace, plan, rewrite, compile, check, run. The whole way on one page."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxmem import processes
from jaxmem.displayed import Displayed
from jaxmem.errors import ArgumentError, PlanMismatchError
from jaxmem.monitor.oom.failed import Fitted, out_of_memory
from jaxmem.monitor.oom.steps import MOST_SEARCH_SECONDS
from jaxmem.planner.deadline import Deadline
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.policies import Policy
from jaxmem.program import nnx
from jaxmem.program.call import Call, differ_only_in_memory
from jaxmem.program.calling import Caller, Traced
from jaxmem.program.microbatches import AUTO, Auto, standing_for
from jaxmem.runtime import agreed, choosing, following, microbatches, rounds, streamed
from jaxmem.runtime.analysis import report_on
from jaxmem.runtime.asked import Asked, asked_by, asked_by_plan, check_patterns, on_device
from jaxmem.runtime.bench import Bench
from jaxmem.runtime.bound import BoundStep, refuse_settings
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.host import asked_host_budget, check_host_budget
from jaxmem.runtime.options import as_python, check_options
from jaxmem.runtime.profile import StepProfile, profiled
from jaxmem.runtime.progress import Report, progress
from jaxmem.runtime.repeated import Repeats
from jaxmem.runtime.step import Step, inputs, rebuilding
from jaxmem.runtime.tries import Outcome
from jaxmem.state import automatic, meshed
from jaxmem.state.placement import place
from jaxmem.targets.compiling import usable_bytes
from jaxmem.targets.target import Target
from jaxmem.targets.topology import tracing_for
from jaxmem.units import check_budget, format_bytes, parse_budget

Budget = int | str | None
Verify = bool | Literal["full"]


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
        check_options(verify, plan, policy, measure, time_limit)
        if isinstance(fun, FittedStep):
            raise ArgumentError(f"{fun._caller.name} is fitted already: fit it once.")
        self._written = fun
        self._caller = Caller(fun, donate_argnums, static_argnums)
        self._budget, self._wanted_target = budget, target
        self._verify, self._progress, self._given = verify, progress, plan
        self._policy, self._measure, self._time_limit = policy, measure, time_limit
        check_budget(budget)
        check_host_budget(host_budget)
        self._host_budget, self._host = host_budget, check_patterns(host, plan, measure)
        if target is not None:
            Target.resolve(target)
        self._ways = automatic.ways(shard)
        first = list(self._ways[0].rules) if self._ways else shard
        waits = bool(self._host) or plan is not None
        self._meshed = meshed.make(self._caller, mesh, first, target, host=waits)
        if measure and self._meshed is not None:
            self._meshed.check_can_run()
        self._traced: dict[Hashable, Traced] = {}
        self._outcomes: dict[Hashable, Outcome] = {}
        self._steps: dict[Hashable, Step] = {}
        self._repeats = Repeats(self._caller)
        self._planning = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; the first call for new shapes plans and compiles it.

        Under ``jax.disable_jit()`` the step runs as written, as it does under ``jax.jit``.
        """
        try:
            return self._run(args, kwargs)
        except Exception as error:
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
        with self._planning:
            if not self._ways:
                return

            def planned(way: automatic.Way) -> tuple[FittedStep, Plan]:
                step = copy.copy(self)
                step._meshed = self._meshed and self._meshed.ruled_by(list(way.rules))
                step._ways, step._traced, step._outcomes = (), {}, {}
                step._time_limit = self._time_limit and self._time_limit / len(self._ways)
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
        for key, outcome in self._outcomes.items():
            first = len(self._traced[key].program.consts)
            hosted = frozenset(n - first for n in outcome.hosting.inputs)
            if hosted and differ_only_in_memory(call.key, key, hosted):
                return replace(call, key=key)
        return call

    def _make(self, call: Call) -> Step:
        """The step for a new signature; other threads that ask for it wait."""
        with self._planning:
            step = self._steps.get(call.key)
            if step is None:
                if self._meshed is not None:
                    self._meshed.check_can_run()
                inputs(self._trace(call).program, call)
                step = Step.make(*self._fit(call))
                if self._verify == "full":
                    step.check_against_plain(call)
                self._steps[call.key] = step
            return step

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method the step gets the instance first, as functions under ``jax.jit`` do."""
        return self if instance is None else BoundStep(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes; arrays or ``ShapeDtypeStruct``s.

        Runs nothing, unless the step was fitted with ``measure=True``.
        """
        return self._planned(args, kwargs)[1].plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that were made so far, one for each signature."""
        return tuple(outcome.plan for outcome in self._outcomes.values())

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
        return report_on(program, self._target(), outcome.block, outcome.compiled)

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

        NNX objects are returned as they are, with what they hold put in place.
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
        with nnx.context((args, kwargs)), self._planning:
            call = self._returned(self._take(args, kwargs))
            with self._tracing(call):
                return *self._fit(call), call

    def _target(self) -> Target:
        return Target.resolve(self._wanted_target)

    def _check_host(self, plan: Plan, target: Target) -> None:
        """Check that a plan that is followed keeps no more in host memory than was allowed."""
        allowed = asked_host_budget(self._host_budget, target)
        if allowed is not None and plan.host_bytes > allowed:
            raise PlanMismatchError(
                f"the plan for {plan.function} keeps {format_bytes(plan.host_bytes)} in host "
                f"memory, and host_budget={self._host_budget!r} allows {format_bytes(allowed)}. "
                "Leave host_budget out to follow the plan, or plan again with it."
            )

    def _streamed(self, traced: Traced, target: Target) -> Asked | Auto | None:
        """What is asked of leaves in host memory, by ``host=`` or by a plan that is followed."""
        program = traced.program
        if self._given is not None and self._given.streamed is not None:
            self._check_host(self._given, target)
            return asked_by_plan(program, self._given)
        if not self._host:
            return None
        if traced.automatic:
            raise ArgumentError(
                f"{program.name}: the number of microbatches is not chosen for a step with host= "
                "yet. Give accumulate a number in place of jaxmem.AUTO."
            )
        if isinstance(self._host, Auto):
            return AUTO
        return asked_by(program, self._host, target, asked_host_budget(self._host_budget, target))

    def _trace(self, call: Call) -> Traced:
        if call.key not in self._traced:
            given = self._given
            count = given.microbatches if given is not None else 1
            named = self._host if given is None else given.hosted
            here = on_device(call, named) if named else call
            with tracing_for(self._target()):
                self._traced[call.key] = self._caller.trace(here, count, planned=given is not None)
        return self._traced[call.key]

    def _fit(self, call: Call) -> tuple[Traced, Outcome]:
        traced = self._trace(call)
        if call.key not in self._outcomes:
            target, program = self._target(), traced.program
            budget_bytes = parse_budget(self._budget, usable_bytes(target), target.name)
            host_bytes = asked_host_budget(self._host_budget, target)
            decide = functools.partial(self._decide, call, target)
            if agreed.is_shared(program):
                if self._time_limit is not None:
                    raise ArgumentError(
                        f"{program.name}: time_limit= in {jax.process_count()} processes could "
                        "choose another plan on each. Plan once with it, save the plan, and pass "
                        "it to all: fit(..., plan=Plan.load(path))."
                    )
                settings = [
                    f"{name}={value!r}"
                    for name, value in (
                        ("budget", self._budget),
                        ("target", target.name),
                        ("host_budget", self._host_budget),
                        ("donated", [a.path for a in program.arguments if a.donated]),
                    )
                ]
                outcome = agreed.fit(
                    program, settings, budget_bytes, host_bytes, self._given, decide
                )
            else:
                outcome = decide(budget_bytes, host_bytes, self._given)
            if self._meshed is not None:
                plan = outcome.plan
                notes = (*plan.notes, *self._meshed.laid(call).notes)
                outcome = replace(outcome, plan=replace(plan, notes=notes))
            self._outcomes[call.key] = outcome
        return self._traced[call.key], self._outcomes[call.key]

    def _decide(
        self,
        call: Call,
        target: Target,
        budget_bytes: int,
        host_bytes: int | None,
        given: Plan | None,
    ) -> Outcome:
        """Plan for a target, or follow a plan."""
        traced = self._traced[call.key]
        deadline = Deadline(math.inf if self._time_limit is None else self._time_limit)
        settings = {"check": bool(self._verify), "policy": self._policy, "deadline": deadline}
        compiler_of = functools.partial(Compiler, target=target, **settings)
        bench = Bench(call, target) if self._measure else None
        if bench is not None:
            bench.check(traced.program)
        is_quiet = agreed.is_shared(traced.program) and processes.number() != 0
        telling = progress(False if is_quiet else self._progress, f"planning {self._caller.name}")

        def streaming(asked: Asked, report: Report) -> Outcome:
            return streamed.fit(traced.program, asked, compiler_of, target, budget_bytes, report)

        def one_program(report: Report) -> Outcome:
            compiler = compiler_of(traced.program)
            return rounds.fit(compiler, budget_bytes, report, host_bytes=host_bytes, bench=bench)

        with telling as report, tracing_for(target):
            asked = self._streamed(traced, target)
            if isinstance(asked, Auto):
                tries = one_program, streaming
                return choosing.fit(traced.program, *tries, target, host_bytes, deadline, report)
            if asked is not None:
                return streaming(asked, report)
            if given is not None:
                self._check_host(given, target)
                return following.follow(compiler_of(traced.program), given, budget_bytes, report)
            if traced.automatic:
                trace = functools.partial(self._caller.trace, call)
                compiler = compiler_of(traced.program)
                also = {"host_bytes": host_bytes, "bench": bench}
                self._traced[call.key], outcome = microbatches.fit(
                    traced, trace, compiler, budget_bytes, report, **also
                )
                return outcome
            return one_program(report)


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
