"""How the values of a step over a mesh are split: as the compiler has it, or as it is told to."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from jax.sharding import NamedSharding

from jaxmem.planner.simulate import Simulator
from jaxmem.program.cost import Rates
from jaxmem.program.exchange import sent_bytes
from jaxmem.program.gathering import with_gathered
from jaxmem.program.ir import Program, Value
from jaxmem.program.pinning import pin, unpin
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.standin import compilable
from jaxmem.runtime.layouts import Way, lay_out
from jaxmem.runtime.partitioned import exchanged_bytes
from jaxmem.targets.compiling import Compiled, compile_for
from jaxmem.targets.target import Target

# Where the compiler's temporaries are so many times those on paper, or as much less, it splits
# arrays otherwise: order alone makes 1.4 times of a tensor-parallel step as written.
OTHER_PARTS = 1.6
# The compiler is told how to split products where devices send so much less then, and do not have
# so many times the bytes.
_CLEARLY_LESS, _LARGER = 0.75, 1.15
# Less than this takes as long as nothing.
_FEWEST_BYTES = 2**20


def split(
    program: Program, target: Target, rates: Rates, pinned: bool | None = None
) -> Compiled | None:
    """Tell every value of a step how it is split, and the compiler where it had better be told.

    Nothing changes for a program that is laid out already.

    Args:
        program: the step; its values are changed.
        target: what it is compiled for.
        rates: of the target.
        pinned: whether products are split as they are told; ``None`` to find out.

    Returns:
        The step as written and now split, if it was compiled.
    """
    splitting = _Splitting(program, target, rates, pinned)
    lay_out(program, target, splitting.choose)
    return splitting.compiled


class _Splitting:
    """Of the ways to split the values of a step, the one that the compiled program has.

    Attributes:
        compiled: the step as written, if it was compiled.
    """

    def __init__(self, program: Program, target: Target, rates: Rates, pinned: bool | None):
        self.program, self.target, self.pinned = program, target, pinned
        self.simulator = Simulator(rates)
        self.compiled: Compiled | None = None

    def choose(self, ways: Sequence[Way]) -> int:
        """The number of a way, which is that of the compiled program.

        Bytes say which it is where the ways differ in them by more than order does, and otherwise
        what devices send: half of an array is half in every direction, but other collectives go
        with it.
        """
        taken, sent = [], []
        for way in ways:
            way.lay()
            taken.append(self.simulator.step(with_gathered(self.program).block).temp_bytes)
            sent.append(sent_bytes(self.program.block))
        least = min(range(len(ways)), key=sent.__getitem__)
        if self.pinned and ways[least].axes:
            self._pin(ways[least])
            return least
        self.compiled = self._as_written()
        told = self._exchanged(self.compiled)
        if max(taken) > OTHER_PARTS * max(1, min(taken)):
            found = nearest(taken, self.compiled.memory.temp_bytes)
        else:
            found = nearest(sent, told)
        less = sent[least] <= _CLEARLY_LESS * told and told - sent[least] >= _FEWEST_BYTES
        larger = taken[least] > _LARGER * taken[found]
        if self.pinned is None and ways[least].axes and less and not larger:
            return least if self._is_better_pinned(ways[least], told) else found
        return found

    def _is_better_pinned(self, way: Way, told: float) -> bool:
        """Whether the compiled program sends clearly less if products are split like this."""
        assert self.compiled is not None
        values, better = self._pin(way), False
        try:
            compiled = self._as_written()
            most = _LARGER * self.compiled.memory.total_bytes
            less = self._exchanged(compiled) <= _CLEARLY_LESS * told
            better = less and compiled.memory.total_bytes <= most
        finally:
            if not better:
                unpin(values)
        if better:
            self.compiled = compiled
        return better

    def _pin(self, way: Way) -> list[Value]:
        way.lay()
        return pin(self.program.block, self._shardings[0].mesh, way.axes)

    def _as_written(self) -> Compiled:
        return compile_for(
            self.target,
            as_function(compilable(self.program.block, self.target)),
            self.program.avals(),
            donate=self.program.donated,
            out_shardings=self.program.out_shardings(),
        )

    def _exchanged(self, compiled: Compiled) -> float:
        return exchanged_bytes(compiled.hlo_text(), max(s.mesh.size for s in self._shardings))

    @functools.cached_property
    def _shardings(self) -> list[NamedSharding]:
        named = [s for s in self.program.shardings if isinstance(s, NamedSharding)]
        return [s for s in named if s.mesh.size > 1]


def nearest(counted: Sequence[float], told: float) -> int:
    """The number of the count that is nearest to what is told, by their ratio; the first of equals.

    >>> nearest([100, 2500, 1e6], 2000)
    1
    """
    off = [abs(math.log(max(1.0, each) / max(1.0, told))) for each in counted]
    return off.index(min(off))
