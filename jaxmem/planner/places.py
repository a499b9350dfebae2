"""Which temporaries go where results will be and where donated inputs were, as XLA assigns buffers.

XLA goes through buffers from the largest down. A result has a place of its own, a donated input
that of the result it becomes. A temporary goes whole to a place that is no smaller and free while
it is there; what fits none is packed into one allocation (``MaybeAssignBuffer`` and the heap
simulator in XLA's ``buffer_assignment``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmem.planner.inplace import last_read, written_over
from jaxmem.planner.simulate import Simulation, Simulator
from jaxmem.program.fusion import Fusion
from jaxmem.program.ir import Block, Value

# What is smaller is packed with the rest: all of it together is next to nothing.
_SMALL_BYTES = 2**20


class Span(NamedTuple):
    """Memory that is taken from one operation to another, both included."""

    start: int
    end: int
    nbytes: int


class Place:
    """Memory of a result.

    Attributes:
        nbytes: of it.
        taken: by the result, and by what else is there.
    """

    def __init__(self, nbytes: int, *taken: Span):
        self.nbytes, self.taken = nbytes, list(taken)

    def has_room(self, span: Span) -> bool:
        """Whether a temporary fits, and is not there while something else is."""
        apart = (span.end < other.start or span.start > other.end for other in self.taken)
        return span.nbytes <= self.nbytes and all(apart)

    def is_ever_free(self, block: Block) -> bool:
        """Whether there is an operation of ``block`` at which nothing is there."""
        taken = sorted(self.taken)
        free_from = 0
        for span in taken:
            if span.start > free_from:
                return True
            free_from = max(free_from, span.end + 1)
        return free_from < len(block.ops)


def temporary_bytes(simulator: Simulator, block: Block, donated: Sequence[Value]) -> int:
    """The most temporaries at once that go to no result's place.

    Args:
        simulator: for the target.
        block: a program.
        donated: inputs of it whose memory results may take.
    """
    simulation = simulator.step(block)
    found = placed_values(block, simulation, donated)
    return most_at_once(simulation, found)


def most_at_once(simulation: Simulation, placed: Mapping[Value, Span]) -> int:
    """The most temporaries at once beside those that are ``placed``."""
    timeline = list(simulation.timeline)
    for span in placed.values():
        for index in range(span.start, span.end + 1):
            timeline[index] -= span.nbytes
    return max(timeline, default=0)


def placed_values(
    block: Block, simulation: Simulation, donated: Sequence[Value]
) -> dict[Value, Span]:
    """The temporaries that go to results' places, and from where to where they are there.

    Args:
        block: a program.
        simulation: of it.
        donated: inputs of it whose memory results may take.
    """
    places = [p for p in _places(block, simulation, donated) if p.is_ever_free(block)]
    if not places:
        return {}
    found = _temporaries(block, simulation)
    return {found[n][0]: found[n][1] for n in placed([span for _, span in found], places)}


def placed(spans: Sequence[Span], places: Sequence[Place]) -> list[int]:
    """Which temporaries go to ``places``, each to the smallest that does, which is taken then."""
    found = []
    ordered = sorted(places, key=lambda place: place.nbytes)
    for number, span in sorted(enumerate(spans), key=lambda pair: -pair[1].nbytes):
        place = next((place for place in ordered if place.has_room(span)), None)
        if place is not None:
            place.taken.append(span)
            found.append(number)
    return found


def _temporaries(block: Block, simulation: Simulation) -> list[tuple[Value, Span]]:
    """Those worth a place, until a result is written over them."""
    fusion, ends = simulation.fusion, dict(simulation.ends)
    dying: dict[int, list[Value]] = {}
    for value, end in ends.items():
        if value not in simulation.results:
            dying.setdefault(end, []).append(value)
    for index, (op, kind, made) in enumerate(
        zip(block.ops, fusion.kinds, fusion.made, strict=True)
    ):
        results = [v for v in made if v in simulation.results]
        if results and index in dying:
            over = written_over(op, kind, results, dying[index], fusion.spared[index])
            ends.update(dict.fromkeys(over, index - 1))
    return [
        (life.value, Span(life.start, ends[life.value], life.value.nbytes))
        for life in simulation.lifetimes
        if life.value.nbytes >= _SMALL_BYTES
    ]


def _places(block: Block, simulation: Simulation, donated: Sequence[Value]) -> list[Place]:
    """The places of a program's results, with the donated inputs that some of them become."""
    fusion, end = simulation.fusion, len(block.ops)
    read = last_read(block, fusion, donated)
    becomes = _becomes(block, fusion, donated)
    found = []
    for start, made in enumerate(fusion.made):
        for value in made:
            if value in simulation.results:
                since = 0 if value in fusion.early else start
                place = Place(value.nbytes, Span(since, end, value.nbytes))
                if value in becomes:
                    place.taken.append(Span(-1, read.get(becomes[value], end), value.nbytes))
                found.append(place)
    return found


def _becomes(block: Block, fusion: Fusion, donated: Sequence[Value]) -> dict[Value, Value]:
    """By result the donated input whose memory it gets: the next of its shape and dtype, as in JAX.

    What is in host memory gets none of the device's, and has none to give.
    """
    given: dict[object, list[Value]] = {}
    for value in donated:
        if not value.host:
            given.setdefault((value.aval.shape, value.aval.dtype), []).append(value)
    found: dict[Value, Value] = {}
    for value in block.outputs:
        if isinstance(value, Value) and not value.host:
            if alike := given.get((value.aval.shape, value.aval.dtype)):
                found.setdefault(fusion.roots[value][0], alike.pop(0))
    return found
