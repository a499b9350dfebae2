"""Which values are real buffers once XLA has fused the element-wise work.

A value that only element-wise operations and reductions read is computed inside their kernels
and has no bytes; what it stands on (its roots) must stay alive instead. FACTS section 2: 32 GiB
of traced residuals are 17 GiB for XLA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxmem.program.ir import Atom, Op, Value
from jaxmem.program.primitives import Kind, kind_of

# A fused kernel takes a limited number of operands; past that XLA writes a buffer.
_MOST_ROOTS = 8
# Several readers share one buffer instead of each recomputing it when reading its roots again
# would move clearly more bytes than reading the buffer (the residual stream of a transformer).
_SHARING_RATIO = 1.5
_BROADCASTS = frozenset(["broadcast_in_dim", "full"])


@dataclass(frozen=True)
class Fusion:
    """The buffers behind every value of one straight line of operations.

    Attributes:
        roots: for each value, the buffers that must be live to have it; ``(value,)`` for a buffer.
        kinds: the kind of each operation, by position.
        made: the buffers that each operation writes, by position.
    """

    roots: dict[Value, tuple[Value, ...]]
    kinds: tuple[Kind, ...]
    made: tuple[tuple[Value, ...], ...]

    def is_buffer(self, value: Value) -> bool:
        """Whether ``value`` has bytes of its own."""
        roots = self.roots[value]
        return len(roots) == 1 and roots[0] is value


def fuse(inputs: Sequence[Value], ops: Sequence[Op], outputs: Sequence[Atom]) -> Fusion:
    """Decide for every value of ``ops`` whether it is a buffer."""
    kinds = tuple([kind_of(op) for op in ops])
    demanded, readers = _demand(ops, kinds, outputs)
    roots: dict[Value, tuple[Value, ...]] = {value: (value,) for value in inputs}
    made: list[tuple[Value, ...]] = []
    for op, kind in zip(ops, kinds, strict=True):
        written: tuple[Value, ...] = ()
        if kind is Kind.FUSED:
            merged = _merged(op, roots)
            for result in op.outputs:
                real = result in demanded or len(merged) > _MOST_ROOTS
                if not real and readers.get(result, 0) > 1:
                    read = sum([root.nbytes for root in merged])
                    real = read > _SHARING_RATIO * result.nbytes
                if real:
                    written = (*written, result)
                roots[result] = (result,) if real else merged
        elif kind is Kind.ALIAS:
            written = _renamed(op, roots)
        else:
            filled = _filled_in_place(op)
            written = tuple([v for v in op.outputs if v not in filled])
            roots.update({v: (v,) for v in written})
            roots.update({result: roots[array] for result, array in filled.items()})
        made.append(written)
    return Fusion(roots, kinds, tuple(made))


def _filled_in_place(op: Op) -> dict[Value, Value]:
    """The whole arrays that a loop returns filled, each with the one it was given to fill."""
    loop = op.loop
    if loop is None or not loop.filled:
        return {}
    given = op.inputs[loop.num_consts :][: loop.num_carry]
    first = loop.num_carry - loop.filled
    pairs = zip(op.outputs[first : loop.num_carry], given[first:], strict=True)
    return {result: array for result, array in pairs if isinstance(array, Value)}


def _renamed(op: Op, roots: dict[Value, tuple[Value, ...]]) -> tuple[Value, ...]:
    """Note what is behind the results of an alias; the results that are buffers all the same."""
    written: tuple[Value, ...] = ()
    for position, result in enumerate(op.outputs):
        source = op.inputs[position if op.barrier else 0]
        if isinstance(source, Value):
            # A send reads its operand until something waits for it: a barrier, behind which the
            # copy on the host stands on its own.
            roots[result] = (result,) if op.barrier and result.host else roots[source]
        else:
            roots[result] = (result,)
            written = (*written, result)
    return written


def _merged(op: Op, roots: dict[Value, tuple[Value, ...]]) -> tuple[Value, ...]:
    if len(op.values) == 1:
        return roots[op.values[0]]
    return tuple(dict.fromkeys([root for value in op.values for root in roots[value]]))


def _demand(
    ops: Sequence[Op], kinds: Sequence[Kind], outputs: Sequence[Atom]
) -> tuple[set[Value], dict[Value, int]]:
    """Values that something unfusable reads, and how many operations read each value."""
    demanded = {value for value in outputs if isinstance(value, Value)}
    readers: dict[Value, int] = {}
    constants = repeated_numbers(ops) if any(op.loop is not None for op in ops) else set()
    for op, kind in zip(reversed(ops), reversed(kinds), strict=True):
        if kind is Kind.ALIAS and not (op.barrier or op.transfer):
            value, result = op.inputs[0], op.outputs[0]
            if isinstance(value, Value):
                if result in demanded:
                    demanded.add(value)
                readers[value] = readers.get(value, 0) + readers.get(result, 0)
            continue
        for value in op.values:
            readers[value] = readers.get(value, 0) + 1
        if kind is Kind.OPAQUE or op.barrier or op.transfer:
            demanded.update(_written_out(op, constants))
    return demanded, readers


def repeated_numbers(ops: Sequence[Op]) -> set[Value]:
    """Values that are one number, known when the program is compiled, once or many times over.

    XLA computes the number itself and writes the repetition wherever it is read.
    """
    found: set[Value] = set()
    for op in ops:
        if op.barrier or op.transfer or not all(v in found for v in op.values):
            continue
        scalar = kind_of(op) in (Kind.ALIAS, Kind.FUSED) and not op.name.startswith("random_")
        for value in op.outputs:
            if op.name in _BROADCASTS or (scalar and getattr(value.aval, "shape", None) == ()):
                found.add(value)
    return found


def _written_out(op: Op, constants: set[Value]) -> Iterable[Value]:
    """The operands that ``op`` reads from memory.

    A number that a loop is given many times over is sunk into its body (XLA's constant sinking):
    the zeros and -inf of a causal mask, two times 4 GiB in a GPT of 2,048 tokens, do not exist.
    """
    if op.loop is None or not constants:
        return op.values
    given = op.inputs[: op.loop.num_consts]
    sunk = {v for v in given if isinstance(v, Value) and v in constants}
    sunk -= {v for v in op.inputs[op.loop.num_consts :] if isinstance(v, Value)}
    return [v for v in op.values if v not in sunk]
