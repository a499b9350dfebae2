"""What a part of a step is handed, and what it computes again instead: the least that crosses.

Between a gradient and the update of a leaf there is element-wise work that needs no leaf: the
gradient in float32, its square, the decay of the parameters. Handed over it would be several
arrays of the size of the parameters; computed where it is read it costs nothing, as it fuses. What
is handed over is a minimum cut (Ford and Fulkerson 1956) of that work, each value weighing its
bytes and what is on the device anyway nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxmem.program.ir import Op, Value
from jaxmem.program.primitives import Kind, kind_of, may_repeat

# Capacities of scipy's maximum_flow are 32-bit; no sum of them may overflow.
_MOST_UNITS = 2**28
_RANDOM = frozenset(["random_bits", "threefry2x32"])


class Crossing:
    """The least that crosses into parts of a step.

    Args:
        makers: the operation that makes each value.
        resident: values that are on the device in any case.
    """

    def __init__(self, makers: Mapping[Value, Op], resident: Collection[Value]):
        self.makers, self.resident = makers, resident

    def made_again(self, wanted: Iterable[Value]) -> list[Op]:
        """The operations to repeat so that the least has to be handed over for ``wanted``."""
        wanted = list(dict.fromkeys(wanted))
        inside = self._light(wanted)
        if not inside:
            return []
        values = [*dict.fromkeys([*wanted, *(v for op in inside for v in op.values)])]
        handed = self._least(values, wanted, inside)
        again: dict[Op, None] = {}
        waiting = [v for v in wanted if v not in handed]
        while waiting:
            value = waiting.pop()
            op = inside_maker(self.makers, inside, value)
            if op is not None and op not in again:
                again[op] = None
                waiting += [v for v in op.values if v not in handed]
        return list(again)

    def _light(self, wanted: Sequence[Value]) -> set[Op]:
        """The element-wise work that ``wanted`` stands on."""
        found: set[Op] = set()
        waiting = list(wanted)
        while waiting:
            op = self.makers.get(waiting.pop())
            if op is not None and op not in found and _is_light(op):
                found.add(op)
                waiting += op.values
        return found

    def _least(
        self, values: Sequence[Value], wanted: Sequence[Value], inside: set[Op]
    ) -> set[Value]:
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow

        number = {value: n for n, value in enumerate(values)}
        # What makes a tie: fewer values rather than more, and the earlier ones.
        weights = [0 if v in self.resident else v.nbytes for v in values]
        unit = max(1, -(-sum(weights) // _MOST_UNITS))
        source, sink = 2 * len(values), 2 * len(values) + 1
        endless = 2**30
        edges: dict[tuple[int, int], int] = {}
        for value, n in number.items():
            edges[2 * n, 2 * n + 1] = 0 if not weights[n] else 1 + weights[n] // unit
            op = inside_maker(self.makers, inside, value)
            if op is None:
                edges[source, 2 * n] = endless
            for operand in op.values if op is not None else ():
                edges[2 * number[operand] + 1, 2 * n] = endless
        for value in wanted:
            edges[2 * number[value] + 1, sink] = endless
        rows, columns = zip(*edges, strict=True)
        size = 2 * len(values) + 2
        graph = csr_array(
            (np.array(list(edges.values()), np.int32), (rows, columns)), shape=(size, size)
        )
        residual = (graph - maximum_flow(graph, source, sink).flow).tocsr()
        reached = {source}
        waiting = [source]
        while waiting:
            row = waiting.pop()
            start, end = residual.indptr[row], residual.indptr[row + 1]
            for column, left in zip(
                residual.indices[start:end], residual.data[start:end], strict=True
            ):
                if left > 0 and int(column) not in reached:
                    reached.add(int(column))
                    waiting.append(int(column))
        return {v for v, n in number.items() if 2 * n in reached and 2 * n + 1 not in reached}


def inside_maker(makers: Mapping[Value, Op], inside: set[Op], value: Value) -> Op | None:
    """The operation among ``inside`` that makes ``value``."""
    op = makers.get(value)
    return op if op in inside else None


def _is_light(op: Op) -> bool:
    """Whether ``op`` fuses into what reads it, so that it may as well run there."""
    light = kind_of(op) in (Kind.FUSED, Kind.ALIAS) or op.name in _RANDOM
    return light and not op.barrier and not op.transfer and may_repeat(op)
