"""How long the stages of a cut step take, and what is updated after each, on paper."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxmem.planner.simulate import Simulator
from jaxmem.program.cost import Rates, block_seconds
from jaxmem.program.ir import Block, fetched_in, has_transfers
from jaxmem.program.parts import Part
from jaxmem.rewrite.joined import turn_of
from jaxmem.runtime.parts import Need
from jaxmem.runtime.rates import rates_of
from jaxmem.runtime.timeline import Times, Turn, run_through
from jaxmem.targets.target import Target


@dataclass(frozen=True, eq=False)
class Inside:
    """A stage, and the updates that go along with its loop; ``None`` for the first one."""

    stage: Part | None
    updates: Sequence[Part] = ()

    def seconds(self, rates: Rates) -> float:
        """Of computing the updates."""
        return sum(block_seconds(part.block, rates) for part in self.updates)

    def copying(self, bytes_per_second: float) -> float:
        """Seconds that the copies of the updates take where both directions are always busy."""
        inside = [part.chunks for part in self.updates if part.chunks]
        fetched = sum(one.fetched_bytes for one in inside)
        return max(fetched, sum(one.sent_bytes for one in inside)) / bytes_per_second

    def taken(self, computing: float, bytes_per_second: float) -> float:
        """Seconds of the stage: the copies in each part of a turn hide behind what it computes.

        The first rows that are fetched, and the last that are written, have nothing beside them.
        """
        assert self.stage is not None and self.stage.chunks is not None
        length = self.stage.chunks.rows.length
        turn = turn_of(self.stage)
        each = computing / length
        first, second = (nbytes / bytes_per_second for nbytes in turn.nbytes)
        inside = max(turn.share * each, first) + max((1 - turn.share) * each, second)
        ends = sum(self.stage.moved_bytes) / length / bytes_per_second
        return length * inside + ends


def _turn(part: Part, seconds: float, link: float) -> Turn:
    """An update on a timeline; one that copies by itself copies most of the time."""
    if part.chunks is not None:
        inside = part.chunks
        moved = max(inside.fetched_bytes, inside.sent_bytes) + inside.nbytes
        return Turn(max(seconds, moved / link), alone=max(0.0, moved / link - seconds))
    # What it gives takes the place of what was fetched.
    way = max(part.fetched_bytes, part.sent_bytes)
    return Turn(seconds, part.fetched_bytes, part.sent_bytes, way=way)


class Line:
    """The stages of a step and what is updated after each, in predicted time.

    Attributes:
        stages: seconds of each, of which the first is the first part of the step.
        alone: seconds of each in which loops only wait for the rows that they fetch.
        groups: for each stage the updates that follow it.
        lent: bytes that each stage fetches for itself.
        inside: for each stage the updates that go along with its loop.
        gained: seconds that a step takes less as they do.
    """

    def __init__(
        self,
        target: Target,
        block: Block,
        ends: Sequence[int],
        groups: Sequence[Sequence[Part]],
        lent: Sequence[int] = (),
        inside: Sequence[Inside] = (),
    ):
        rates, link = rates_of(target), target.duplex_bytes_per_second
        simulator = Simulator(rates)
        taken = simulator.seconds_of(block.inputs, block.ops, block.outputs)
        # Loops that fetch rows take as long as their copies, at least.
        rows = [fetched_in(op) for op in block.ops]
        copies = [rates.link_seconds("fetch", n) if n else 0.0 for n in rows]
        waits = [max(0.0, copy - own) for copy, own in zip(copies, taken, strict=True)]
        edges = list(itertools.pairwise([0, *ends]))
        self.alone = [sum(waits[a:b]) for a, b in edges]
        computed = [sum(taken[a:b]) for a, b in edges]
        self.gained = 0.0
        for n, one in enumerate(inside):
            if one.updates:
                own = one.seconds(rates)
                apart = computed[n] + max(own, one.copying(link))
                computed[n] += own
                stage = one.taken(computed[n], link)
                self.alone[n] = stage - computed[n]
                self.gained += apart - stage
        self.stages = [a + b for a, b in zip(computed, self.alone, strict=True)]
        if has_transfers(block):
            self.stages = [simulator.step(block).seconds]
        self.lent = lent or [0] * len(self.stages)
        self.groups = [
            [_turn(p, block_seconds(p.block, rates), link) for p in group] for group in groups
        ]
        self.link = link

    def times(self, window: int, budget_bytes: int = 0, memory: Sequence[Need] = ()) -> Times:
        """How long a step takes.

        Args:
            window: the most device memory for copies.
            budget_bytes: bytes on the device; with ``memory``.
            memory: what each part takes, where that is known.
        """
        turns: list[Turn] = []
        stages = zip(self.stages, self.lent, self.alone, self.groups, strict=True)
        for n, (seconds, lent, alone, group) in enumerate(stages):
            turns += [Turn(seconds, lent, way=lent, stage=True, alone=alone)] if n else []
            turns += group
        turns = [replace(turn, room=window) for turn in turns]
        if memory:
            turns = [
                replace(
                    turn, way=need.way_bytes, room=min(window, budget_bytes - need.beside_bytes)
                )
                for turn, need in zip(turns, memory, strict=True)
            ]
        return run_through(self.stages[0], turns, self.link, window)
