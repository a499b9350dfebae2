"""What the parts of a cut step take on paper, by the schedules that were compiled."""

from __future__ import annotations

from dataclasses import replace

from jaxmem.planner.places import temporary_bytes
from jaxmem.planner.simulate import Simulator
from jaxmem.program.parts import Part
from jaxmem.program.rowwise import Chunks
from jaxmem.runtime.parts import Need, needs
from jaxmem.runtime.staging import Pieces
from jaxmem.targets.compiling import CompiledMemory

# Rows of a turn and of the next one are on the device at a time.
_TURNS = 2


def needs_on_paper(
    found: Pieces, simulator: Simulator, first_temp_bytes: int | None = None
) -> tuple[CompiledMemory, list[Need]]:
    """Device memory of the first part and of each of the others, with simulated temporaries.

    Args:
        found: the step, compiled: of that only arguments and results count.
        simulator: for its target.
        first_temp_bytes: of the first part, where that is known; ``None`` has it simulated.
    """
    cut = found.cut
    if first_temp_bytes is None:
        program = cut.first
        given = [program.block.inputs[n] for n in program.donated]
        first_temp_bytes = temporary_bytes(simulator, program.block, given)
    first = replace(found.first.memory, temp_bytes=first_temp_bytes)
    parts = [
        replace(one.memory, temp_bytes=_temporaries(part, simulator))
        for part, one in zip(cut.parts, found.parts, strict=True)
    ]
    return first, needs(cut, first, parts)


def _temporaries(part: Part, simulator: Simulator) -> int:
    if part.chunks is not None:
        return _by_rows(part.chunks, simulator)
    return temporary_bytes(simulator, part.block, [part.block.inputs[n] for n in part.donated])


def _by_rows(chunks: Chunks, simulator: Simulator) -> int:
    """Rows of a turn and of the next one, what is computed of them, and what is there throughout.

    Along with a loop there are its own iteration and the rows that the turn before has made, too.
    """
    once = simulator.step(chunks.rows.once)
    within = simulator.step(chunks.rows.block(chunks.count)).temp_bytes + _TURNS * chunks.nbytes
    if chunks.beside is not None:
        within += simulator.iteration(chunks.beside.loop).temp_bytes
        within += chunks.sent_bytes // chunks.rows.length
    return max(once.temp_bytes, sum(v.nbytes for v in once.results) + within)
