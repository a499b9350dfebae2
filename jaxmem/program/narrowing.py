"""Products whose results are written in fewer bytes than they are computed in.

XLA:GPU writes a product that is only read to be rounded as what it is rounded to, moved to other
axes or scaled by a number on the way: attention's scores in bfloat16 that are summed in float32
(``preferred_element_type=``) never take four bytes each. What reads or adds another array on the
way, as a bias, gets the product in full. Of operands that take four bytes each cuBLAS makes the
product, and rounding it is another kernel (seen on an H200, jax 0.11.2, where XLA chooses kernels
by their times).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmem.program.ir import Atom, Op, Value
from jaxmem.program.primitives import RESHAPES

_MOVED = RESHAPES | {"transpose", "name"}
_SCALED = frozenset(["mul", "div"])
# Bytes of an element of what tensor cores multiply in 16 bits and less.
_NARROW = 2


@dataclass(frozen=True)
class Narrowed:
    """The products of a line that are rounded where they are made.

    Attributes:
        written: for the result of each what is written in its stead.
        rounding: the operations that round them, which take no kernel.
    """

    written: dict[Value, Value] = field(default_factory=dict)
    rounding: frozenset[Op] = frozenset()


def narrowed_products(ops: Sequence[Op], outputs: Sequence[Atom]) -> Narrowed:
    """Those of a line of operations that returns ``outputs``."""
    rounding = [op for op in ops if _rounds(op)]
    if not rounding:
        return Narrowed()
    made = {value: op for op in ops for value in op.outputs}
    reads = Counter([v for op in ops for v in op.values])
    reads.update(dict.fromkeys([v for v in outputs if isinstance(v, Value)], 2))
    written: dict[Value, Value] = {}
    found = []
    for op in rounding:
        value = op.inputs[0]
        while isinstance(value, Value) and reads[value] == 1 and (maker := made.get(value)):
            if _is_narrow_product(maker):
                written[value] = op.outputs[0]
                found.append(op)
                break
            value = _through(maker)
    return Narrowed(written, frozenset(found))


def _rounds(op: Op) -> bool:
    if op.name != "convert_element_type" or not op.values:
        return False
    given, result = op.values[0].aval.dtype, op.outputs[0].aval.dtype
    return given == jnp.float32 and jnp.issubdtype(result, jnp.floating) and result.itemsize < 4


def _is_narrow_product(op: Op) -> bool:
    if op.name != "dot_general":
        return False
    avals: list[Any] = [atom.aval for atom in op.inputs]
    return all(aval.dtype.itemsize <= _NARROW for aval in avals)


def _through(op: Op) -> Atom | None:
    """What ``op`` moves or scales by a number; ``None`` if it does more."""
    if op.name in _MOVED and not op.transfer:
        return op.inputs[0]
    if op.name in _SCALED and len(op.values) == 1:
        given, by = op.inputs
        if isinstance(given, Value) and not isinstance(by, Value):
            return given
        return by if op.name == "mul" else None
    return None
