"""Slices that take out of a padded array what was padded: XLA makes nothing of the two."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmem.program.ir import Op, Value


def undone(ops: Sequence[Op]) -> dict[Op, Value]:
    """For each slice of a line that undoes a padding, the value that was padded."""
    padded: dict[Value, Op] = {}
    found: dict[Op, Value] = {}
    for op in ops:
        if op.name == "pad" and isinstance(op.inputs[0], Value):
            padded[op.outputs[0]] = op
        elif op.name == "slice" and op.inputs[0] in padded:
            pad = padded[op.inputs[0]]
            given = pad.inputs[0]
            assert isinstance(given, Value)
            if _is_undone(pad, op, given):
                found[op] = given
    return found


def _is_undone(pad: Op, taken: Op, given: Value) -> bool:
    config, params = pad.eqn.params["padding_config"], taken.eqn.params
    begins = [(low, 0) for low in params["start_indices"]]
    return (
        taken.outputs[0].aval.shape == given.aval.shape
        and [(low, inner) for low, _, inner in config] == begins
        and all(stride == 1 for stride in params["strides"] or ())
    )
