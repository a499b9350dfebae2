"""Compile the schedules of one program, check what the compiler made of them, remember both."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from jaxmem.planner.deadline import Deadline
from jaxmem.planner.search import Search, Solution
from jaxmem.policies import Policy
from jaxmem.program.apart import with_sums_apart
from jaxmem.program.gathering import with_gathered
from jaxmem.program.ir import Block, Hosting, Program, has_transfers
from jaxmem.program.pinning import has_pins
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.standin import compilable, has_callbacks
from jaxmem.runtime import verify
from jaxmem.runtime.laidout import LaidOut
from jaxmem.runtime.rates import rates_of
from jaxmem.runtime.splitting import OTHER_PARTS, split
from jaxmem.targets.compiling import Compiled, compile_for, runs_here
from jaxmem.targets.options import (
    collectives_in_turn,
    copying,
    memory_schedules,
    overlapping,
    within_room,
)
from jaxmem.targets.target import Target

MOST_SMALLEST = 6
# What is predicted to take less of the budget has room for collectives beside other work.
_ROOMY = 0.8


def _moves(solution: Solution | None) -> bool:
    return solution is not None and bool(solution.hosted or any(solution.offload.values()))


@dataclass(frozen=True, eq=False)
class Attempt:
    """A schedule that was compiled; ``problem`` says what the compiler undid of it, if anything."""

    solution: Solution
    compiled: Compiled
    problem: str


# ``None`` where XLA cannot compile it.
Attempting = Callable[[Solution], Attempt | None]


@dataclass(frozen=True, eq=False)
class Least:
    """Compiled bytes of the smallest programs.

    Attributes:
        kept: of those that keep their plan, with the solution; ``None`` for the step as written.
        undone: of those that do not, with what the compiler undid.
    """

    kept: list[tuple[int, Solution | None]]
    undone: list[tuple[int, str]]


@dataclass(eq=False)
class Compiler:
    """Compiles the schedules of one traced program for one target; remembers what it compiled.

    With a policy they all follow it.

    Attributes:
        deadline: that of the search, not of the compiles.
        most_smallest: of the smallest programs as many are compiled, trials included.
        order: the compiler options of every schedule; ``None`` leaves them to the trials.
        budget_bytes: what schedules over several GPUs are to fit; ``None`` for the device.
        alone: nothing runs beside collectives, whatever room a budget leaves.
        pinned: whether the compiler is told how to split what products give, over a mesh
            (:mod:`jaxmem.program.pinning`); given ``None``, that is found out.
    """

    program: Program
    target: Target
    check: bool = True
    policy: Policy | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline(math.inf))
    most_smallest: int = MOST_SMALLEST
    order: Mapping[str, str] | None = None
    budget_bytes: int | None = None
    alone: bool = False
    pinned: bool | None = None
    search: Search = field(init=False)
    laid_out: LaidOut = field(init=False)
    mute: bool = field(init=False)
    _compiled: dict[tuple, Compiled] = field(default_factory=dict)

    def __post_init__(self):
        given = self.program
        rates = rates_of(self.target)
        compiled = split(given, self.target, rates, self.pinned)
        self.program = with_gathered(given)
        if self.target.platform == "gpu":
            self.program = with_sums_apart(self.program)
        self.pinned = has_pins(given.block)
        if compiled is not None and self.program is given:
            # Splitting it had it compiled, and nothing was put in since.
            self._compiled[None, ()] = compiled
        host = self.target.platform == "cpu"
        self.search = Search(
            self.program, rates, host=host, policy=self.policy, deadline=self.deadline
        )
        self.laid_out = LaidOut(self.program, self.target, rates)
        self.mute = not runs_here(self.target) and has_callbacks(self.program.block)

    @property
    def compiles(self) -> int:
        """How many programs were compiled."""
        return len(self._compiled)

    def block(self, solution: Solution | None) -> Block:
        """The program of a solution; ``None`` stands for the program as written."""
        return self.search.schedule(solution) if solution else self.program.block

    def temp_bytes(self, solution: Solution) -> int:
        """Temporaries of a solution on paper, with what its kernels are known to work in."""
        return self.laid_out.temp_bytes(solution, self.search.schedule)

    @functools.cached_property
    def written_temp_bytes(self) -> int:
        """Temporaries of the step as written on paper."""
        whole = self.search.keep_all.temp_bytes
        return self.laid_out.block_bytes(self.program.block, whole)

    def hosting(self, solution: Solution | None) -> Hosting:
        """What of the step's arguments and results is in host memory."""
        return self.program.hosting(solution.hosted if solution else frozenset())

    def compile(
        self, solution: Solution | None, *, options: Mapping[str, str] | None = None
    ) -> Compiled:
        """A solution compiled for the target, scheduled for memory unless told otherwise."""
        options = self.options(solution) if options is None else options
        key = (solution and solution.key, tuple(sorted(options.items())))
        if key not in self._compiled:
            block, hosting = self.block(solution), self.hosting(solution)
            self._compiled[key] = compile_for(
                self.target,
                as_function(compilable(block, self.target)),
                self.program.avals(hosting),
                donate=self.program.donated,
                out_shardings=self.program.out_shardings(hosting),
                options={**options, **self._for_transfers(solution, block)},
            )
        return self._compiled[key]

    def _for_transfers(self, solution: Solution | None, block: Block) -> Mapping[str, str]:
        """What copies beside the iterations of a loop, or beside a backward pass, take."""
        loops = (op.loop.body for op in block.ops if op.loop is not None)
        if any(map(has_transfers, loops)):
            return overlapping(self.target)
        # Over a mesh that was not measured.
        if solution is None or solution.updates_last or self.program.sharded:
            return {}
        early = self.search.scheduler.updates_early(self.hosting(solution))
        return copying(self.target) if early else {}

    @functools.cached_property
    def trials(self) -> tuple[tuple[Mapping[str, str], Compiled], ...]:
        """The smallest schedule under each set of compiler options; none where one is settled."""
        choices = memory_schedules(self.target)
        if len(choices) == 1 or self.order is not None or not self.search.choices:
            return ()
        smallest = self.search.smallest()
        return tuple((o, self.compile(smallest, options=o)) for o in choices)

    def options(self, solution: Solution | None = None) -> Mapping[str, str]:
        """The compiler options of a solution.

        On a CPU those that make least of the smallest schedule. Over several GPUs those for the
        room that a budget leaves; what moves values to the host and back has no limit, with which
        XLA would start these copies late.
        """
        if self.order is not None:
            return self.order
        if self._may_overlap:
            if self.alone:
                return self.least_options(solution)
            if self.budget_bytes is None or _moves(solution):
                return {}
            fixed = self.program.fixed_bytes
            return within_room(self.target, self.budget_bytes - fixed, fixed)
        if not self.trials:
            return memory_schedules(self.target)[-1]
        return min(self.trials, key=lambda trial: trial[1].memory.total_bytes)[0]

    @property
    def _may_overlap(self) -> bool:
        """Whether the compiler chooses what runs beside collectives."""
        return self.program.sharded and self.target.platform == "gpu"

    def is_near(self, predicted_bytes: int) -> bool:
        """Whether what is predicted to take so much comes near the budget."""
        return self.budget_bytes is not None and predicted_bytes > _ROOMY * self.budget_bytes

    def may_take_less(self, solution: Solution | None) -> bool:
        """Whether :attr:`alone` makes another program of a solution."""
        return self._may_overlap and self.options(solution) != self.least_options(solution)

    def least_options(self, solution: Solution | None = None) -> Mapping[str, str]:
        """Those that make least of a solution, whatever the budget is; its copies still overlap."""
        if not self._may_overlap:
            return memory_schedules(self.target)[-1]
        if _moves(solution):
            return collectives_in_turn(self.target)
        return within_room(self.target, 0, 0)

    def options_of(self, compiled: Compiled) -> Mapping[str, str]:
        """What a program was compiled with, but for what its transfers need."""
        return next(dict(o) for (_, o), known in self._compiled.items() if known is compiled)

    def without_policy(self) -> Compiler:
        """The same for the planner alone; what is compiled already is not compiled again."""
        return Compiler(
            self.program,
            self.target,
            self.check,
            deadline=self.deadline,
            budget_bytes=self.budget_bytes,
            alone=self.alone,
            pinned=self.pinned,
            _compiled=self._compiled,
        )

    def keep_all(self) -> Compiled:
        """The program as written, compiled for the target; on a GPU without XLA's own remat."""
        return self.compile(None, options={})

    @functools.cached_property
    def scale(self) -> float:
        """The compiler's temporaries of the step as written over the simulated ones.

        1 unless they say that devices have other parts of arrays than is known.
        """
        simulated = self.search.keep_all.temp_bytes
        if not self.program.sharded or not simulated:
            return 1.0
        found = max(self.keep_all().memory.temp_bytes, 1) / simulated
        agrees = 1 / OTHER_PARTS <= found <= OTHER_PARTS
        return 1.0 if agrees and self.program.is_counted else found

    def attempt(self, solution: Solution, *, options: Mapping[str, str] | None = None) -> Attempt:
        """A solution compiled and checked; what the compiler undid is kept from now on."""
        compiled = self.compile(solution, options=options)
        if not self.check:
            return Attempt(solution, compiled, "")
        block, text = self.block(solution), compiled.hlo_text()
        problems = []
        merged = verify.undone(block, text)
        if merged:
            self.search.pin(merged)
            problems.append(
                f"the compiler merged {len(merged)} recomputed operations with the originals"
            )
        if solution.offload or solution.hosted:
            planned = self.program.host_bytes(self.hosting(solution))
            problems += verify.not_on_host(
                block, text, compiled.memory, solution.host_bytes, planned
            )
        return Attempt(solution, compiled, "; ".join(problems))

    def attempt_least(self, solution: Solution) -> Attempt:
        """The same as the compiler makes least of it, whatever the budget is."""
        options = self.least_options(solution) if self._may_overlap else None
        return self.attempt(solution, options=options)

    def least(self, attempted: Attempting | None = None) -> Least:
        """What the smallest programs need, :meth:`smallest` says of which ``attempted``."""
        kept: list[tuple[int, Solution | None]] = []
        if self.search.ruled.allows_written:
            options = ({}, self.least_options())
            plain = [self.compile(None, options=o).memory.total_bytes for o in options]
            kept.append((min(plain), None))
        undone: list[tuple[int, str]] = []
        for attempt in self.smallest(attempted):
            total = attempt.compiled.memory.total_bytes
            if attempt.problem:
                undone.append((total, attempt.problem))
            else:
                kept.append((total, attempt.solution))
        return Least(kept, undone)

    def smallest(self, attempted: Attempting | None = None) -> Iterator[Attempt]:
        """The smallest programs, fastest first; the same ones whatever was planned before.

        Args:
            attempted: :meth:`attempt_least`, or the same that answers ``None`` where XLA cannot
                compile one, which is left out.
        """
        self.search.unpin()
        self.search.settle_more(True)
        tried: set[frozenset] = set()
        # The two trials of a CPU count among the compiles, too.
        most = self.most_smallest - bool(self.trials)
        for _ in range(most):
            first = sorted(self.search.smallest_first()[:most], key=lambda s: s.cost)
            fresh = (s for s in first if s.key not in tried)
            solution = next(fresh, None)
            if solution is None:
                return
            tried.add(solution.key)
            attempt = (attempted or self.attempt_least)(solution)
            if attempt is not None:
                yield attempt
