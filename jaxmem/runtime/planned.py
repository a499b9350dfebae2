"""The plan of a program that was chosen: what it keeps, and how it was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxmem.planner.decisions import IN_FLIGHT, Decision, Kept, Round, Segmented
from jaxmem.planner.fill import Solution
from jaxmem.planner.level import StillKept
from jaxmem.planner.plan import Plan
from jaxmem.planner.segments import splittable
from jaxmem.planner.simple import WHY
from jaxmem.program.apart import kept_apart_in
from jaxmem.runtime import describe, policed
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.exposed import NOTHING, Exposed
from jaxmem.runtime.larger import larger
from jaxmem.targets.compiling import Compiled, memory_fraction, most_bytes, usable_bytes
from jaxmem.units import format_bytes

_AS_WRITTEN = "the step as written fits the budget"


@dataclass(frozen=True, eq=False)
class Chosen:
    """A program that fits.

    Attributes:
        solution: its schedule; ``None`` for the step as written.
        compiled: the program, ``predicted_bytes`` its peak on paper.
        exposed: how long it waits for copies, on paper and as compiled.
        measured_seconds: the median of its runs on the device; ``None`` where it was not timed.
        measured_exposed_seconds: in how much of one of them only copies to and from the host ran.
    """

    solution: Solution | None
    compiled: Compiled
    predicted_bytes: int
    exposed: Exposed = NOTHING
    measured_seconds: float | None = None
    measured_exposed_seconds: float | None = None

    @property
    def cost(self) -> tuple[float, int]:
        """What is better is smaller, as far as nothing was timed; not for the step as written."""
        assert self.solution is not None
        return self.solution.seconds + self.exposed.more_seconds, self.compiled.memory.total_bytes


def plan_of(
    compiler: Compiler,
    chosen: Chosen,
    rounds: Sequence[Round],
    *,
    budget_bytes: int,
    fixed_bytes: int,
) -> Plan:
    """The plan of a program.

    Args:
        compiler: compiled it.
        chosen: the program.
        rounds: every compile.
        budget_bytes: bytes on each device.
        fixed_bytes: those of arguments and results, which no schedule changes.
    """
    search, program, solution = compiler.search, compiler.program, chosen.solution
    compiled, memory, keep_all = chosen.compiled, chosen.compiled.memory, search.keep_all
    decisions = describe.decisions(search, solution)
    block = compiler.block(solution)
    simulation = search.simulator.step(block) if solution else keep_all
    return Plan(
        function=program.name,
        target=compiler.target.name,
        budget_bytes=budget_bytes,
        predicted_bytes=chosen.predicted_bytes,
        compiled_bytes=memory.total_bytes,
        argument_bytes=memory.argument_bytes,
        output_bytes=memory.output_bytes,
        aliased_bytes=memory.alias_bytes,
        host_bytes=memory.host_argument_bytes + memory.host_temp_bytes,
        keep_all_predicted_bytes=fixed_bytes + compiler.written_temp_bytes,
        keep_all_compiled_bytes=compiler.keep_all().memory.total_bytes,
        predicted_seconds=solution.seconds if solution else keep_all.seconds,
        keep_all_seconds=keep_all.seconds,
        decisions=decisions,
        solver=search.ruled.solver("keep-all" if solution is None else solution.solver),
        why=_AS_WRITTEN if solution is None else solution.why,
        bound_seconds=None if solution is None else solution.bound_seconds,
        measured_seconds=chosen.measured_seconds,
        exposed_seconds=chosen.exposed.predicted_seconds,
        compiled_exposed_seconds=chosen.exposed.compiled_seconds,
        measured_exposed_seconds=chosen.measured_exposed_seconds,
        rounds=tuple(rounds),
        fingerprint=program.fingerprint,
        kept=tuple(_kept(solution)),
        segments=tuple(
            Segmented(path, splittable(search.nest)[path], counts)
            for path, counts in sorted(solution.segments.items() if solution else ())
        ),
        settled=solution is not None and solution.settle,
        updates_last=solution is not None and bool(solution.hosted) and solution.updates_last,
        in_flight=IN_FLIGHT if solution is None else solution.in_flight,
        in_order=solution is None or solution.in_order,
        slack_seconds=0.0 if solution is None else solution.slack_seconds,
        hosted=tuple(
            program.arguments[n].path for n in sorted(solution.hosted if solution else ())
        ),
        notes=tuple(_notes(compiler, chosen, decisions, budget_bytes)),
        larger=larger(compiler, solution, decisions, compiled, rounds, budget_bytes),
        holders=describe.holders(program, search.nest, block, simulation),
        options=tuple(sorted(compiler.options_of(chosen.compiled).items())),
        policy="" if compiler.policy is None else compiler.policy.to_json(),
        mesh=program.mesh,
        split=program.split,
        pinned=bool(compiler.pinned),
    )


def _kept(solution: Solution | None) -> Iterator[Kept]:
    for turn, names in sorted(solution.keep.items() if solution else ()):
        away = solution.offload.get(turn, frozenset()) if solution else frozenset()
        yield Kept(*turn, tuple(sorted(names)), tuple(sorted(away)), isinstance(names, StillKept))


def _notes(
    compiler: Compiler, chosen: Chosen, decisions: Sequence[Decision], budget_bytes: int
) -> Iterator[str]:
    search, solution = compiler.search, chosen.solution
    if not chosen.compiled.runs_here:
        yield (
            f"planned for {compiler.target.name}, which is not this machine: compiled with XLA:GPU "
            "here, runs on the local device"
        )
    yield from chosen.exposed.notes()
    usable = usable_bytes(compiler.target)
    if usable < chosen.compiled.memory.total_bytes <= most_bytes(compiler.target):
        yield (
            f"takes more than the {format_bytes(usable)} that are counted on of each device: JAX "
            "has to be given more there, with XLA_PYTHON_CLIENT_MEM_FRACTION="
            f"{memory_fraction(compiler.target, budget_bytes):.2f}"
        )
    written = compiler.keep_all().memory.total_bytes <= budget_bytes
    if solution is not None and written and compiler.policy is None:
        less = 1 - solution.seconds / search.keep_all.seconds
        if less > 0 and chosen.measured_seconds is None:
            yield (
                f"the step as written fits too; this is predicted {less:.1%} quicker, because "
                "loops copy what they keep. measure=True finds out on the device"
            )
    if solution is not None and not any(d.recomputed for d in decisions):
        yield describe.ONLY_FUSED
    yield from describe.in_segments(search.nest, solution.segments if solution else {})
    yield from policed.notes(search.ruled, compiler.block(solution))
    if compiler.deadline.ran_out:
        what = "the plan is the quickest that was found until then"
        if solution is not None and solution.why == WHY:
            what = "the plan is a simple answer, which takes no search"
        yield f"the time limit of {compiler.deadline.seconds:g} s ended the search: {what}"
    yield from _split_notes(compiler)
    if apart := kept_apart_in(compiler.program):
        yield (
            "arrays that are written first and then, behind a barrier, summed over few columns: "
            f"{apart}. XLA:GPU's kernels that do both at once are slow"
        )
    yield from _unseen_notes(compiler)


def _unseen_notes(compiler: Compiler) -> Iterator[str]:
    if unread := compiler.laid_out.unread:
        yield f"what kernels work in is not in predicted bytes, as no program can be read: {unread}"
    if compiler.mute:
        yield "its callbacks were left out of the program compiled for that"


def _split_notes(compiler: Compiler) -> Iterator[str]:
    if compiler.scale != 1.0:
        yield (
            f"bytes of intermediate values are {compiler.scale:.3g} times what was counted, as the "
            "compiler says of the step as written: how it splits them is not known"
        )
    if compiler.pinned:
        yield (
            "what products give is split as batches are, throughout: left alone, the compiler has "
            "devices exchange activations where parameters are less"
        )
