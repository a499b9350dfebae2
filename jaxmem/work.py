"""What one operation, or one instruction of a compiled program, does."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Arithmetic, and bytes to and from device memory.

    Attributes:
        flops: floating-point operations, 2 for each multiply-add.
        nbytes: bytes read from and written to device memory.
        dtype: name of the dtype that decides how fast it computes; ``""`` where there is no
            arithmetic that counts.
        cycles: of one multiprocessor, beside the floating-point operations.
        apart: bytes that kernels of their own read and write before or behind it.
        rows: whether it is a product that sums the rows of both operands.
    """

    flops: float
    nbytes: float
    dtype: str = "float32"
    cycles: float = 0.0
    apart: float = 0.0
    rows: bool = False
