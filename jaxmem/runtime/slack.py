"""Programs whose copies to and from the host have more time than they take.

XLA:GPU's scheduler goes through a program from its end, and takes every copy for some 5 ms,
whatever its bytes. Where all that is left to put in order waits for a copy that has less room than
that, it gives up on hiding it and starts all copies there at once, too late. A copy of 1.2 ms that
a schedule starts 6 ms before its value is needed is hidden, as is one that may land that late: a
GPT of 1.3e9 parameters in 30% of its memory waits 62 ms of a step where copies are placed just in
time, and 23 with slack (jax 0.12.0, table rates of an H100, as the compiled program is played
through). What is on the way longer takes room, and lifetimes are packed otherwise: of that GPT the
same bytes are laid out in 25.6 GiB with 5 ms, and in 20.1 with 4 or 6 (jax 0.11.2). So slack is
given last, to the program that is chosen, and kept where it compiles to what fits and is quicker;
sizes are tried until one hides nearly everything.
"""

from __future__ import annotations

from jaxmem.planner.retimed import retimed
from jaxmem.runtime.exposed import exposed
from jaxmem.runtime.order import order_of
from jaxmem.runtime.planned import Chosen
from jaxmem.runtime.sooner import Sooner

# Seconds that are tried, until one fits and hides nearly all; the others where one was quicker.
SLACKS, OTHERS = (6e-3, 5e-3, 4e-3), (7e-3, 5.5e-3, 4.5e-3)
# Of a step: less than this is not worth a compile, gains below that are rounding, and where no more
# is waited for copies, they are hidden.
_WORTH_IT, _GAIN, _WELL_HIDDEN = 1e-2, 1e-3, 4e-2


class Slack(Sooner):
    """The compiles of one budget."""

    def loosen(self) -> None:
        """Compile the quickest that fits with slack for its copies; add what is quicker so."""
        chosen = self.best()
        solution, waits = chosen.solution, chosen.exposed.compiled_seconds
        if solution is None or waits is None or waits < _WORTH_IT * chosen.cost[0]:
            return
        orders = [order_of(self.compiler.block(solution))]
        for number, seconds in enumerate((*SLACKS, *OTHERS)):
            best = self.best()
            no_use = best is chosen and number >= len(SLACKS)
            if self.left() < 1 or no_use or (best is not chosen and _is_hidden(best)):
                return
            loosened = retimed(self.compiler.search, solution, slack_seconds=seconds)
            order = order_of(self.compiler.block(loosened))
            predicted = chosen.predicted_bytes + loosened.temp_bytes - solution.temp_bytes
            if predicted <= self.budget and order not in orders:
                orders.append(order)
                found = self._loosened(Chosen(loosened, chosen.compiled, predicted))
                if found is not None and found.cost[0] < best.cost[0] * (1 - _GAIN):
                    self.fitting.append(found)

    def _loosened(self, asked: Chosen) -> Chosen | None:
        """It, compiled with the options of the program that it names; ``None`` if it is no use."""
        solution, compiler = asked.solution, self.compiler
        assert solution is not None
        self.announce(solution)
        name = f"{1e3 * solution.slack_seconds:g} ms a copy"
        options = compiler.options_of(asked.compiled)
        attempt = self.attempted(f"a program ({name})", solution, options)
        if attempt is None:
            return None
        compiled, nbytes = attempt.compiled, asked.predicted_bytes
        self.note(name, nbytes, nbytes, compiled, attempt.problem)
        if compiled.memory.total_bytes > self.budget or attempt.problem:
            return None
        waits = exposed(compiler.search.simulator, compiler.block(solution), compiled)
        if waits.compiled_seconds is None:
            return None  # What is not known is not taken for nothing.
        return Chosen(solution, compiled, nbytes, waits)


def _is_hidden(chosen: Chosen) -> bool:
    """Whether next to nothing waits for copies."""
    return (chosen.exposed.compiled_seconds or 0.0) <= _WELL_HIDDEN * chosen.cost[0]
