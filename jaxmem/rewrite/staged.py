"""Run the schedule of a cut step's first part in stages, so that updates start before it ends.

XLA hands results over when a program ends. The gradients of the last layers are done long before
those of the first ones, and the update of their leaves can be copied while the rest is computed, if
the rest is a program of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxmem.program.crossing import Crossing
from jaxmem.program.cut import Cut
from jaxmem.program.ir import Atom, Block, Leaf, Op, Program, Value, has_transfers
from jaxmem.program.joining import joined
from jaxmem.program.parts import Part, donating, lasting, layout_of, lined_up, state_among


@dataclass(frozen=True, eq=False)
class Staged:
    """A cut step whose first part runs in stages.

    Attributes:
        cut: the step; the first stage is its first part, the others are among its parts.
        names: what the outputs of the first stage are called.
    """

    cut: Cut
    names: tuple[Atom, ...]


def ready_at(cut: Cut, block: Block) -> list[int]:
    """For each part how many operations of the schedule must have run before it can.

    Args:
        cut: a step that is cut.
        block: a schedule of its first part.
    """
    makers = {v: n for n, op in enumerate(block.ops) for v in op.outputs}
    at = {
        name: makers.get(atom, -1) + 1
        for name, atom in zip(cut.first.block.outputs, block.outputs, strict=True)
        if isinstance(name, Value) and isinstance(atom, Value)
    }
    found: list[int] = []
    last = {v: n + 1 for n, op in enumerate(block.ops) for v in op.values if v in cut.lent}
    for part in cut.parts:
        ready = max([at.get(cut.later.get(v, v), 0) for v in part.reads], default=0)
        if part.chunks:
            # It writes over its leaves: everything that is lent them comes before.
            homes = set(part.chunks.homes.values())
            borrowed = (n for v, n in last.items() if cut.lent[v] in homes)
            ready = max([ready, *borrowed])
        at.update({v: ready for v in part.names if isinstance(v, Value)})
        found.append(ready)
    return found


def can_be_staged(block: Block) -> bool:
    """Whether a schedule may run as several programs: no effects, no values on the host."""
    return not has_transfers(block) and not any(op.eqn.effects for op in block.ops)


def staged(
    cut: Cut,
    block: Block,
    bounds: Sequence[int],
    ahead: Collection[Value] = (),
    *,
    joining: bool = False,
) -> Staged:
    """A cut step with its first part in stages.

    Args:
        cut: the step.
        block: the schedule of its first part.
        bounds: the operations at which the second stage starts, the third, and so on.
        ahead: lent leaves of which loops fetch rows themselves.
        joining: let updates go along with the loops that make their gradients.
    """
    edges = [0, *bounds, len(block.ops)]
    stages = _stages(cut, block, edges, ahead)
    ready = ready_at(cut, block)
    line: list[Part] = []
    for number, (end, stage) in enumerate(zip(edges[1:], stages, strict=True)):
        line += [stage] if number else []
        start = edges[number] if number else -1
        line += [part for part, at in zip(cut.parts, ready, strict=True) if start < at <= end]
    program = cut.program
    outputs = enumerate(program.block.outputs)
    kept = {v for n, v in outputs if isinstance(v, Value) and n not in cut.hosting.results}
    if joining:
        line = joined(line, cut.lent, kept)
    parts = lined_up(line, kept=kept, lasting=lasting(program), layouts=cut.layouts)
    first = _first(cut, stages[0], {v for part in parts for v in part.reads})
    whole = replace(cut, first=first, parts=parts)
    return Staged(whole, stages[0].names)


def _stages(cut: Cut, block: Block, edges: Sequence[int], ahead: Collection[Value]) -> list[Part]:
    """The stages; the first one gives constants and arguments that are results, too."""
    called: dict[Value, Value] = {}
    more: list[tuple[Value, Value]] = []
    passed: list[tuple[Atom, Atom]] = []
    inputs = set(block.inputs)
    for name, atom in zip(cut.first.block.outputs, block.outputs, strict=True):
        if not isinstance(atom, Value) or not isinstance(name, Value) or atom in inputs:
            passed.append((name, atom))
        elif atom in called:
            more.append((name, atom))
        else:
            called[atom] = name
    makers = {v: op for op in block.ops for v in op.outputs}
    stage_of = {
        op: n
        for n, (start, end) in enumerate(itertools.pairwise(edges))
        for op in block.ops[start:end]
    }
    order = {op: n for n, op in enumerate(block.ops)}
    crossing = Crossing(makers, inputs)
    lines: list[list[Op]] = []
    for n, (start, end) in enumerate(itertools.pairwise(edges)):
        own = block.ops[start:end]
        given = {v for op in own for v in op.values if v in makers and stage_of[makers[v]] < n}
        again = crossing.made_again(sorted(given, key=lambda v: order[makers[v]]))
        lines.append(sorted({*own, *again}, key=order.__getitem__))
    reads = [_reads(line) for line in lines]
    later: set[Value] = set(called)
    found: list[Part] = []
    for n in reversed(range(len(lines))):
        made = [v for op in block.ops[edges[n] : edges[n + 1]] for v in op.outputs]
        outputs: list[Atom] = [v for v in made if v in later]
        names: list[Atom] = [called.get(v, v) for v in made if v in later]
        extra = [(name, atom) for name, atom in more if atom in made]
        extra = [*(passed if not n else ()), *extra]
        outputs = [*(atom for _, atom in extra), *outputs]
        names = [*(name for name, _ in extra), *names]
        # The first stage is given what is on the device, whether it reads it or not.
        here = [v for v in block.inputs if v not in cut.lent or v in reads[n]]
        taken = tuple(here) if not n else tuple(reads[n])
        found.append(
            Part(
                Block("", taken, tuple(lines[n]), tuple(outputs)),
                tuple(called.get(v, v) for v in taken),
                tuple(names),
                fetched=tuple(v for v in taken if v in cut.lent and v not in ahead) if n else (),
                stage=True,
                waiting=tuple(v for v in taken if v in ahead),
            )
        )
        later |= set(reads[n])
    return found[::-1]


def _reads(ops: Sequence[Op]) -> list[Value]:
    """What is read of what is not made here, in order."""
    made = {v for op in ops for v in op.outputs}
    return list(dict.fromkeys(v for op in ops for v in op.values if v not in made))


def _first(cut: Cut, stage: Part, later: set[Value]) -> Program:
    """The first stage as the first part of the step."""
    whole = cut.program
    marked = {v: leaf.donated for v, leaf in _inputs(whole)}
    numbered = enumerate(_inputs(cut.first))
    kept = [(n, v, a) for n, (v, a) in numbered if v in stage.block.inputs]
    layouts = dict(zip(cut.first.block.inputs, cut.first.layouts(), strict=True))
    program = replace(
        cut.first,
        block=stage.block,
        arguments=tuple(replace(a, donated=marked[v]) for _, v, a in kept),
        shardings=tuple(layouts[v] for _, v, _ in kept),
        results=tuple(Leaf(f"handed on: {n}") for n in range(len(stage.block.outputs))),
        state=state_among(cut.first, [n for n, _, _ in kept]),
        wanted=tuple(layout_of(cut.layouts, name) for name in stage.names),
    )
    return donating(program, later)


def _inputs(program: Program) -> Iterator[tuple[Value, Leaf]]:
    """The argument leaves of a program as its block reads them."""
    yield from zip(program.block.inputs[len(program.consts) :], program.arguments, strict=True)
