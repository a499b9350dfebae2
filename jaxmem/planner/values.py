"""The forward values of a program as policies see them: each with its views, names and module."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jaxmem import _compat
from jaxmem.planner.candidates import Candidate, group_of
from jaxmem.planner.facts import kept_name
from jaxmem.planner.schedule import Turn
from jaxmem.policies.facts import Facts, facts_of_op
from jaxmem.policies.values import inner_jaxprs_of, names_inside
from jaxmem.program.fusion import Fusion, fuse
from jaxmem.program.ir import Block, Op, Value
from jaxmem.program.loops import Nest, is_backward
from jaxmem.program.primitives import Kind, kind_of, may_repeat
from jaxmem.program.sinking import repeated_numbers
from jaxmem.program.source import module_path


@dataclass(frozen=True, eq=False)
class Part:
    """A value and the views of it: reshapes, transposes, checkpoint names.

    Attributes:
        made_by: the operation that makes it; ``None`` for an input of the block.
        value: the value.
        views: the views, each with the operation that makes it.
        facts: what a policy is told.
        given: nothing here could make it again: it is an input of the block, or the result of a
            loop that is decided inside.
    """

    made_by: Op | None
    value: Value
    views: tuple[tuple[Op, Value], ...]
    facts: Facts
    given: bool

    @property
    def names(self) -> list[str]:
        """How the value and its views stand in kept sets; of what is given only the views."""
        own = [] if self.given else [self.name_of(self.value)]
        return [*own, *(kept_name(op, view) for op, view in self.views)]

    def name_of(self, value: Value) -> str:
        """How the value or one of its views stands in a kept set."""
        maker = self.maker(value)
        return str(value.key) if maker is None else kept_name(maker, value)

    def maker(self, value: Value) -> Op | None:
        """The operation that makes the value or one of its views."""
        return next((op for op, view in self.views if view is value), self.made_by)

    def to_keep(self, line: Line) -> list[Value]:
        """What is kept to save it; an input of the block is there anyway."""
        return [] if self.made_by is None else [self.value]

    def to_send(self, line: Line) -> list[Value]:
        """What crosses the turn in host memory to offload it.

        Of the results of a loop only what is named; of inputs only what an iteration is handed by
        the last one, for the others stay on the device all the same.
        """
        if self.made_by is None:
            return [self.value] if self.value in line.carries else []
        if self.made_by.loop is not None and self.views:
            return [view for _, view in self.views if view in line.late]
        return [self.value]


@dataclass(frozen=True, eq=False)
class Line:
    """The forward part of one straight line of a program.

    Attributes:
        block: the line.
        turn: where it ends; ``None`` where no backward pass follows that could be planned.
        early: its operations.
        parts: their results.
        hidden: checkpoint names inside operations that are planned whole.
        times: how often it runs in a step.
        pair: for one iteration of a pair of scans the path of that, else ``""``.
        within: the lines around it, innermost first.
        loops: the turns that the loops around it cross, with the names of these loops.
        carries: what an iteration is handed by the last one.
        fusion: the buffers behind each value.
        late: what is read after the turn.
        fixed: what is there after the turn whatever is decided.
        always: names that a policy has no say about: of loops that are decided inside, and of what
            a backward pass made.
    """

    block: Block
    turn: Turn | None
    early: tuple[Op, ...]
    parts: tuple[Part, ...]
    hidden: tuple[Facts, ...]
    times: int
    pair: str
    within: tuple[Line, ...]
    loops: tuple[tuple[Turn, str], ...]
    carries: frozenset[Value]
    fusion: Fusion
    late: frozenset[Value]
    fixed: Collection[Value]
    always: frozenset[str]

    def candidate(self, part: Part, name: str, value: Value) -> Candidate:
        """A kept value for the list of decisions; to make it again is part of other kernels."""
        op = part.maker(value) or part.views[0][0]
        assert self.turn is not None
        stacked = self.times if self.pair else 1
        group = group_of(self.block.path, self.turn[1], op, value)
        return Candidate(name, op, value, value.nbytes * stacked, 0.0, group)


def forward_lines(nest: Nest, turns: Collection[Turn]) -> list[Line]:
    """The forward part of every line of a program, at each of its turns."""
    return list(_lines(nest, _Around(turns, 1, "", (), (), (), frozenset())))


@dataclass(frozen=True)
class _Around:
    """What is around a line."""

    turns: Collection[Turn]
    times: int
    pair: str
    stacks: tuple[str, ...]
    within: tuple[Line, ...]
    loops: tuple[tuple[Turn, str], ...]
    carries: frozenset[Value]


def _lines(nest: Nest, around: _Around) -> Iterator[Line]:
    block = nest.block
    here = sorted(at for path, at in around.turns if path == block.path)
    found = [_line(nest, at, around) for at in here] or [_line(nest, None, around)]
    yield from found
    for pair, joint in nest.pairs:
        op = block.ops[pair.forward]
        assert op.loop is not None
        name = kept_name(op, op.outputs[0])
        crossed = tuple(
            (line.turn, name) for line in found if line.turn and line.turn[1] > pair.forward
        )
        inside = _inside(around, op, found[0], joint.block.path)
        carries = op.loop.body.inputs[op.loop.num_consts :][: op.loop.num_carry]
        loops = (*around.loops, *crossed)
        yield from _lines(
            joint, dataclasses.replace(inside, loops=loops, carries=frozenset(carries))
        )
    for index, body in nest.loops:
        yield from _lines(body, _inside(around, block.ops[index], found[0], ""))


def _inside(around: _Around, op: Op, line: Line, pair: str) -> _Around:
    """What is around the body of a loop: names of modules outside count there too."""
    assert op.loop is not None
    stacks = (*around.stacks, _compat.name_stack_of(op.eqn))
    within = (line, *around.within)
    times = around.times * op.loop.length
    return _Around(around.turns, times, pair, stacks, within, around.loops, frozenset())


def _line(nest: Nest, at: int | None, around: _Around) -> Line:
    block = nest.block
    end = len(block.ops) if at is None else at
    if at is None and nest.cut is not None:
        end = nest.cut
    early = [op for op in block.ops[:end] if nest.cut is not None or not is_backward(op)]
    turned = [op for op in block.ops[:end] if nest.cut is None and is_backward(op)]
    fusion = fuse(block.inputs, block.ops, block.outputs)
    paired = {id(block.ops[pair.forward]) for pair, _ in nest.pairs}
    loops = [op for op in early if id(op) in paired]
    lasting = [*loops, *turned, *(op for op in early if not may_repeat(op))]
    late = {v for op in block.ops[end:] for v in op.values}
    # What an iteration hands to the next one is not read late.
    late |= {v for v in block.outputs[len(around.carries) :] if isinstance(v, Value)}
    return Line(
        block=block,
        turn=None if at is None else (block.path, at),
        early=tuple(early),
        parts=tuple(_parts(block, early, around.stacks, paired)),
        hidden=tuple(_hidden(early, around.stacks)),
        times=around.times,
        pair=around.pair,
        within=around.within,
        loops=around.loops,
        carries=around.carries,
        fusion=fusion,
        late=frozenset(late),
        fixed=repeated_numbers(block.ops).union(block.inputs, *(op.outputs for op in lasting)),
        always=frozenset(kept_name(op, v) for op in (*loops, *turned) for v in op.outputs),
    )


def _parts(
    block: Block, early: list[Op], stacks: tuple[str, ...], paired: set[int]
) -> Iterator[Part]:
    made: dict[Value, Op] = {v: op for op in early for v in op.outputs}
    views, names = _views(early)
    seen = {view for behind in views.values() for _, view in behind}
    numbers = repeated_numbers(early)
    for value in dict.fromkeys([*block.inputs, *made]):
        op, called = made.get(value), tuple(dict.fromkeys(names.get(value, ())))
        given = op is None or id(op) in paired
        if value in seen or ((given or value in numbers) and not called):
            continue
        around = tuple(views.get(value, ()))
        described, result = (op, value) if op is not None and not given else _naming(around)
        facts = facts_of_op(described, result, called)
        path = "/".join([*stacks, _compat.name_stack_of(described.origin.eqn)])
        yield Part(op, value, around, dataclasses.replace(facts, module=module_path(path)), given)


def _views(
    early: list[Op],
) -> tuple[dict[Value, list[tuple[Op, Value]]], dict[Value, list[str]]]:
    """The views of every value that has some, and the names of it and of them."""
    root: dict[Value, Value] = {}
    views: dict[Value, list[tuple[Op, Value]]] = {}
    names: dict[Value, list[str]] = {}
    for op in early:
        name = _compat.checkpoint_name_of(op.eqn)
        if name is None and kind_of(op) is not Kind.ALIAS:
            continue
        for operand, view in zip(op.inputs, op.outputs, strict=False):
            behind = view
            if isinstance(operand, Value):
                behind = root[view] = root.get(operand, operand)
                views.setdefault(behind, []).append((op, view))
            if name is not None:
                names.setdefault(behind, []).append(name)
    return views, names


def _naming(views: tuple[tuple[Op, Value], ...]) -> tuple[Op, Value]:
    """The operation that gives something a checkpoint name."""
    return next((o, v) for o, v in views if _compat.checkpoint_name_of(o.eqn) is not None)


def _hidden(early: list[Op], stacks: tuple[str, ...]) -> Iterator[Facts]:
    """The checkpoint names in what is kept whole."""
    for op in early:
        if op.loop is None:
            for jaxpr in inner_jaxprs_of(op.eqn):
                for facts in names_inside(jaxpr, op.eqn):
                    path = "/".join([*stacks, facts.module])
                    yield dataclasses.replace(facts, module=module_path(path))
