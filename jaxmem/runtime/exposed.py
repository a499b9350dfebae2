"""How long a step only waits for copies to and from the host: on paper, and as it was compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jaxmem.hlo.module import UNREADABLE, read_module
from jaxmem.planner.simulate import Simulator
from jaxmem.program.ir import Block, has_transfers
from jaxmem.runtime.played import played
from jaxmem.targets.compiling import Compiled


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step in which only copies run.

    Attributes:
        predicted_seconds: of its schedule on paper.
        compiled_seconds: of its program, in the order of the compiler; ``None`` where that copies
            nothing.
        unread: why the program could not be read; ``""`` where it was.
    """

    predicted_seconds: float = 0.0
    compiled_seconds: float | None = None
    unread: str = ""

    @property
    def more_seconds(self) -> float:
        """What a step takes more than on paper because of the compiler's order."""
        if self.compiled_seconds is None:
            return 0.0
        return self.compiled_seconds - self.predicted_seconds

    def notes(self) -> tuple[str, ...]:
        """What the user of a plan should know."""
        if not self.unread:
            return ()
        return (f"how long the compiled program waits for copies is not known: {self.unread}",)


NOTHING = Exposed()


def exposed(simulator: Simulator, block: Block, compiled: Compiled) -> Exposed:
    """What the copies of a schedule, and of the program that was made of it, leave exposed.

    Args:
        simulator: knows the rates of the target.
        block: the schedule.
        compiled: the program.
    """
    if not has_transfers(block):
        return NOTHING
    rates = simulator.rates
    endless = dict.fromkeys(("d2h_bytes_per_second", "h2d_bytes_per_second"), math.inf)
    free = Simulator(replace(rates, **endless, duplex_bytes_per_second=0.0))
    computing = free.step(block).seconds
    on_paper = simulator.step(block).seconds - computing
    try:
        module = read_module(compiled.executable)
        waited = played(module, rates, computing).exposed_seconds
    except UNREADABLE as error:
        # The program is as good without; the plan's notes say that this is not known of it.
        return Exposed(on_paper, None, f"{type(error).__name__}: {error}")
    return Exposed(on_paper, waited)
