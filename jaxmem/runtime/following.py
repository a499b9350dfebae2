"""Follow a plan made before: read its decisions, refuse what is not of this program, compile it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxmem.errors import ArgumentError, PlanMismatchError, VerificationError
from jaxmem.planner.facts import kept_name
from jaxmem.planner.fill import Solution
from jaxmem.planner.inorder import is_tied
from jaxmem.planner.plan import Plan
from jaxmem.planner.retimed import retimed
from jaxmem.planner.schedule import StillKept, Turn
from jaxmem.planner.segments import refusal, splittable
from jaxmem.program.ir import Program
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.exposed import NOTHING
from jaxmem.runtime.progress import Report
from jaxmem.runtime.tries import Outcome, Tries
from jaxmem.targets.options import is_schedule
from jaxmem.units import format_bytes


def follow(
    compiler: Compiler, plan: Plan, budget_bytes: int, report: Report, *, lent: bool = False
) -> Outcome:
    """The program of a plan made before, compiled and checked again.

    Raises:
        PlanMismatchError: the plan belongs to another program or to other shapes.
        VerificationError: it does not fit, or the compiler undoes its recomputations.
    """
    tries, solution = Tries(compiler, budget_bytes, report), decisions_of(compiler, plan)
    report("compiling the plan")
    problem, options = "", dict(plan.options)
    if solution is None:
        compiled = compiler.compile(None, options=options)
        tries.note("as planned", plan.predicted_bytes, plan.predicted_bytes, compiled)
    else:
        tries.announce(solution)
        attempt = compiler.attempt(solution, options=options)
        compiled = tries.record("as planned", solution.temp_bytes, attempt)
        problem = attempt.problem
    total = compiled.memory.total_bytes
    if total > budget_bytes or problem:
        raise VerificationError(
            f"{plan.function}: the plan compiles to {format_bytes(total)} ({total} bytes) here, "
            f"the budget is {format_bytes(budget_bytes)} ({budget_bytes} bytes). "
            + (problem or ("Plan again." if lent else f"Plan again, or give budget={total}."))
        )
    exposed = tries.fitting[-1].exposed if tries.fitting else NOTHING
    same = replace(
        plan,
        budget_bytes=budget_bytes,
        compiled_bytes=total,
        compiled_exposed_seconds=exposed.compiled_seconds,
        rounds=tuple(tries.rounds),
        notes=tuple(dict.fromkeys([*plan.notes, *exposed.notes()])),
        larger=plan.larger if budget_bytes == plan.budget_bytes else None,
    )
    return Outcome(same, compiler.block(solution), compiled, compiler.hosting(solution))


def decisions_of(compiler: Compiler, plan: Plan) -> Solution | None:
    """What a plan decides about a program; ``None`` if it leaves the program as written.

    Raises:
        PlanMismatchError: the plan belongs to another program, other shapes or another target, or
            it names something that is not there.
    """
    _check_owner(compiler, plan)
    keep = {(k.path, k.turn): (StillKept if k.inside else frozenset)(k.names) for k in plan.kept}
    offload = {(k.path, k.turn): frozenset(k.offloaded) for k in plan.kept if k.offloaded}
    _check_names(compiler, keep)
    _check_names(compiler, offload)
    _check_segments(compiler, plan)
    hosted = _hosted(compiler, plan)
    if plan.options and not is_schedule(compiler.target, dict(plan.options)):
        raise PlanMismatchError(
            f"the plan for {plan.function} sets compiler options that this jaxmem does not "
            f"use for {plan.target}: {dict(plan.options)}. Plan again."
        )
    segments = {s.path: s.counts for s in plan.segments}
    if not (keep or segments or hosted):
        return None
    compiler.search.settle_more(plan.settled)
    try:
        last, most = plan.updates_last, plan.in_flight
        with compiler.search.hosting(hosted, updates_last=last, in_flight=most):
            found = compiler.search.evaluate(keep, offload, segments=segments, solver=plan.solver)
        found = found if plan.in_order else _untied(compiler, plan, found)
        return _with_slack(compiler, plan, found) if plan.slack_seconds else found
    except ArgumentError as error:
        raise PlanMismatchError(
            f"the plan for {plan.function} cannot be followed: {error}"
        ) from error


def _untied(compiler: Compiler, plan: Plan, found: Solution) -> Solution:
    if not is_tied(compiler.block(found)):
        raise PlanMismatchError(
            f"the plan for {plan.function} has in_order false, and none of its gradients would be "
            "tied. Plan again."
        )
    return retimed(compiler.search, found, in_order=False)


def _with_slack(compiler: Compiler, plan: Plan, found: Solution) -> Solution:
    if not any(op.transfer for op in compiler.block(found).ops):
        raise PlanMismatchError(
            f"the plan for {plan.function} gives each copy outside loops {plan.slack_seconds:g} s, "
            "and there is none. Plan again."
        )
    return retimed(compiler.search, found, slack_seconds=plan.slack_seconds)


def _check_owner(compiler: Compiler, plan: Plan) -> None:
    program, target = compiler.program, compiler.target
    if plan.target != target.name:
        raise PlanMismatchError(
            f"the plan for {plan.function} was made for {plan.target}, and this is {target.name}. "
            f"Plan again for it, or pass target={plan.target!r}."
        )
    _check_mesh(program, plan)
    if plan.pinned != bool(compiler.pinned):
        how = ("as the compiler has it", "as batches are")
        raise PlanMismatchError(
            f"the plan for {plan.function} splits what products give {how[plan.pinned]}, and here "
            f"it is split {how[not plan.pinned]}. Plan again for these arguments."
        )
    if plan.fingerprint != program.fingerprint:
        raise PlanMismatchError(
            f"the plan for {plan.function} (program {plan.fingerprint}) was made for another "
            f"program or other shapes than {program.name} has here (program "
            f"{program.fingerprint}). Plan again for these arguments: {program.name}.plan(...)."
        )


def _check_mesh(program: Program, plan: Plan) -> None:
    """A plan counts the bytes of each device, so it is for one way to split arguments."""
    if plan.mesh != program.mesh:
        made, here = (_axes(mesh) for mesh in (plan.mesh, program.mesh))
        there = f"for a mesh of {made}" if made else "without a mesh"
        raise PlanMismatchError(
            f"the plan for {plan.function} was made {there}, and here "
            f"{f'it is {here}' if here else 'there is none'}. Plan again, or use the same mesh."
        )
    planned, split = dict(plan.split), dict(program.split)
    for path in sorted({*planned, *split}):
        if planned.get(path) != split.get(path):
            was, now = (
                f"split over {found[path]}" if path in found else "whole on each device"
                for found in (planned, split)
            )
            raise PlanMismatchError(
                f"the plan for {plan.function} was made with {path} {was}, and here it is {now}. "
                "Plan again, or split the arguments as they were."
            )


def _axes(mesh: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh)


def _check_names(compiler: Compiler, keep: Mapping[Turn, frozenset[str]]) -> None:
    """Every turn and every value that a plan names must be there; loops carry some in."""
    search = compiler.search
    turns = {choice.turn for choice in search.choices}
    blocks = [inner.block for inner in search.nest.walk()]
    length = {block.path: len(block.ops) for block in blocks}
    known = {kept_name(op, v) for b in blocks for op in b.ops for v in op.outputs}
    known |= {str(v.key) for b in blocks for v in b.inputs}
    for turn, names in keep.items():
        path, at = turn
        inside = isinstance(names, StillKept) and any(
            path == where and start < at < length[path] for where, start in turns
        )
        unknown = sorted(names - known) if turn in turns or inside else [f"turn {turn}"]
        if unknown:
            raise PlanMismatchError(
                f"the plan keeps {unknown[0]}, which {compiler.program.name} does not "
                "have: the plan was changed or made by another version. Plan again."
            )


def _check_segments(compiler: Compiler, plan: Plan) -> None:
    """Every loop that a plan cuts into segments must be there and let itself be cut."""
    nest = compiler.search.nest
    refused = refusal(nest, {s.path: s.counts for s in plan.segments})
    lengths = splittable(nest)
    wrong = [s for s in plan.segments if not refused and lengths[s.path] != s.length]
    if wrong:
        refused = f"the pair of scans {wrong[0].path!r} has {lengths[wrong[0].path]} iterations"
    if refused:
        raise PlanMismatchError(
            f"the plan runs loops of {compiler.program.name} in segments, but {refused}: "
            "the plan was changed or made by another version. Plan again."
        )


def _hosted(compiler: Compiler, plan: Plan) -> frozenset[int]:
    """The positions of the arguments that a plan puts in host memory."""
    places = {leaf.path: n for n, leaf in enumerate(compiler.program.arguments)}
    unknown = [path for path in plan.hosted if path not in places]
    if unknown:
        raise PlanMismatchError(
            f"the plan for {plan.function} keeps argument {unknown[0]} in host memory, which "
            f"{compiler.program.name} does not have. Plan again."
        )
    program = compiler.program
    back = {position - len(program.consts) for position in program.places.values()}
    lost = [path for path in plan.hosted if places[path] not in back]
    if lost:
        raise PlanMismatchError(
            f"the plan for {plan.function} keeps argument {lost[0]} in host memory between steps, "
            f"and {program.name} gives no donated argument of that shape back. Pass "
            "donate_argnums as when the plan was made."
        )
    return frozenset(places[path] for path in plan.hosted)
