"""Where the arrays of a cut step are that runs over several devices, as its pieces are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxmem.program.cut import Cut
from jaxmem.program.ir import Atom, Value
from jaxmem.program.spreading import count
from jaxmem.targets.compiling import Compiled


class Spread:
    """Layouts of what pieces hand on, for those that read it.

    What the step does not say, the compiler chooses for the piece that makes it, and the pieces
    that come later are compiled for that. Values then count with their bytes on each device.

    Args:
        cut: the step.
        names: what the outputs of the first part are called, where not as they are.
        first: the first part, compiled.
    """

    def __init__(self, cut: Cut, names: Sequence[Atom], first: Compiled):
        self.places: dict[Value, Any] = dict(cut.layouts)
        block = cut.first.block
        self.made(names or block.outputs, block.outputs, first)

    def of(self, name: Atom) -> Any:
        """The layout of a value; ``None`` where the compiler is to choose it."""
        return self.places.get(name) if isinstance(name, Value) else None

    def read(self, names: Sequence[Value], inputs: Sequence[Value]) -> list[Any]:
        """The layouts of what a piece reads."""
        for name, value in zip(names, inputs, strict=True):
            if name in self.places:
                count(value, self.places[name])
        return [self.of(name) for name in names]

    def made(self, names: Sequence[Atom], outputs: Sequence[Atom], compiled: Compiled) -> None:
        """Learn what a piece gives."""
        layouts = compiled.executable.output_shardings
        for name, value, layout in zip(names, outputs, layouts, strict=True):
            if isinstance(name, Value) and isinstance(layout, NamedSharding):
                found = self.places.setdefault(name, layout)
                count(name, found)
                if isinstance(value, Value):
                    count(value, found)


def spread_of(cut: Cut, names: Sequence[Atom], first: Compiled) -> Spread | None:
    """The layouts of a step over several devices; ``None`` on one."""
    return Spread(cut, names, first) if cut.program.sharded else None
