"""Sums that XLA:GPU has a convolution compute: cuDNN adds another array to what it convolves.

The second of two convolutions whose results are added takes the first one's as a side input and
gives the sum. A convolution of volumes is the sum of three of planes: of their results two are
there when it is added up, not three, 3 GiB each in a 3D U-Net.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxmem.program.ir import Atom, Op, Value
from jaxmem.program.primitives import ADDS, CONVOLUTION, RESHAPES

# Of these many bytes are the elements that cuDNN adds to.
_ITEMSIZES = (2, 4)


def summed_in_convolutions(ops: Sequence[Op], outputs: Sequence[Atom]) -> dict[Value, Value]:
    """Sums of two convolutions, each with the result of the second, which has no buffer beside it.

    Args:
        ops: a straight line.
        outputs: what it returns.
    """
    readers: dict[Value, int] = {v: 1 for v in outputs if isinstance(v, Value)}
    for value in (v for op in ops for v in op.inputs if isinstance(v, Value)):
        readers[value] = readers.get(value, 0) + 1
    turned = {v for op in ops if op.name == "rev" for v in op.outputs}
    made: dict[Value, tuple[int, Value]] = {}
    found: dict[Value, Value] = {}
    for index, op in enumerate(ops):
        if op.name == CONVOLUTION and _is_forward(op, turned):
            made[op.outputs[0]] = (index, op.outputs[0])
        elif op.name in RESHAPES and _are_alone(op.inputs[:1], made, readers):
            made[op.outputs[0]] = made[op.values[0]]
        elif op.name in ADDS and _are_alone(op.inputs, made, readers):
            found[op.outputs[0]] = max([made[v] for v in op.values], key=lambda one: one[0])[1]
    return found


def _are_alone(
    operands: Sequence[Atom], made: Mapping[Value, object], readers: Mapping[Value, int]
) -> bool:
    """Whether each is the result of another convolution, and nothing else reads it."""
    return all(isinstance(v, Value) and v in made and readers[v] == 1 for v in operands)


def _is_forward(op: Op, turned: set[Value]) -> bool:
    """Whether it is one that cuDNN runs forward: not the gradient of what another one read."""
    params, result = op.eqn.params, op.outputs[0]
    groups = (params["feature_group_count"], params["batch_group_count"])
    dilated = any(size != 1 for size in params["lhs_dilation"])
    kernel = op.inputs[1]
    if groups != (1, 1) or dilated or (isinstance(kernel, Value) and kernel in turned):
        return False
    return result.aval.dtype.itemsize in _ITEMSIZES
