"""Numbers that repeat: known when the program is compiled, and written wherever they are read.

The zeros of a gradient and the -inf of a causal mask are no arrays for XLA. A loop that is given
one computes it itself (XLA's constant sinking): two times 4 GiB beside a GPT of 2,048 tokens do not
exist, and its kernels read nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jaxmem import _compat
from jaxmem.program.ir import Atom, Op, Value
from jaxmem.program.primitives import Kind, kind_of

BROADCASTS = frozenset(["broadcast_in_dim", "full"])


def repeated_numbers(ops: Sequence[Op]) -> set[Value]:
    """Values that are one number, known when the program is compiled, once or many times over.

    XLA computes the number itself and writes the repetition wherever it is read.
    """
    found: set[Value] = set()
    for op in ops:
        found.update(_numbers(op, found))
    return found


def _numbers(op: Op, found: Collection[Value]) -> list[Value]:
    """The results of ``op`` that are one number, those in ``found`` being it."""
    if op.barrier or op.transfer or not all(v in found for v in op.values):
        return []
    if op.name in BROADCASTS:
        return [*op.outputs]
    if kind_of(op) not in (Kind.ALIAS, Kind.FUSED) or op.name.startswith("random_"):
        return []
    return [value for value in op.outputs if getattr(value.aval, "shape", None) == ()]


def numbers_read(ops: Sequence[Op], read: Collection[Value]) -> list[Op]:
    """The operations among ``ops`` that make the repeated numbers among ``read``."""
    numbers, wanted, found = repeated_numbers(ops), set(read), []
    for op in reversed(ops):
        if any(v in numbers and v in wanted for v in op.outputs):
            found.append(op)
            wanted.update(op.values)
    return found[::-1]


class Sinking:
    """What repeats a number, of the operations that were read so far."""

    def __init__(self):
        self._made: dict[Value, Op] = {}

    def add(self, op: Op) -> None:
        """See an operation."""
        for value in _numbers(op, self._made):
            self._made[value] = op

    def into(
        self, given: Sequence[Atom], inputs: Sequence[Value], new: Callable[[Value], Value]
    ) -> tuple[list[Op], list[Atom]]:
        """What the body of a loop computes itself of its constants, whatever they are named.

        Args:
            given: what the loop is given as constants.
            inputs: what they are called in its body.
            new: makes a value of the body that is like one from outside.

        Returns:
            The operations to begin the body with, and for each constant what its readers read.
        """
        ops: list[Op] = []
        copies: dict[Value, Atom] = {}

        def copied(atom: Atom) -> Atom:
            if not isinstance(atom, Value):
                return atom
            if atom not in copies:
                op = self._made[atom]
                read = [copied(a) for a in op.inputs]
                if _compat.checkpoint_name_of(op.eqn) is not None:
                    # What is named is the one outside.
                    copies[atom] = read[0]
                else:
                    results = [new(v) for v in op.outputs]
                    copies.update(zip(op.outputs, results, strict=True))
                    ops.append(Op(op.eqn, read, results, origin=op.origin))
                    self.add(ops[-1])
            return copies[atom]

        found = [
            copied(atom) if isinstance(atom, Value) and atom in self._made else value
            for atom, value in zip(given, inputs, strict=True)
        ]
        return ops, found
