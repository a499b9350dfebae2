"""What the parts of a cut step take on paper, by the schedules that were compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxmem.planner.simulate import Simulator
from jaxmem.program.ir import Block
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
        memory, program = found.first.memory, cut.first
        first_temp_bytes = _more(program.block, program.donated, memory, simulator)
    first = replace(found.first.memory, temp_bytes=first_temp_bytes)
    parts = [
        replace(one.memory, temp_bytes=_temporaries(part, one.memory, simulator))
        for part, one in zip(cut.parts, found.parts, strict=True)
    ]
    return first, needs(cut, first, parts)


def _temporaries(part: Part, memory: CompiledMemory, simulator: Simulator) -> int:
    if part.chunks is None:
        return _more(part.block, part.donated, memory, simulator)
    return _by_rows(part.chunks, simulator)


def _more(
    block: Block, donated: Sequence[int], memory: CompiledMemory, simulator: Simulator
) -> int:
    """What does not fit where results will be and where donated inputs were."""
    given = [block.inputs[n] for n in donated]
    places = sum(v.nbytes for v in given) + memory.output_bytes - memory.alias_bytes
    return max(0, simulator.most_beside(block, given) - places)


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
