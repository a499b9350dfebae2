"""What the traced program knows of a compiled one: paths of its leaves and checkpoint names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxmem.program.ir import Program
from jaxmem.program.loops import nest
from jaxmem.program.source import checkpoint_names, origin_of


@dataclass(frozen=True)
class Known:
    """Names that the compiler does not have.

    Attributes:
        arguments: paths, by the numbers of the program's parameters.
        constants: how many of these, the first, are no arguments but arrays that the step captured.
        results: paths, by the numbers of the program's results.
        checkpoints: checkpoint names by source line and primitive.
    """

    arguments: tuple[str, ...] = ()
    constants: int = 0
    results: tuple[str, ...] = ()
    checkpoints: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def result(self, index: tuple[int, ...]) -> str:
        """The path of a result by its index; a single one has none."""
        number = index[0] if index else 0
        if number < len(self.results):
            return self.results[number]
        return f"[{number}]" if index else ""

    def checkpoint_name(self, source: str, primitive: str) -> str:
        """The name that ``checkpoint_name`` gave to what a line makes, where it is certain."""
        return self.checkpoints.get((source, primitive), "")


NOTHING = Known()


def known_of(program: Program) -> Known:
    """What a traced program knows of the same program compiled."""
    names = [f"constant {n}" for n in range(len(program.consts))]
    return Known(
        (*names, *(leaf.path for leaf in program.arguments)),
        len(program.consts),
        tuple(leaf.path for leaf in program.results),
        _checkpoints(program),
    )


def _checkpoints(program: Program) -> dict[tuple[str, str], str]:
    """Lines on which everything of a primitive has the same name: no other can be meant."""
    program_nest = nest(program.block)
    named = checkpoint_names(program_nest)
    found: dict[tuple[str, str], set[str]] = {}
    for inner in program_nest.walk():
        for op in inner.block.ops:
            if op.name != "name":
                origin = origin_of(op)
                names = {named.get(value, "") for value in op.outputs}
                found.setdefault((origin.source, origin.primitive), set()).update(names)
    alone = ((key, names) for key, names in found.items() if len(names) == 1)
    return {key: name for key, (name,) in alone if name and key[0]}
