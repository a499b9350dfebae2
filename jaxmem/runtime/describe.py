"""Put plans, peaks and dead ends into words: which value, made where, how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from jaxmem.errors import Holder
from jaxmem.planner.candidates import Candidate
from jaxmem.planner.decisions import Decision
from jaxmem.planner.facts import kept_name
from jaxmem.planner.fill import Members
from jaxmem.planner.ruled import sent_keys
from jaxmem.planner.schedule import Turn
from jaxmem.planner.search import Search, Solution
from jaxmem.planner.segments import Segments
from jaxmem.planner.simulate import Simulation
from jaxmem.program.ir import Block, Op, Program, Value
from jaxmem.program.loops import Nest, is_backward
from jaxmem.program.primitives import Kind, kind_of
from jaxmem.program.source import Origin, checkpoint_names, origin_of
from jaxmem.units import format_budget, format_bytes

# Of a plan that keeps every value that has bytes.
ONLY_FUSED = "only element-wise work is made again, inside the kernels that read it"
_MOST_HOLDERS = 8
_NAMED = 3
# Operations with a program inside that is not planned.
_OPENABLE = frozenset(["checkpoint", "remat", "remat2", "shard_map", "while", "cond"])


def decisions(search: Search, solution: Solution | None) -> tuple[Decision, ...]:
    """One decision per group of equal values, the largest first.

    ``None`` stands for the program as written: everything is kept.
    """
    names = checkpoint_names(search.nest)
    paired = {
        id(inner.block.ops[pair.forward]) for inner in search.nest.walk() for pair, _ in inner.pairs
    }
    written = search.schedule(solution) if solution else None
    ran = set(_run_again(written)) if written else set()
    sent = set(sent_keys(written)) if written else set()
    feeds = _feeds(search, solution, ran) if solution else {}
    found = []
    for everything in [*search.groups.values(), *_carried_away(search, solution)]:
        # What is dropped and not made again does not live from the forward to the backward pass.
        members = [
            (turn, c)
            for turn, c in everything
            if not solution or c.op.origin in ran or _stays(solution, turn, c.name)
        ]
        if not members:
            continue
        again = [c for t, c in members if solution and _made_again(solution, t, c.name)]
        first = members[0][1]
        if id(first.op) in paired and not again:
            continue  # What the loop stacks is decided value by value inside it.
        origin = origin_of(first.op, names.get(first.value, ""))
        nbytes, seconds = sum(c.nbytes for _, c in members), sum(c.seconds for c in again)
        decision = _decision(
            first.name, first.value, origin, len(members), len(again), nbytes, seconds
        )
        decision = replace(
            decision,
            again_seconds=sum(c.seconds for _, c in members),
            feeds=sum(feeds.get(c.name, 0) for _, c in members),
            modules=_modules(origin.module, [c for _, c in members]),
            again=tuple(
                n
                for n, (t, c) in enumerate(members)
                if solution and _made_again(solution, t, c.name)
            ),
        )
        away = [c for t, c in members if solution and _is_away(solution, t, c, sent)]
        if away:
            action = decision.action if again else "offload"
            decision = replace(decision, action=action, offloaded=len(away))
        found.append(decision)
    found += _fused_residuals(search, solution, names)
    return tuple(sorted(found, key=lambda d: (-d.nbytes, d.key)))


def _carried_away(search: Search, solution: Solution | None) -> Iterator[Members]:
    """What loops carry, where it waits in host memory."""
    if solution is None:
        return
    known = {c.name for members in search.groups.values() for _, c in members}
    for members in search.carried.values():
        away = [(t, c) for t, c in members if c.name in solution.offload.get(t, frozenset())]
        if away and away[0][1].name not in known:
            yield away


def _is_away(solution: Solution, turn: Turn, candidate: Candidate, sent: Set[str]) -> bool:
    """Whether a value waits in host memory: it may, and the schedule really sends it."""
    offloaded = candidate.name in solution.offload.get(turn, ())
    return (
        offloaded
        and not _made_again(solution, turn, candidate.name)
        and (candidate.op.loop is not None or str(candidate.value.key) in sent)
    )


def _run_again(block: Block) -> Iterator[Op]:
    """The user's own operations that a schedule runs more than once, in its loops too."""
    for op in block.ops:
        if op.recompute and not (op.barrier or op.transfer):
            yield op.origin
        if op.loop is not None:
            yield from _run_again(op.loop.body)


def _modules(module: str, members: Sequence[Candidate]) -> tuple[str, ...]:
    """The module path of each of equal values; nothing where there is only one."""
    modules = tuple(origin_of(candidate.op).module for candidate in members)
    return () if all(m == module for m in modules) else modules


def _feeds(search: Search, solution: Solution, ran: Set[Op]) -> Counter[str]:
    """For each kept value how many of those that are recomputed are made from it directly."""
    found: Counter[str] = Counter()
    blocks = {inner.block.path: inner.block for inner in search.nest.walk()}
    for choice in search.choices:
        path, turn = choice.turn
        made = {v: op for op in blocks[path].ops[:turn] for v in op.outputs}
        names = {c.name for c in choice.candidates}
        for candidate in choice.candidates:
            again = _made_again(solution, choice.turn, candidate.name)
            if again and candidate.op.origin in ran:
                found.update(_read_from(candidate.op, made, names))
    return found


def _read_from(op: Op, made: Mapping[Value, Op], names: Set[str]) -> set[str]:
    """The values of ``names`` that ``op`` reads, also through what is part of its kernel."""
    seen, found, left = {op}, set(), list(op.values)
    while left:
        value = left.pop()
        maker = made.get(value)
        if maker is None or maker in seen:
            continue
        name = kept_name(maker, value)
        if name in names:
            found.add(name)
        else:
            seen.add(maker)
            left += maker.values
    return found


def _fused_residuals(
    search: Search, solution: Solution | None, names: dict[Value, str]
) -> Iterable[Decision]:
    """Element-wise values that the loop as written stacks, and a plan always makes again.

    Inside an iteration they are part of a kernel, so nothing is searched for them; JAX writes
    them out all the same, and a plan that recomputes at all does not.
    """
    known = {c.name for members in search.groups.values() for _, c in members}
    for inner in search.nest.walk():
        for pair, _ in inner.pairs:
            first, second = inner.block.ops[pair.forward], inner.block.ops[pair.backward]
            assert first.loop is not None
            made = {v: op for op in first.loop.body.ops for v in op.outputs}
            stacked = dict(zip(first.outputs, first.loop.body.outputs, strict=True))
            for position in sorted(pair.linked):
                outer = second.inputs[position]
                seen = stacked[outer] if isinstance(outer, Value) else outer
                value = _viewed(seen, made) if isinstance(seen, Value) else seen
                if not isinstance(value, Value) or seen not in made or value.key in known:
                    continue  # What is a view of something is decided with that.
                known.add(str(value.key))
                op = made.get(value, made[seen])
                dropped = solution is not None and (
                    (value in made and value.key not in _kept(solution))
                    or _in_segments(solution, pair.joint.path)
                )
                yield _decision(
                    str(value.key),
                    value,
                    origin_of(op, names.get(value, "")),
                    1,
                    int(dropped),
                    value.nbytes * first.loop.length,
                    0.0,
                )


def _viewed(value: Value, made: dict[Value, Op]) -> Value:
    """What a value is a view of: the same bytes, reshaped or with a checkpoint name."""
    while value in made and kind_of(made[value]) is Kind.ALIAS:
        behind = made[value].inputs[0]
        if not isinstance(behind, Value):
            break
        value = behind
    return value


def _kept(solution: Solution) -> frozenset[str]:
    return frozenset().union(*solution.keep.values())


def _made_again(solution: Solution, turn: Turn, name: str) -> bool:
    """Whether a value is dropped at its turn, or with the whole iteration that it is of."""
    kept = solution.keep.get(turn)
    return (kept is not None and name not in kept) or _in_segments(solution, turn[0])


def _stays(solution: Solution, turn: Turn, name: str) -> bool:
    """Whether a value is kept, or dropped with the whole iteration that it is of."""
    return not _made_again(solution, turn, name) or _in_segments(solution, turn[0])


def _in_segments(solution: Solution, path: str) -> bool:
    return any(f"{path}/".startswith(f"{pair}/") for pair in solution.segments)


def in_segments(nest: Nest, segments: Segments) -> list[str]:
    """One sentence for each loop that runs in segments."""
    found = []
    for inner in nest.walk():
        for pair, _ in inner.pairs:
            counts, op = segments.get(pair.joint.path), inner.block.ops[pair.forward]
            if not counts or op.loop is None:
                continue
            passes = "once" if len(counts) == 1 else f"{len(counts)} times"
            within = ", each in ".join(f"{n} segments" for n in counts)
            where = origin_of(op).source.split(" (")[0]
            found.append(
                f"the loop of {op.loop.length} iterations{where and f' at {where}'} keeps what it "
                f"carries into {within}, and nothing else; its forward pass runs {passes} more, "
                "segment by segment, while the backward pass runs"
            )
    return found


def _decision(
    key: str, value: Value, origin: Origin, count: int, again: int, nbytes: int, seconds: float
) -> Decision:
    return Decision(
        key=key,
        action="recompute" if again else "keep",
        count=count,
        recomputed=again,
        nbytes=nbytes,
        seconds=seconds,
        primitive=origin.primitive,
        shape=tuple(value.aval.shape),
        dtype=str(value.aval.dtype),
        source=origin.source,
        module=origin.module,
        checkpoint_name=origin.checkpoint_name,
    )


def holders(
    program: Program, nest: Nest, block: Block, simulation: Simulation
) -> tuple[Holder, ...]:
    """What fills memory at the peak of a schedule: arguments, results, temporaries by line."""
    found = [
        Holder(leaf.path, value.nbytes, "argument")
        for leaf, value in zip(program.arguments, argument_values(program), strict=True)
    ]
    constants = zip(program.block.inputs, program.consts, strict=False)
    found += [
        Holder(f"array {list(v.aval.shape)} that the step closes over", v.nbytes, "constant")
        for v, _ in constants
    ]
    aliased = program.aliased_bytes
    if program.output_bytes > aliased:
        found.append(Holder("results of the step", program.output_bytes - aliased, "output"))
    names = checkpoint_names(nest)
    found += _live_at_peak(block, simulation, names)
    return tuple(sorted(found, key=lambda h: (-h.nbytes, h.name))[:_MOST_HOLDERS])


def _live_at_peak(
    block: Block, simulation: Simulation, names: dict[Value, str]
) -> Iterable[Holder]:
    made = simulation.makers(block.ops)
    sums: dict[tuple[str, str], int] = {}
    for span in simulation.lifetimes:
        if span.start <= simulation.peak_index <= span.end:
            op = made[span.value]
            label = origin_of(op, names.get(span.value, "")).label
            kind = "temporary" if is_backward(op) else "residual"
            sums[label, kind] = sums.get((label, kind), 0) + span.value.nbytes
    return [Holder(label, nbytes, kind) for (label, kind), nbytes in sums.items()]


def argument_values(program: Program) -> Sequence[Value]:
    """The block inputs that are argument leaves, without captured constants."""
    return program.block.inputs[len(program.consts) :]


def infeasible(
    program: Program,
    target: str,
    budget_bytes: int,
    smallest_bytes: int,
    found: Sequence[Holder],
    reason: str,
    *,
    device_bytes: int,
    recomputed: bool,
) -> str:
    """The message of a budget that nothing fits: what, where, the smallest fix."""
    why = f" ({reason})" if reason else ""
    held = ", ".join(f"{h.name} ({format_bytes(h.nbytes)}, {h.kind})" for h in found[:_NAMED])
    use = f'budget="{format_budget(smallest_bytes)}"'
    if smallest_bytes > device_bytes:
        use = f"a target with {format_bytes(smallest_bytes)} or more on each device"
    lines = [
        f"no plan fits budget={format_bytes(budget_bytes)} on {target}{why}: the smallest peak "
        f"found for {program.name} is {format_bytes(smallest_bytes)}.",
        f"  Held there by: {held}.",
        f"  Use {use}" + _ways_out(program, found, recomputed),
    ]
    return "\n".join(lines)


def _ways_out(program: Program, found: Sequence[Holder], recomputed: bool) -> str:
    ways = []
    spare = program.output_bytes - program.aliased_bytes
    if spare > program.argument_bytes // 4 and not any(a.donated for a in program.arguments):
        ways.append(
            "donate the arguments that hold the state, fit(..., donate_argnums=...): the results "
            f"are {format_bytes(spare)} that could reuse their buffers"
        )
    captured = sum(h.nbytes for h in found if h.kind == "constant")
    if captured > program.argument_bytes // 4:
        ways.append(
            f"pass the {format_bytes(captured)} that the step closes over as an argument, which "
            "can be donated"
        )
    activations = sum(h.nbytes for h in found if h.kind in ("residual", "temporary"))
    arguments = sum(h.nbytes for h in found if h.kind == "argument")
    whole = sorted({op.name for op in program.block.ops if op.name in _OPENABLE})
    if activations > arguments and not recomputed and whole:
        ways.append(
            f"smaller regions: {', '.join(whole)} is planned whole, and what is inside stays as "
            "it is"
        )
    if activations > arguments and recomputed:
        ways.append("a smaller batch or sequence, which is what remains: recomputation is used up")
    elif activations > arguments:
        ways.append(
            "a smaller batch or sequence: nothing was found here that a backward pass could make "
            "again"
        )
    else:
        ways.append("a smaller state, such as a lower-precision optimizer or more devices")
    return "".join(f", or {way}" for way in ways) + "."
