"""Which donated argument each result of a step takes the place of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from jaxmem.program.ir import Atom, Program, Value, kind_of_array

# A result is an update of an argument that it is made of within so many values.
_FARTHEST = 200


class Places:
    """The places of results in donated inputs of the same shape and dtype.

    First comes the input that sits where the result does in what is returned, then the one that
    the result is made of most directly, then any.

    Attributes:
        taken: for each result that has a place the position of the input.
    """

    def __init__(self, program: Program):
        self.program = program
        self.kinds = [kind_of_array(atom) for atom in program.block.outputs]
        self.free = {n: kind_of_array(program.block.inputs[n]) for n in program.donated}
        self.makers = {v: op for op in program.block.ops for v in op.outputs}
        taken: dict[int, int] = {}
        for find in (self._by_path(), self._nearest, self._any):
            for number, kind in enumerate(self.kinds):
                found = find(number, kind) if number not in taken else None
                if found is not None:
                    taken[number] = found
                    del self.free[found]
        self.taken = dict(sorted(taken.items()))

    def _by_path(self) -> Callable[[int, tuple], int | None]:
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

    def _nearest(self, number: int, kind: tuple) -> int | None:
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

    def _any(self, number: int, kind: tuple) -> int | None:
        return next((n for n, its in self.free.items() if its == kind), None)


def _inside(path: str) -> str:
    """A path without the name or the first key that it starts with.

    >>> _inside("state.params['w']"), _inside("[0].params['w']")
    (".params['w']", ".params['w']")
    """
    first = path.find("]") + 1 if path.startswith("[") else 0
    at = [n for n in (path.find(".", first), path.find("[", first)) if n >= 0]
    return path[min(at) :] if at else ""
