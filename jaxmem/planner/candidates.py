"""What a plan can decide about: turns, the values that may be kept across them, and valleys."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from jaxmem import _compat
from jaxmem.planner.facts import kept_name
from jaxmem.planner.schedule import Turn
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.transfers import FEWEST_MOVED
from jaxmem.planner.valleys import low_positions, valley_positions
from jaxmem.program.fusion import Fusion, fuse
from jaxmem.program.ir import Loop, Op, Value
from jaxmem.program.loops import Nest, is_backward
from jaxmem.program.primitives import Kind, may_repeat

# With fewer valleys than this the forward pass is a plain chain, and any low place is a cut.
_FEWEST_VALLEYS = 2
# A forward pass shorter than this many operations is not worth a turn of its own.
_SHORTEST_PASS = 2
# A value is a trifle where another one is so many times as large, and so many times all of them.
_TRIFLING = 1000
_TRIFLES = 100
_DOTS = frozenset(["dot_general", "conv_general_dilated", "ragged_dot", "scaled_matmul"])


@dataclass(frozen=True)
class Candidate:
    """A value that may be kept across a turn.

    Attributes:
        name: how it stands in a kept set.
        op: the operation that makes it.
        value: the value; for a loop its largest stacked result.
        nbytes: bytes it holds while kept (all iterations of the loop it is in).
        seconds: time to make it again once.
        group: signature of equal values; they are decided together.
    """

    name: str
    op: Op
    value: Value
    nbytes: int
    seconds: float
    group: str


@dataclass(frozen=True)
class TurnChoices:
    """What can be decided at one turn.

    Attributes:
        turn: which turn.
        candidates: values that may be kept, in program order.
        valleys: for each valley of the forward pass, the names of the values live in it.
        tails: for each valley, the names of the values made after it; for the pair of a loop
            none, because there the turn is not where the late part starts to run.
        loops: names of whole loops made before the turn.
        trifles: names of values that are next to nothing beside the largest, where they are not
            stacked. To make the value of a loss again all that it sums up must stay.
    """

    turn: Turn
    candidates: tuple[Candidate, ...]
    valleys: tuple[frozenset[str], ...]
    tails: tuple[frozenset[str], ...]
    loops: frozenset[str]
    trifles: frozenset[str]


def choices(nest: Nest, simulator: Simulator, times: int = 1) -> tuple[TurnChoices, ...]:
    """Every turn of a program with what can be decided there, outermost first.

    Args:
        nest: the program.
        simulator: gives the seconds of single operations.
        times: how often this block runs per step.
    """
    block = nest.block
    fusion = fuse(block.inputs, block.ops, block.outputs)
    turns = _turns(nest) if nest.cut is None else [nest.cut]
    found = [_at_turn(nest, fusion, turn, simulator, times) for turn in turns]
    inner: list[TurnChoices] = []
    for pair, joint in nest.pairs:
        loop = block.ops[pair.forward].loop
        assert loop is not None
        inner.extend(choices(joint, simulator, times * loop.length))
    for index, body in nest.loops:
        loop = block.ops[index].loop
        assert loop is not None
        inner.extend(choices(body, simulator, times * loop.length))
    return tuple(c for c in (*found, *inner) if c.candidates)


def carried(
    nest: Nest, found: Sequence[TurnChoices], times: int = 1
) -> dict[str, list[tuple[Turn, Candidate]]]:
    """What the forward loops of scan pairs are handed by the iteration before, and read late.

    The backward loop reads it of a stack, one for each iteration. It cannot be made again, and so
    is kept, on the device or in host memory.

    Args:
        nest: the program.
        found: its turns.
        times: how often this block runs per step.
    """
    turns = {choice.turn for choice in found}
    groups: dict[str, list[tuple[Turn, Candidate]]] = {}
    for pair, joint in nest.pairs:
        loop = nest.block.ops[pair.forward].loop
        assert loop is not None
        turn, length = (joint.block.path, pair.cut), times * loop.length
        stacked = {v for v in (loop.body.outputs[k] for k in pair.escaping) if isinstance(v, Value)}
        for value, following in _handed_on(loop):
            if value in stacked:
                continue  # Others read all of it.
            if turn in turns and value.nbytes >= FEWEST_MOVED:
                name, nbytes = str(value.key), value.nbytes * length
                candidate = Candidate(name, following, value, nbytes, 0.0, f"carried {name}")
                groups[candidate.group] = [(turn, candidate)]
        groups |= carried(joint, found, length)
    for index, body in nest.loops:
        loop = nest.block.ops[index].loop
        assert loop is not None
        groups |= carried(body, found, times * loop.length)
    return groups


def _handed_on(loop: Loop) -> Iterator[tuple[Value, Op]]:
    """What a loop carries, each with the operation that makes what takes its place."""
    made = {v: op for op in loop.body.ops for v in op.outputs}
    carries = loop.body.inputs[loop.num_consts :][: loop.num_carry]
    for value, following in zip(carries, loop.body.outputs, strict=False):
        if isinstance(following, Value) and following in made:
            yield value, made[following]


def _turns(nest: Nest) -> list[int]:
    """Positions where a forward pass ends and a backward pass begins."""
    turns, run, forward_since = [], 0, 0
    for index, op in enumerate(nest.block.ops):
        if is_backward(op):
            if run > _SHORTEST_PASS and _substantial(nest, forward_since, index):
                turns.append(index)
            run, forward_since = 0, index + 1
        else:
            run += 1
    return turns


def _substantial(nest: Nest, start: int, end: int) -> bool:
    """Whether the run of forward operations makes anything worth dropping."""
    made = sum(v.nbytes for op in nest.block.ops[start:end] for v in op.outputs)
    most = max((sum(v.nbytes for v in op.outputs) for op in nest.block.ops), default=0)
    return made > most


def _at_turn(
    nest: Nest, fusion: Fusion, turn: int, simulator: Simulator, times: int
) -> TurnChoices:
    block = nest.block
    stacked = times if nest.cut is not None else 1
    returned = {v for v in block.outputs if isinstance(v, Value)} if nest.cut is None else set()
    candidates: dict[str, Candidate] = {}
    loops = set()
    for index, op in enumerate(block.ops[:turn]):
        if not may_repeat(op):
            continue
        for value in op.outputs:
            if not value.nbytes or value in returned or not fusion.is_buffer(value):
                continue
            name = kept_name(op, value)
            if op.loop is not None:
                loops.add(name)
                if name in candidates and candidates[name].value.nbytes >= value.nbytes:
                    continue
            seconds = simulator.seconds(op, fusion.kinds[index], fusion) * times
            candidates[name] = Candidate(
                name,
                op,
                value,
                value.nbytes * stacked,
                seconds,
                group_of(block.path, turn, op, value),
            )
    found = _valleys(block.ops[:turn], fusion, frozenset(candidates))
    place = {v: index for index, op in enumerate(block.ops[:turn]) for v in op.outputs}
    tails = tuple(
        frozenset(c.name for c in candidates.values() if nest.cut is None and place[c.value] > at)
        for at, _ in found
    )
    valleys = tuple(names for _, names in found)
    trifles = _trifles(candidates.values()) if nest.cut is None else frozenset[str]()
    return TurnChoices(
        (block.path, turn), tuple(candidates.values()), valleys, tails, frozenset(loops), trifles
    )


def _trifles(candidates: Collection[Candidate]) -> frozenset[str]:
    """The names of those that are next to nothing beside the largest, all of them together, too."""
    largest = max((c.nbytes for c in candidates), default=0)
    small = sorted(
        [c for c in candidates if c.nbytes * _TRIFLING <= largest], key=lambda c: c.nbytes
    )
    totals = itertools.accumulate([c.nbytes for c in small])
    pairs = zip(small, totals, strict=True)
    return frozenset([c.name for c, total in pairs if total * _TRIFLES <= largest])


def group_of(path: str, turn: int, op: Op, value: Value) -> str:
    """Equal for the same line of code in repeated layers: numbers in names do not count."""
    stack = re.sub(r"\d+", "#", _compat.name_stack_of(op.eqn))
    line = _compat.user_line(op.eqn)
    where = f"{line[0]}:{line[1]}" if line else ""
    return f"{path}@{turn}|{op.name}|{value.aval.str_short()}|{stack}|{where}"


def _valleys(
    ops: Sequence[Op], fusion: Fusion, names: frozenset[str]
) -> list[tuple[int, frozenset[str]]]:
    """The position of each valley of a forward pass, and what is live in it."""
    last_read: dict[Value, int] = {}
    for index, op in enumerate(ops):
        runs = fusion.kinds[index] is Kind.OPAQUE or any(fusion.is_buffer(v) for v in op.outputs)
        if not runs:
            continue
        for value in op.values:
            for root in fusion.roots[value]:
                last_read[root] = index
    live: dict[Value, str] = {}
    widths: list[int] = []
    held: list[tuple[str, ...]] = []
    dying: dict[int, list[Value]] = {}
    total = 0
    for index, op in enumerate(ops):
        for value in op.outputs:
            name = kept_name(op, value)
            if last_read.get(value, -1) > index and name in names:
                live[value] = name
                total += value.nbytes
                dying.setdefault(last_read[value], []).append(value)
        for value in dying.pop(index, ()):
            total -= value.nbytes
            del live[value]
        widths.append(total)
        held.append(tuple(live.values()))
    positions = list(valley_positions(widths))
    if len(positions) < _FEWEST_VALLEYS:
        positions = list(low_positions(widths, held))
    return [(i, frozenset(held[i])) for i in positions if held[i]]


def stock_keeps(found: Sequence[TurnChoices]) -> Iterator[tuple[str, dict[Turn, frozenset[str]]]]:
    """What JAX's own policies save, on their own and with what is live between the blocks.

    The second is what ``jax.checkpoint`` of each block with that policy keeps.
    """
    rules: dict[str, Callable[[Candidate], bool]] = {
        "everything_saveable": lambda c: True,
        "nothing_saveable": lambda c: False,
        "dots_saveable": lambda c: c.op.name in _DOTS,
        "dots_with_no_batch_dims_saveable": lambda c: c.op.name in _DOTS and not _batched(c.op),
    }
    for name, saves in rules.items():
        saved = {c.turn: frozenset(k.name for k in c.candidates if saves(k)) for c in found}
        yield name, saved
        yield f"{name} per block", {c.turn: saved[c.turn].union(*c.valleys) for c in found}


def _batched(op: Op) -> bool:
    """Whether a matrix product has batch dimensions, which JAX's policy does not save."""
    return op.name == "dot_general" and bool(op.eqn.params["dimension_numbers"][1][0])
