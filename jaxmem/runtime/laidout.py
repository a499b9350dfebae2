"""What temporaries of a schedule take as XLA:GPU lays them out, with what kernels work in.

A search goes by the most bytes at once. What a schedule is predicted to take goes by more: by
workspaces, as one program of the step was compiled with them, and by the gaps between buffers.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxmem.hlo.module import UNREADABLE, read_module
from jaxmem.hlo.products import products_of
from jaxmem.planner.fill import Solution
from jaxmem.planner.packing import buffers, packed_bytes
from jaxmem.planner.places import most_at_once, placed_values
from jaxmem.planner.simulate import Simulator
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Block, Program
from jaxmem.runtime.workspaces import workspaces_in
from jaxmem.targets.compiling import Compiled
from jaxmem.targets.target import Target

# So many are laid out in about a second at most; more are not laid out, and no gap is counted.
_MOST_BUFFERS = 5000


class LaidOut:
    """Temporaries of schedules with what their kernels work in.

    Attributes:
        unread: why no program could be read; ``""`` where one was, or none was seen.
    """

    def __init__(self, program: Program, target: Target, rates: Rates):
        self.unread = ""
        self._program, self._rates = program, rates
        # What several devices share out is in other sizes there, and what a CPU does has none.
        lays_out = target.platform == "gpu" and not program.sharded
        self._simulator = Simulator(rates) if lays_out else None
        self._has_learnt = False
        self._known: dict[frozenset, int] = {}

    @property
    def wanted(self) -> bool:
        """Whether a compiled program would say something."""
        return self._simulator is not None and not self._has_learnt

    def learn(self, compiled: Compiled) -> None:
        """Take down what the kernels of a program work in; the first one is believed."""
        if not self.wanted:
            return
        try:
            found = workspaces_in(
                self._program.block, products_of(read_module(compiled.executable))
            )
        except UNREADABLE as error:
            self.unread = f"{type(error).__name__}: {error}"
            return
        self.unread, self._has_learnt = "", True
        self._simulator = Simulator(self._rates, found)
        self._known.clear()

    def temp_bytes(self, solution: Solution, schedule: Callable[[Solution], Block]) -> int:
        """Temporaries of a solution, which ``schedule`` writes out."""
        if self._simulator is None:
            return solution.temp_bytes
        if solution.key not in self._known:
            block = schedule(solution)
            self._known[solution.key] = self.block_bytes(block, solution.temp_bytes)
        return self._known[solution.key]

    def block_bytes(self, block: Block, most_bytes: int) -> int:
        """Temporaries of a schedule, of which ``most_bytes`` are there at once.

        It is laid out where that is known: not what loops work in.
        """
        simulator = self._simulator
        if simulator is None:
            return most_bytes
        simulation = simulator.step(block)
        donated = [block.inputs[n] for n in self._program.donated]
        placed = placed_values(block, simulation, donated)
        most = most_at_once(simulation, placed)
        if any(map(simulator.working_bytes, block.ops)):
            return most
        spans = buffers(block, simulation, simulator.workspaces, placed)
        return most if len(spans) > _MOST_BUFFERS else max(most, packed_bytes(spans))
