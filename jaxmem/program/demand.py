"""What of a straight line of operations is a buffer whatever it is made of, and who reads it.

Buffers are arguments of kernels of their own, what costs much to compute, and sums that
convolutions compute. Beside that, what is known before buffers are: the kind of each operation,
padding that is undone, scatters in place, what is read in fewer bytes, numbers that repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxmem.program.ir import Atom, Op, Value
from jaxmem.program.narrowing import Narrowed, narrowed_products
from jaxmem.program.primitives import ADDS, Kind, kind_of
from jaxmem.program.rearranging import rearranged
from jaxmem.program.sideinputs import summed_in_convolutions
from jaxmem.program.sinking import BROADCASTS, repeated_numbers
from jaxmem.program.undoing import undone
from jaxmem.program.weighing import NOTHING_KEPT, Costly, Weighing

_SCATTERS = frozenset(["scatter-add", "scatter_add"])


@dataclass(frozen=True)
class Demand:
    """What is known of a straight line of operations before its buffers are.

    Attributes:
        kinds: of each operation, by position.
        same: padding that is undone, with what it is the same as.
        added: scatters that add into another array in place, with the sum.
        widening: operations whose operands are read in their results' place.
        demanded: the values that are buffers whatever they are made of.
        readers: how many operations read each value.
        kept: results that are buffers as they cost much to compute.
        sides: sums that convolutions compute, each with what has no buffer then.
        whole: it is looked at closely, and recomputes and moves nothing.
        narrowed: results of products, each with what is written in its stead.
    """

    kinds: tuple[Kind, ...]
    same: Mapping[Op, Value]
    added: Mapping[Op, Value]
    widening: Collection[Op]
    demanded: Collection[Value]
    readers: Mapping[Value, int]
    kept: Costly
    sides: Mapping[Value, Value]
    whole: bool
    narrowed: Mapping[Value, Value]


def demand_of(
    ops: Sequence[Op],
    outputs: Sequence[Atom],
    *,
    closely: bool,
    tuples: bool,
    weighing: Weighing | None,
) -> Demand:
    """What :func:`jaxmem.program.fusion.fuse` goes by; the arguments are its own.

    ``kept`` is empty without ``weighing``, ``sides`` but for a whole line with ``tuples``, and
    ``narrowed`` without them.
    """
    apart = rearranged(ops) if closely else frozenset[Op]()
    same = undone(ops) if closely else {}
    narrowed = narrowed_products(ops, outputs) if tuples else Narrowed()
    renaming = same.keys() | narrowed.rounding
    kinds = tuple([_kind_in(op, apart, renaming) for op in ops])
    added = _added_in_place(ops, outputs)
    widening = _widening(ops) if closely else frozenset[Op]()
    demanded, readers = _demand(ops, kinds, outputs, added, same, widening, narrowed.rounding)
    whole = closely and not any(op.recompute for op in ops)
    kept = weighing.kept(ops, kinds, demanded) if weighing else NOTHING_KEPT
    sides = summed_in_convolutions(ops, outputs) if whole and tuples else {}
    demanded = demanded.union(kept.buffers, sides)
    written = narrowed.written
    return Demand(kinds, same, added, widening, demanded, readers, kept, sides, whole, written)


def _kind_in(op: Op, apart: Collection[Op], renaming: Collection[Op]) -> Kind:
    if op in renaming:
        return Kind.ALIAS
    return Kind.FUSED if op in apart else kind_of(op)


def _widening(ops: Sequence[Op]) -> frozenset[Op]:
    """Those that give the same numbers in more bytes: XLA writes what they read instead."""
    converts = (op for op in ops if op.name == "convert_element_type" and op.values)
    return frozenset([op for op in converts if op.values[0].nbytes < op.outputs[0].nbytes])


def _added_in_place(ops: Sequence[Op], outputs: Sequence[Atom]) -> dict[Op, Value]:
    """The scatters into zeros whose sum with something else is all that is read, with that sum.

    XLA adds into the other operand instead, in place: the gradient of what ``take_along_axis``
    picked, 3 GiB of zeros beside a GPT's logits, does not exist. Not behind a barrier.
    """
    if not any(op.name in _SCATTERS for op in ops):
        return {}
    readers: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.values:
            readers.setdefault(value, []).append(op)
    returned = {value for value in outputs if isinstance(value, Value)}
    zeros: set[Value] = set()
    added: dict[Op, Value] = {}
    for op in ops:
        given = op.inputs[0] if op.inputs else None
        if op.name in BROADCASTS and not op.barrier and not isinstance(given, Value):
            if _is_zero(given):
                zeros.update(op.outputs)
        elif op.name in _SCATTERS and isinstance(given, Value) and given in zeros:
            result = op.outputs[0]
            reading = readers.get(result, [])
            if len(reading) == 1 and result not in returned and reading[0].name in ADDS:
                added[op] = reading[0].outputs[0]
    return added


def _is_zero(given: Atom | None) -> bool:
    """Whether a literal is zero; that of an integer's gradient, a float0, is like nothing else."""
    value = getattr(given, "val", None)
    return getattr(value, "dtype", None) != jax.dtypes.float0 and value == 0


def _demand(
    ops: Sequence[Op],
    kinds: Sequence[Kind],
    outputs: Sequence[Atom],
    added: dict[Op, Value],
    same: Mapping[Op, Value],
    widening: Collection[Op],
    rounding: Collection[Op],
) -> tuple[set[Value], dict[Value, int]]:
    """Values that something unfusable reads, and how many operations read each value."""
    demanded = {value for value in outputs if isinstance(value, Value)} | set(added.values())
    readers: dict[Value, int] = {}
    constants = repeated_numbers(ops) if any(op.loop is not None for op in ops) else set()
    for op, kind in zip(reversed(ops), reversed(kinds), strict=True):
        if op in rounding:
            continue
        if kind is Kind.ALIAS and not (op.barrier or op.transfer):
            value, result = same.get(op, op.inputs[0]), op.outputs[0]
            if isinstance(value, Value):
                if result in demanded:
                    demanded.add(value)
                readers[value] = readers.get(value, 0) + readers.get(result, 0)
            continue
        through = op in widening and op.outputs[0] not in demanded
        for value in op.values:
            times = readers.get(op.outputs[0], 0) if through else 1
            readers[value] = readers.get(value, 0) + times
        if op in added:
            demanded.update(op.values[1:])
            continue
        if kind is Kind.OPAQUE or op.barrier or op.transfer:
            demanded.update(_written_out(op, constants))
    return demanded, readers


def _written_out(op: Op, constants: set[Value]) -> Iterable[Value]:
    """The operands that ``op`` reads from memory.

    A number that a loop is given many times over is computed in its body
    (:mod:`jaxmem.program.sinking`).
    """
    if op.loop is None or not constants:
        return op.values
    given = op.inputs[: op.loop.num_consts]
    sunk = {v for v in given if isinstance(v, Value) and v in constants}
    sunk -= {v for v in op.inputs[op.loop.num_consts :] if isinstance(v, Value)}
    return [v for v in op.values if v not in sunk]
