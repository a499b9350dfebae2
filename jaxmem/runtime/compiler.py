"""Compile the schedules of one program, check what the compiler made of them, remember both."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxmem.planner.search import Search, Solution
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Block, Program
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.standin import has_callbacks, without_callbacks
from jaxmem.runtime import verify
from jaxmem.targets.compiling import Compiled, compile_for, memory_schedules, runs_here
from jaxmem.targets.target import Target

MOST_SMALLEST = 6


@dataclass(frozen=True, eq=False)
class Attempt:
    """A schedule that was compiled; ``problem`` says what the compiler undid of it, if anything."""

    solution: Solution
    compiled: Compiled
    problem: str


@dataclass(eq=False)
class Compiler:
    """Compiles the schedules of one traced program for one target; remembers what it compiled."""

    program: Program
    target: Target
    check: bool = True
    search: Search = field(init=False)
    mute: bool = field(init=False)
    _compiled: dict[tuple, Compiled] = field(default_factory=dict)

    def __post_init__(self):
        rates = Rates(dict(self.target.flops), self.target.hbm_bytes_per_second)
        self.search = Search(self.program, rates, host=self.target.platform == "cpu")
        self.mute = not runs_here(self.target) and has_callbacks(self.program.block)

    @property
    def compiles(self) -> int:
        """How many programs were compiled."""
        return len(self._compiled)

    def block(self, solution: Solution | None) -> Block:
        """The program of a solution; ``None`` stands for the program as written."""
        return self.search.schedule(solution) if solution else self.program.block

    def compile(
        self, solution: Solution | None, *, options: Mapping[str, str] | None = None
    ) -> Compiled:
        """A solution compiled for the target, scheduled for memory unless told otherwise."""
        options = self.options if options is None else options
        key = (solution and solution.key, tuple(sorted(options.items())))
        if key not in self._compiled:
            block = self.block(solution)
            self._compiled[key] = compile_for(
                self.target,
                as_function(without_callbacks(block) if self.mute else block),
                self.program.avals(),
                donate=self.program.donated,
                options=options,
            )
        return self._compiled[key]

    @functools.cached_property
    def trials(self) -> tuple[tuple[Mapping[str, str], Compiled], ...]:
        """The smallest schedule under each set of compiler options; none where there is one."""
        choices = memory_schedules(self.target)
        if len(choices) == 1 or not self.search.choices:
            return ()
        smallest = self.search.bases()[0]
        return tuple((o, self.compile(smallest, options=o)) for o in choices)

    @property
    def options(self) -> Mapping[str, str]:
        """The compiler options that make least of the smallest schedule; none on a GPU."""
        if not self.trials:
            return memory_schedules(self.target)[-1]
        return min(self.trials, key=lambda trial: trial[1].memory.total_bytes)[0]

    def keep_all(self) -> Compiled:
        """The program as written, compiled for the target; on a GPU without XLA's own remat."""
        return self.compile(None, options={})

    def attempt(self, solution: Solution, *, options: Mapping[str, str] | None = None) -> Attempt:
        """A solution compiled and checked; what the compiler undid is kept from now on."""
        compiled = self.compile(solution, options=options)
        if not self.check:
            return Attempt(solution, compiled, "")
        merged = verify.undone(self.block(solution), compiled.hlo_text())
        if not merged:
            return Attempt(solution, compiled, "")
        self.search.pin(merged)
        problem = f"the compiler merged {len(merged)} recomputed operations with the originals"
        return Attempt(solution, compiled, problem)

    def smallest(self) -> Iterator[Attempt]:
        """The smallest programs; the same ones in the same order whatever was planned before."""
        self.search.unpin()
        tried: set[frozenset] = set()
        for _ in range(MOST_SMALLEST):
            fresh = (s for s in self.search.smallest_first() if s.key not in tried)
            solution = next(fresh, None)
            if solution is None:
                return
            tried.add(solution.key)
            yield self.attempt(solution)
