"""Make a Frontier: one search, many limits; everything it writes out on the way counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxmem.planner.candidates import stock_keeps
from jaxmem.planner.fill import Solution
from jaxmem.planner.frontier import Frontier, Point, pareto, spaced, thinned
from jaxmem.planner.search import Search
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.progress import Part, Report
from jaxmem.targets.compiling import usable_bytes

POINTS = 14
_AS_WRITTEN = "keep-all"
_PER_BLOCK = "recompute per block"


def curve(compiler: Compiler, points: int, compile: bool, report: Report) -> Frontier:
    """The trade-off of one program.

    Args:
        compiler: of the program, for the target.
        points: how many limits are solved for.
        compile: compile as many of the points and the stock policies, too.
        report: shows progress.
    """
    return _Curve(compiler, report).run(points, compile)


class _Curve:
    def __init__(self, compiler: Compiler, report: Report):
        self.compiler, self.report = compiler, report
        self.search: Search = compiler.search
        self.fixed, self.scale = compiler.program.fixed_bytes, 1.0
        if compiler.program.sharded:
            # As where a budget is planned for: the compiler says which parts devices have.
            report("compiling the step as written")
            memory = compiler.keep_all().memory
            self.fixed = memory.total_bytes - memory.temp_bytes
            self.scale = compiler.scale

    def run(self, points: int, compile: bool) -> Frontier:
        search, program, target = self.search, self.compiler.program, self.compiler.target
        search.unpin()
        as_written = self._point(None, _AS_WRITTEN)
        stock = [(name, search.evaluate(keep)) for name, keep in self._stock()]
        self._solve(points)
        # Everything that was written out is a program that could be run; some are better than
        # what was asked for.
        known = {self._point(s, s.solver or "greedy fill"): s for s in search.evaluated()}
        marks = {as_written: None, **{self._point(s, name): s for name, s in stock}}
        found = pareto([*marks, *known])
        if compile:
            found = thinned(found, points)
            behind = {**known, **marks}
            found = [self._compiled(p, behind[p]) for p in found]
            marks = {self._compiled(p, s): s for p, s in marks.items()}
            search.unpin()
        return Frontier(
            function=program.name,
            target=target.name,
            device_bytes=usable_bytes(target),
            points=tuple(found),
            stock=tuple(marks),
            fingerprint=program.fingerprint,
            compiled=compile,
        )

    def _solve(self, points: int) -> None:
        search = self.search
        if not search.choices:
            return
        self.report("looking for the smallest programs")
        smallest = min(s.temp_bytes for s in search.smallest_first())
        limits = spaced(smallest, search.keep_all.temp_bytes, points)
        for number, limit in enumerate(limits, 1):
            said = f"solving for budget {number} of {len(limits)}"
            self.report(Part(said, number - 1, len(limits)))
            search.solve(limit)

    def _stock(self) -> Iterator[tuple[str, dict]]:
        """What a policy without a planner keeps; each once."""
        search, seen = self.search, set()
        blocks = [s for s in search.bases() if s.solver == _PER_BLOCK] if search.choices else []
        named = [(_PER_BLOCK, dict(s.keep)) for s in blocks[:1]]
        for name, keep in [*stock_keeps(search.choices), *named]:
            key = frozenset(keep.items())
            if key and key not in seen:
                seen.add(key)
                yield name, dict(keep)

    def _point(self, solution: Solution | None, solver: str) -> Point:
        """What is predicted for a solution; ``None`` stands for the step as written."""
        ran, base = solution or self.search.keep_all, self.search.keep_all.seconds
        hosted = self.compiler.program.host_bytes(self.compiler.hosting(solution))
        return Point(
            peak_bytes=self.fixed - hosted + int(ran.temp_bytes * self.scale),
            seconds=ran.seconds,
            recompute_share=(ran.seconds - base) / base if base else 0.0,
            solver=solver,
        )

    def _compiled(self, point: Point, solution: Solution | None) -> Point:
        self.report(f"compiling {point.solver}")
        compiler = self.compiler
        if solution is None:
            ways = ({}, compiler.least_options())
            sizes = [compiler.compile(None, options=o).memory.total_bytes for o in ways]
            return replace(point, compiled_bytes=min(sizes))
        attempt = compiler.attempt(solution)
        over = attempt.compiled.memory.total_bytes > point.peak_bytes
        if over and compiler.may_take_less(solution):
            # As where a budget is planned for, which that would be over.
            alone = compiler.attempt_least(solution)
            both = (attempt, alone)
            attempt = min(both, key=lambda a: (bool(a.problem), a.compiled.memory.total_bytes))
        total = attempt.compiled.memory.total_bytes
        return replace(point, compiled_bytes=total, problem=attempt.problem)
