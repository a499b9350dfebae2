"""What a step was asked to be, and the way from its trace to a program, searched or followed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxmem import processes
from jaxmem.errors import ArgumentError, PlanMismatchError
from jaxmem.planner.deadline import Deadline
from jaxmem.planner.plan import Plan
from jaxmem.policies import Policy
from jaxmem.program.call import Call
from jaxmem.program.calling import Caller, Traced
from jaxmem.program.microbatches import AUTO, Auto
from jaxmem.program.pinning import has_pins
from jaxmem.runtime import agreed, choosing, following, microbatches, rounds, streamed
from jaxmem.runtime.asked import Asked, asked_by, asked_by_plan, check_patterns, on_device
from jaxmem.runtime.bench import Bench
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.host import asked_host_budget, check_host_budget
from jaxmem.runtime.options import check_options
from jaxmem.runtime.progress import Report, progress
from jaxmem.runtime.rates import rates_of
from jaxmem.runtime.splitting import split
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.compiling import most_bytes, usable_bytes
from jaxmem.targets.target import Target
from jaxmem.targets.topology import tracing_for
from jaxmem.units import check_budget, format_bytes, parse_budget

Budget = int | str | None
Verify = bool | Literal["full"]


@dataclass(frozen=True, eq=False)
class Planning:
    """How a step is planned; the attributes are the options of ``jaxmem.fit``.

    Attributes:
        caller: of the step.
        wanted_target: what was given as ``target``.
        given: what was given as ``plan``.
        hosts: patterns of leaves that wait in host memory, or ``AUTO``.
    """

    caller: Caller
    budget: Budget
    wanted_target: Target | str | None
    verify: Verify
    progress: bool | Report | None
    given: Plan | None
    host_budget: Budget
    hosts: tuple[str, ...] | Auto
    policy: Policy | None
    measure: bool
    time_limit: float | None

    @classmethod
    def checked(
        cls,
        caller: Caller,
        *,
        budget: Budget,
        target: Target | str | None,
        verify: Verify,
        progress: bool | Report | None,
        plan: Plan | None,
        host_budget: Budget,
        host: str | Sequence[str] | Auto | None,
        policy: Policy | None,
        measure: bool,
        time_limit: float | None,
    ) -> Planning:
        """The same, of options that were checked as far as they can be without arguments.

        Raises:
            ArgumentError: an option is of another kind, or two contradict each other.
            BudgetError: a budget does not parse.
            UnknownTargetError: there is no such target.
        """
        check_options(verify, plan, policy, measure, time_limit)
        check_budget(budget)
        check_host_budget(host_budget)
        hosts = check_patterns(host, plan, measure)
        if target is not None:
            Target.resolve(target)
        limits = host_budget, hosts, policy, measure, time_limit
        return cls(caller, budget, target, verify, progress, plan, *limits)

    @property
    def target(self) -> Target:
        """What the step is planned for; the local device is measured when it is first asked."""
        return Target.resolve(self.wanted_target)

    def traced(self, call: Call, given: Plan | None = None) -> Traced:
        """The step, traced for the arguments of a call, and for a plan that it is to follow."""
        given = given or self.given
        count = 1 if given is None else given.microbatches
        named = self.hosts if given is None else given.hosted
        here = on_device(call, named) if named else call
        with tracing_for(self.target):
            return self.caller.trace(here, count, planned=given is not None)

    def fit(self, call: Call, traced: Traced) -> tuple[Traced, Outcome]:
        """A step that was traced for a call, and the program that is planned for it.

        Where several processes run it they agree on that. The trace is another one where the number
        of microbatches was chosen.
        """
        target, program, now = self.target, traced.program, [traced]
        usable, most = usable_bytes(target), most_bytes(target)
        budget_bytes = parse_budget(self.budget, usable, target.name, most)
        host_bytes = asked_host_budget(self.host_budget, target)

        def decide(budget_bytes: int, host_bytes: int | None, given: Plan | None) -> Outcome:
            block, known = now[0].program.block, now[0].program.is_laid_out
            if given is not None and known and given.pinned != has_pins(block):
                # What this process decided itself stays with the values of its trace.
                now[0] = self.traced(call, given)
            now[0], outcome = self.decide(call, now[0], target, budget_bytes, host_bytes, given)
            return outcome

        if not agreed.is_shared(program):
            outcome = decide(budget_bytes, host_bytes, self.given)
        else:
            settings = self._settings(traced, target)
            outcome = agreed.fit(program, settings, budget_bytes, host_bytes, self.given, decide)
        return now[0], outcome

    def _settings(self, traced: Traced, target: Target) -> list[str]:
        """What has to be the same in all processes that plan a step."""
        program = traced.program
        if self.time_limit is not None:
            raise ArgumentError(
                f"{program.name}: time_limit= in {jax.process_count()} processes could "
                "choose another plan on each. Plan once with it, save the plan, and pass "
                "it to all: fit(..., plan=Plan.load(path))."
            )
        return [
            f"budget={self.budget!r}",
            f"target={target.name!r}",
            f"host_budget={self.host_budget!r}",
            f"donated={[a.path for a in program.arguments if a.donated]!r}",
        ]

    def decide(
        self,
        call: Call,
        traced: Traced,
        target: Target,
        budget_bytes: int,
        host_bytes: int | None,
        given: Plan | None,
    ) -> tuple[Traced, Outcome]:
        """Plan for a target, or follow a plan."""
        deadline = Deadline(math.inf if self.time_limit is None else self.time_limit)
        settings: dict[str, Any] = {
            "check": bool(self.verify),
            "policy": self.policy,
            "deadline": deadline,
            "pinned": None if given is None else given.pinned,
        }
        compiler_of = functools.partial(Compiler, target=target, **settings)
        bench = Bench(call, target) if self.measure else None
        if bench is not None:
            bench.check(traced.program)
        is_quiet = agreed.is_shared(traced.program) and processes.number() != 0
        telling = progress(False if is_quiet else self.progress, f"planning {self.caller.name}")

        def streaming(asked: Asked, report: Report) -> Outcome:
            # Parts share the values of the step: however it is cut, they are split in one way.
            split(traced.program, target, rates_of(target), settings["pinned"])
            return streamed.fit(traced.program, asked, compiler_of, target, budget_bytes, report)

        def one_program(report: Report) -> Outcome:
            compiler = compiler_of(traced.program)
            return rounds.fit(compiler, budget_bytes, report, host_bytes=host_bytes, bench=bench)

        with telling as report, tracing_for(target):
            asked = self._streamed(traced, target)
            if isinstance(asked, Auto):
                tries = one_program, streaming
                return traced, choosing.fit(
                    traced.program, *tries, target, host_bytes, deadline, report
                )
            if asked is not None:
                return traced, streaming(asked, report)
            if given is not None:
                self._check_host(given, target)
                compiler = compiler_of(traced.program)
                return traced, following.follow(compiler, given, budget_bytes, report)
            if traced.automatic:
                trace: Callable[..., Traced] = functools.partial(self.caller.trace, call)
                also: dict[str, Any] = {"host_bytes": host_bytes, "bench": bench}
                compiler = compiler_of(traced.program)
                return microbatches.fit(traced, trace, compiler, budget_bytes, report, **also)
            return traced, one_program(report)

    def _check_host(self, plan: Plan, target: Target) -> None:
        """Check that a plan that is followed keeps no more in host memory than was allowed."""
        allowed = asked_host_budget(self.host_budget, target)
        if allowed is not None and plan.host_bytes > allowed:
            raise PlanMismatchError(
                f"the plan for {plan.function} keeps {format_bytes(plan.host_bytes)} in host "
                f"memory, and host_budget={self.host_budget!r} allows {format_bytes(allowed)}. "
                "Leave host_budget out to follow the plan, or plan again with it."
            )

    def _streamed(self, traced: Traced, target: Target) -> Asked | Auto | None:
        """What is asked of leaves in host memory, by ``host=`` or by a plan that is followed."""
        program = traced.program
        if self.given is not None and self.given.streamed is not None:
            self._check_host(self.given, target)
            return asked_by_plan(program, self.given)
        if not self.hosts:
            return None
        if traced.automatic:
            raise ArgumentError(
                f"{program.name}: the number of microbatches is not chosen for a step with host= "
                "yet. Give accumulate a number in place of jaxmem.AUTO."
            )
        if isinstance(self.hosts, Auto):
            return AUTO
        host_bytes = asked_host_budget(self.host_budget, target)
        return asked_by(program, self.hosts, target, host_bytes)
