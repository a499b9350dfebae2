"""Proposals that use host memory: for values that cross their turn, and for arguments.

Recomputing costs seconds of compute, offloading costs seconds of a link that compute may hide. Two
ways lead to a good mixture: from a plan that recomputes, what is dear to make again is moved to the
host instead; from keeping everything, what is large is moved until the rest fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from jaxmem.planner.candidates import Candidate
from jaxmem.planner.fill import KeptSets, Members, Solution, most
from jaxmem.planner.schedule import Keep, Turn
from jaxmem.planner.transfers import FEWEST_MOVED
from jaxmem.program.ir import Program
from jaxmem.program.loops import is_backward

_LOOPS = frozenset(["scan", "while"])
# Of the time that a value's link takes: what is element-wise is made again in 0.02 to 0.05 of it on
# an H200, what a product of 2048 gives in 0.13. A copy out and one back cost the device's memory as
# much as making an element-wise result again, and XLA may move a cast to the other side of them.
_WORTH = 0.1
_WHY = "values moved to host memory one by one, as long as that saves time"

Evaluate = Callable[[KeptSets, Keep], Solution]


class Offloader:
    """Moves groups of equal values to the host.

    Args:
        groups: values that are equal in repeated layers.
        evaluate: what kept and offloaded sets need.
        host_bytes: how much host memory there is.
        link_bytes_per_second: how fast a value goes there.
        over: says that there is no time left; what was found until then is the answer.
    """

    def __init__(
        self,
        groups: Mapping[str, Members],
        evaluate: Evaluate,
        host_bytes: int,
        link_bytes_per_second: float,
        over: Callable[[], bool] = lambda: False,
    ):
        self.groups, self.evaluate, self.host_bytes = groups, evaluate, host_bytes
        self.link_bytes_per_second, self.over = link_bytes_per_second, over

    def fastest(
        self, everything: Solution, starts: Sequence[Solution], limit_bytes: int
    ) -> Solution | None:
        """The fastest that fits, from keeping everything and from plans that recompute."""
        found = [self.instead_of_recomputing(start, limit_bytes) for start in starts]
        kept = self.instead_of_keeping(everything, limit_bytes)
        fitting = [f for f in (*found, kept) if f is not None and f.temp_bytes <= limit_bytes]
        best = min(fitting, key=lambda f: f.cost, default=None)
        return best and replace(best, solver="greedy offload", why=_WHY)

    def instead_of_recomputing(self, start: Solution, limit_bytes: int) -> Solution:
        """Move what is recomputed, the dearest per byte first, as long as that saves time."""
        best = start
        for members in self._by_worth():
            left = [(t, c) for t, c in members if c.name not in best.keep[t]]
            if self.over():
                break
            best = self._move(best, left, limit_bytes) or best
        return best

    def instead_of_keeping(self, start: Solution, limit_bytes: int) -> Solution | None:
        """Move what is kept, the cheapest to lose first, until the rest fits."""
        best = start
        for members in sorted(self._by_worth(), key=lambda m: -sum(c.nbytes for _, c in m)):
            if best.temp_bytes <= limit_bytes or self.over():
                break
            moved = self._moved(best, members)
            if moved.temp_bytes < best.temp_bytes and moved.host_bytes <= self.host_bytes:
                best = moved
        return best if best.temp_bytes <= limit_bytes else None

    def worthwhile(self, found: Solution, limit_bytes: int) -> Solution:
        """``found`` without the moves of what is made again almost at once.

        That is what is quickly made from its operands, where these are there anyway: without the
        move the step must take less than a tenth of the value's time on the link longer.
        """
        best = found
        for members in self.groups.values():
            moved = [(t, c) for t, c in members if c.name in best.offload.get(t, ())]
            gain = _WORTH * sum(c.nbytes for _, c in moved) / self.link_bytes_per_second
            if not moved or sum(c.seconds for _, c in moved) >= gain or self.over():
                continue
            lost = self._lost(best, moved)
            if lost.temp_bytes <= limit_bytes and lost.seconds < best.seconds + gain:
                best = replace(lost, solver=best.solver, why=best.why)
        return best

    def _by_worth(self) -> list[Members]:
        """Groups by what recomputing them costs, per byte, dearest first."""

        def worth(members: Members) -> tuple[float, str]:
            seconds, nbytes = sum(c.seconds for _, c in members), sum(c.nbytes for _, c in members)
            return -seconds / max(1, nbytes), members[0][1].name

        # A loop's stacks are moved value by value inside it.
        plain = [m for m in self.groups.values() if m[0][1].op.loop is None]
        return sorted(plain, key=worth)

    def _move(
        self, best: Solution, members: Sequence[tuple[Turn, Candidate]], limit_bytes: int
    ) -> Solution | None:
        """As many of ``members`` as save time; the first ones first, they have longest to go."""

        def attempt(count: int) -> Solution | None:
            tried = self._moved(best, members[:count])
            fits = tried.temp_bytes <= limit_bytes and tried.host_bytes <= self.host_bytes
            return tried if fits and tried.cost < best.cost else None

        return most(attempt, len(members), len(members)) if members else None

    def _moved(self, best: Solution, members: Sequence[tuple[Turn, Candidate]]) -> Solution:
        keep, offload = dict(best.keep), dict(best.offload)
        for turn, candidate in members:
            keep[turn] = keep[turn] | {candidate.name}
            offload[turn] = offload.get(turn, frozenset()) | {candidate.name}
        return self.evaluate(keep, offload)

    def _lost(self, best: Solution, members: Sequence[tuple[Turn, Candidate]]) -> Solution:
        keep, offload = dict(best.keep), dict(best.offload)
        for turn, candidate in members:
            keep[turn] = keep[turn] - {candidate.name}
            offload[turn] = offload[turn] - {candidate.name}
        return self.evaluate(keep, {turn: names for turn, names in offload.items() if names})


def outside(groups: Mapping[str, Members], paths: Collection[str]) -> dict[str, Members]:
    """The groups without what crosses turns of these blocks."""
    kept = {name: [m for m in group if m[0][0] not in paths] for name, group in groups.items()}
    return {name: members for name, members in kept.items() if members}


def hostable(program: Program) -> list[int]:
    """Argument leaves that a step gives back in the same shape, in the order they should leave.

    Those that only what follows the backward pass reads come first: an optimizer's moments, which
    need to be on the device only while they are updated. What the forward and the backward pass
    read as well, master weights and parameters, is fetched for each of them. The largest are first
    of either kind.

    What a loop gives back stays on the device, as in a loop over whole train steps: XLA:GPU keeps
    it in host memory through the loop then, and fails ("doesn't have correct host memory space").
    """
    ops = program.block.ops
    of_loops = {v for op in ops if op.name in _LOOPS for v in op.outputs}
    last = max((index for index, op in enumerate(ops) if is_backward(op)), default=-1)
    read = {value for op in ops[: last + 1] for value in op.values}
    inputs, first = program.block.inputs, len(program.consts)
    placed = {p for n, p in program.places.items() if program.block.outputs[n] not in of_loops}
    found = [p - first for p in placed if p >= first and inputs[p].nbytes >= FEWEST_MOVED]
    return sorted(found, key=lambda n: (inputs[first + n] in read, -inputs[first + n].nbytes, n))
