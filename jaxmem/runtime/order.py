"""Whether two schedules of one step are the same program."""

from __future__ import annotations

from collections.abc import Iterable

from jaxmem.program.ir import Block, Value


def order_of(block: Block) -> tuple:
    """What is done, in order, with values by number; equal for equal programs of one step."""
    numbers = {value: number for number, value in enumerate(block.inputs)}

    def of(values: Iterable[Value]) -> list[int]:
        return [numbers.setdefault(value, len(numbers)) for value in values]

    return tuple(
        (op.name, op.transfer, op.barrier, *of(op.values), *of(op.outputs)) for op in block.ops
    )
