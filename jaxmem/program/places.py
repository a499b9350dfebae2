"""Which argument each result of a step takes the place of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from jaxmem.program.ir import Atom, Op, Program, Value, kind_of_array
from jaxmem.program.primitives import Kind, kind_of

# A result is an update of an argument that it is made of within so many values.
_FARTHEST = 200


def places(program: Program) -> dict[int, int]:
    """The places of results in donated inputs of the same shape and dtype.

    First comes the input that sits where the result does in what is returned, then the one that
    the result is made of most directly, then any.
    """
    found = _Places(program, program.donated)
    return found.taken_by(found.by_path(), found.nearest, found.any)


def updates(program: Program, positions: Collection[int]) -> dict[int, int]:
    """The results that are updates of some inputs, by their paths or as element-wise work is."""
    found = _Places(program, positions, elementwise=True)
    return found.taken_by(found.by_path(), found.nearest)


_Find = Callable[[int, tuple], int | None]


class _Places:
    """Finds inputs for results, each once."""

    def __init__(self, program: Program, positions: Collection[int], elementwise: bool = False):
        self.program = program
        self.kinds = [kind_of_array(atom) for atom in program.block.outputs]
        self.free = {n: kind_of_array(program.block.inputs[n]) for n in positions}
        self.makers = {
            v: op
            for op in program.block.ops
            for v in op.outputs
            if not elementwise or _is_elementwise(op)
        }

    def taken_by(self, *finders: _Find) -> dict[int, int]:
        """For each result that one finds an input for the position of that, the first to do so."""
        taken: dict[int, int] = {}
        for find in finders:
            for number, kind in enumerate(self.kinds):
                found = find(number, kind) if number not in taken else None
                if found is not None:
                    taken[number] = found
                    del self.free[found]
        return dict(sorted(taken.items()))

    def by_path(self) -> _Find:
        """The free input that sits where the result does."""
        waiting: dict[tuple, deque[int]] = {}
        for position, kind in self.free.items():
            leaf = self.program.arguments[position - len(self.program.consts)]
            if path := _inside(leaf.path):
                waiting.setdefault((kind, path), deque()).append(position)

        def find(number: int, kind: tuple) -> int | None:
            path = self.program.results[number].path
            found = waiting.get((kind, path)) or waiting.get((kind, _inside(path)))
            return found.popleft() if found else None

        return find

    def nearest(self, number: int, kind: tuple) -> int | None:
        """The free input that a result is made of in the fewest steps, of few only."""
        if kind not in self.free.values():
            return None
        inputs = self.program.block.inputs
        wanted = {inputs[n]: n for n, its in self.free.items() if its == kind}
        line: deque[Atom] = deque([self.program.block.outputs[number]])
        seen: set[Value] = set()
        while line and len(seen) < _FARTHEST:
            value = line.popleft()
            if not isinstance(value, Value) or value in seen:
                continue
            if value in wanted:
                return wanted[value]
            seen.add(value)
            line.extend(self.makers[value].values if value in self.makers else ())
        return None

    def any(self, number: int, kind: tuple) -> int | None:
        """Any free input."""
        return next((n for n, its in self.free.items() if its == kind), None)


def _is_elementwise(op: Op) -> bool:
    return kind_of(op) in (Kind.FUSED, Kind.ALIAS)


def _inside(path: str) -> str:
    """A path without the name or the first key that it starts with.

    >>> _inside("state.params['w']"), _inside("[0].params['w']")
    (".params['w']", ".params['w']")
    """
    first = path.find("]") + 1 if path.startswith("[") else 0
    at = [n for n in (path.find(".", first), path.find("[", first)) if n >= 0]
    return path[min(at) :] if at else ""
