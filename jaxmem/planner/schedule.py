"""The schedule a plan stands for: the program with its recomputations written out.

A plan names, for each turn of each block, the values that are kept across it. A turn is where a
forward pass ends and its backward pass begins. Everything else that was made before the turn is
made again just before its first use after it, from kept values, behind an optimization barrier
tied to an operand of that use that was born after the turn. Without the barrier XLA merges the
copies with the originals and undoes the plan (FACTS section 2).

What is kept may cross the turn in host memory, and arguments may live there: see
:mod:`jaxmem.planner.transfers`.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_not

from jaxmem.errors import ArgumentError
from jaxmem.planner.ahead import one_ahead
from jaxmem.planner.decisions import IN_FLIGHT, InFlight
from jaxmem.planner.facts import Facts
from jaxmem.planner.inorder import in_order, pieces_in_order
from jaxmem.planner.level import Level, StillKept, Turns
from jaxmem.planner.pairs import Halves, split_pair
from jaxmem.planner.passes import split_in_segments
from jaxmem.planner.segments import Segments, refusal
from jaxmem.planner.simulate import Simulator
from jaxmem.planner.stacks import inside_apart, stacked_apart
from jaxmem.planner.transfers import Moved, TransferLevel, moved_of
from jaxmem.planner.updates import by_result, when_ready
from jaxmem.planner.windows import Windows
from jaxmem.program.ir import Block, Hosting, Op, Value
from jaxmem.program.loops import Nest, Pair, unrolled
from jaxmem.program.making import in_pieces
from jaxmem.program.primitives import may_repeat

Turn = tuple[str, int]
"""A block's path, and the position in its operations where the late part starts."""

Keep = Mapping[Turn, frozenset[str]]
"""For each turn that is planned, the keys of the values kept across it."""

__all__ = ["Keep", "Scheduler", "StillKept", "Turn", "is_nested"]


def is_nested(keep: Keep) -> bool:
    """Whether a kept set has turns inside a late part."""
    return any(isinstance(kept, StillKept) for kept in keep.values())


_NOTHING: Keep = {}
_WHOLE: Segments = {}
_NOWHERE = Hosting()


@dataclass(frozen=True)
class _Wanted:
    """What a schedule is written out for."""

    keep: Keep
    offload: Keep
    hosting: Hosting
    segments: Segments
    settle: bool = False
    updates_last: bool = False
    slack_seconds: float = 0.0
    in_flight: InFlight = IN_FLIGHT
    in_order: bool = True

    def at(self, path: str, outermost: str) -> frozenset:
        """What of it is about the block of ``path`` and those inside it; empty if nothing is."""
        found = [item for item in self.keep.items() if _inside(item[0][0], path)]
        away = [("offload", *item) for item in self.offload.items() if _inside(item[0][0], path)]
        hosted = []
        if self.hosting and path == outermost:
            hosted = [(self.hosting, self.updates_last)]
        pairs = [item for item in self.segments.items() if _inside(item[0], path)]
        decided = [*found, *away, *hosted, *pairs]
        if (away or hosted) and self.in_flight != IN_FLIGHT:
            decided.append(("in_flight", self.in_flight))
        if decided and self.settle:
            decided.append("settle")
        if decided and not self.in_order:
            decided.append("untied")
        return frozenset(decided)

    def turns(self, path: str) -> Turns:
        """The turns of one block; where only offload names one, everything is kept."""
        here = {turn: kept for (where, turn), kept in self.keep.items() if where == path}
        away = {turn: None for where, turn in self.offload if where == path}
        return sorted((away | here).items())

    def away(self, path: str) -> dict[int, frozenset[str]]:
        """What is offloaded across each turn of one block."""
        return {turn: names for (where, turn), names in self.offload.items() if where == path}


@dataclass
class Scheduler:
    """Writes out schedules of one program; remembers the parts that did not change.

    Attributes:
        nest: the program.
        host: written out for XLA:CPU, which orders operations differently from XLA:GPU.
        simulator: tells how long operations take, to place transfers; without one a copy to the
            host ends where its value is made and one back starts where it is needed.
        alone: nothing is split over several devices: their exchanges run beside other work.
    """

    nest: Nest
    host: bool = False
    simulator: Simulator | None = None
    alone: bool = True
    _facts: dict[str, Facts] = field(default_factory=dict)
    _repeatable: dict[Op, bool] = field(default_factory=dict)
    _early: dict[Hosting, bool] = field(default_factory=dict)
    _memo: dict[tuple[str, frozenset], Block] = field(default_factory=dict)
    _pairs: dict[tuple[str, frozenset], tuple[Op, Op]] = field(default_factory=dict)

    def schedule(
        self,
        keep: Keep,
        offload: Keep = _NOTHING,
        hosting: Hosting = _NOWHERE,
        *,
        segments: Segments = _WHOLE,
        settle: bool = False,
        updates_last: bool = False,
        slack_seconds: float = 0.0,
        in_flight: InFlight = IN_FLIGHT,
        in_order: bool = True,
    ) -> Block:
        """The whole step with the recomputations of ``keep`` and the transfers in it.

        Args:
            keep: the names kept across each turn.
            offload: those of them that cross it in host memory.
            hosting: inputs that live in host memory, and results that are returned there: see
                :meth:`jaxmem.program.ir.Program.hosting`.
            segments: for the path of a scan pair's joint block the numbers of segments, outermost
                first; a pair that is not named or has none stays whole.
            settle: write out more element-wise results early: slower, and XLA then keeps closer
                to the schedule's bytes.
            updates_last: update what is in host memory after all else, and not when it is ready.
            slack_seconds: give every copy of the outermost line so long, as far as turns and the
                copies around it allow.
            in_flight: outside pairs of scans so many of the largest copies to the host, and back,
                may be on the way at once.
            in_order: tie gradients that backward iterations only hand out to what comes next, where
                putting them off would take more.

        Raises:
            ValueError: no such pair, or it cannot run in these segments.
            ArgumentError: ``offload`` names something that cannot be offloaded or is not kept, or
                the schedule is for a CPU, whose memory is the host's.
        """
        offload = {turn: names for turn, names in offload.items() if names}
        if offload or hosting:
            self._check(offload)
        segments = {path: tuple(counts) for path, counts in segments.items() if counts}
        refused = refusal(self.nest, segments)
        if refused:
            raise ValueError(refused)
        wanted = _Wanted(
            keep,
            offload,
            hosting,
            segments,
            settle,
            updates_last,
            slack_seconds,
            in_flight,
            in_order,
        )
        return self._block(self.nest, wanted)

    def _check(self, offload: Keep) -> None:
        if self.host:
            raise ArgumentError(
                "nothing can be offloaded or hosted on a CPU: its device memory is host memory. "
                'Plan for a GPU, such as target="h200".'
            )
        if not self.nest.block.ops:
            raise ArgumentError("a step without operations has nothing to offload or host")
        paths = {inner.block.path for inner in self.nest.walk()}
        for path, turn in offload:
            if path not in paths:
                raise ArgumentError(f"no block {path!r} has a turn {turn} to offload across")
            if path in self.unrolled:
                raise ArgumentError(
                    f"nothing can be offloaded inside a scan with unroll={self.unrolled[path]}: "
                    "XLA:GPU fails to compile that. Use unroll=1, or save instead of offloading."
                )

    @functools.cached_property
    def unrolled(self) -> dict[str, int]:
        """Blocks inside loops that run several iterations at once, and how many."""
        return unrolled(self.nest)

    @property
    def _stacks_apart(self) -> bool:
        """Whether loops are to be kept from stacking into what is made before all else."""
        known = self.simulator is not None and self.simulator.rates.stacks_at_once
        return known and self.alone and not self.host

    def updates_early(self, hosting: Hosting) -> bool:
        """Whether any update of what is in host memory can run before all else is done."""
        if hosting not in self._early:
            block = self.nest.block
            hosted = [block.inputs[n] for n in hosting.inputs]
            self._early[hosting] = bool(when_ready(block.ops, block.outputs, hosted)[1])
        return self._early[hosting]

    def repeatable(self, op: Op) -> bool:
        """Whether ``op`` may be executed again."""
        known = self._repeatable.get(op)
        if known is None:
            known = self._repeatable[op] = may_repeat(op)
        return known

    def _block(self, nest: Nest, wanted: _Wanted) -> Block:
        touched = wanted.at(nest.block.path, self.nest.block.path)
        if not touched:
            return nest.block
        memo_key = (nest.block.path, touched)
        if memo_key not in self._memo:
            ops = self._with_loops(nest, wanted)
            block, _ = self._level(nest, ops, wanted, barriers=True)
            if wanted.segments or wanted.offload:
                block = replace(block, ops=in_pieces(block.ops))
            if self._stacks_apart:
                block = stacked_apart(block)
            if nest is self.nest:
                return block
            self._memo[memo_key] = block
        return self._memo[memo_key]

    def _level(
        self,
        nest: Nest,
        ops: Sequence[Op],
        wanted: _Wanted,
        *,
        barriers: bool,
        carried: int = 0,
        carries: tuple[Value, ...] = (),
    ) -> tuple[Block, int]:
        """One line written out; what is known about the same operations is used again."""
        block, name = nest.block, nest.block.path
        turns, away = wanted.turns(name), wanted.away(name)
        if nest.cut is not None and not turns:
            turns = [(nest.cut, None)]
        hosting = wanted.hosting if nest is self.nest else _NOWHERE
        updates: list[tuple[int, list[Op]]] = []
        if hosting:
            name += " hosted"
            ops, updates = _with_updates(block, ops, turns, hosting, wanted.updates_last)
            moved_before = [position for position, made in updates for _ in made]
            moved_to = {turn: turn + bisect.bisect_left(moved_before, turn) for turn, _ in turns}
            turns = [(moved_to[turn], kept) for turn, kept in turns]
            away = {moved_to[turn]: names for turn, names in away.items()}
        facts = self._facts.get(name)
        if facts is None or len(facts.ops) != len(ops) or any(map(is_not, facts.ops, ops)):
            facts = Facts.of(block, ops, self.repeatable, carried, carries)
            self._facts[name] = facts
        if not away and not hosting:
            return Level(
                facts, turns, barriers=barriers, host=self.host, settle=wanted.settle
            ).run()
        moved = moved_of(facts, turns, away, hosting, [made for _, made in updates])
        slack = wanted.slack_seconds if nest is self.nest else 0.0
        return self._transfers(facts, turns, moved, slack, wanted.in_flight, barriers=barriers)

    def _transfers(
        self,
        facts: Facts,
        turns: Turns,
        moved: Moved,
        slack: float,
        in_flight: InFlight,
        *,
        barriers: bool,
    ) -> tuple[Block, int]:
        """Written out twice: when what runs, and so when to move what, is known after the first."""
        first = TransferLevel(facts, turns, moved, Windows(), barriers=barriers)
        written = first.run()
        if not barriers:
            return written
        copies = first.copies()
        windows = copies.at_once()
        if self.simulator is not None:
            seconds = self.simulator.seconds_of(first.given, first.emitted, facts.block.outputs)
            windows = copies.well_placed(seconds, self.simulator.rates, slack, in_flight)
        return TransferLevel(facts, turns, first.used(), windows, barriers=barriers).run()

    def _with_loops(self, nest: Nest, wanted: _Wanted) -> list[Op]:
        ops = list(nest.block.ops)
        for pair, inner in nest.pairs:
            touched = wanted.at(inner.block.path, self.nest.block.path)
            if touched:
                memo_key = (inner.block.path, touched)
                if memo_key not in self._pairs:
                    self._pairs[memo_key] = self._pair(nest, pair, inner, wanted)
                ops[pair.forward], ops[pair.backward] = self._pairs[memo_key]
        for index, inner in nest.loops:
            body = self._block(inner, wanted)
            op = ops[index]
            if op.loop is not None and body is not inner.block:
                loop = replace(op.loop, body=body, rewritten=True)
                ops[index] = Op(op.eqn, op.inputs, op.outputs, loop)
        return ops

    def _pair(self, nest: Nest, pair: Pair, inner: Nest, wanted: _Wanted) -> tuple[Op, Op]:
        """The two scans of a pair, with what is not kept made again in the backward body."""
        ops = self._with_loops(inner, wanted)
        loop = nest.block.ops[pair.forward].loop
        assert loop is not None
        carries = loop.body.inputs[loop.num_consts :][: loop.num_carry]
        joint, cut = self._level(
            inner, ops, wanted, barriers=False, carried=loop.num_carry, carries=carries
        )
        halves = Halves.of(nest.block, pair, joint, cut)
        counts = wanted.segments.get(inner.block.path)
        tied = self.alone and not self.host and wanted.in_order
        if counts:
            forward, backward = split_in_segments(halves, counts)
            if self.simulator is not None and tied:
                backward = pieces_in_order(backward, self.simulator)
            return forward, backward
        forward, backward = split_pair(halves)
        if self._stacks_apart:
            forward, backward = inside_apart(forward), inside_apart(backward)
        if self.simulator is not None and tied:
            backward = in_order(backward, self.simulator)
        return one_ahead(forward, backward, self.simulator)


def _with_updates(
    block: Block, ops: Sequence[Op], turns: Turns, hosting: Hosting, last: bool
) -> tuple[list[Op], list[tuple[int, list[Op]]]]:
    """A line with its updates where they should run, and those that are early."""
    until = max([turn for turn, _ in turns], default=0)
    if last:
        return by_result(ops, block.outputs, until), []
    hosted = [block.inputs[n] for n in hosting.inputs]
    passes = [turn for turn, kept in turns if not isinstance(kept, StillKept)]
    return when_ready(ops, block.outputs, hosted, max(passes, default=0), until)


def _inside(path: str, outer: str) -> bool:
    return outer in ("", path) or path.startswith(outer + "/")
