"""What a kernel of flash attention does: products, and what its scores take beside them.

cuDNN's kernels (Dao 2023, "FlashAttention-2") do not write scores, but take time for each of them.
On an H200, where products run at 765 TFLOP/s, they make 593 forward with heads of 128 and 411 with
heads of 64, backward 529 and 387: 0.2 to 0.29 and 0.7 to 0.82 ps a score beside the products. A
multiprocessor computes 16 exponentials in a cycle (CUDA Programming Guide, throughput of
arithmetic instructions), which is 0.24 ps a score where there are 132 at 1.98 GHz.
"""

from __future__ import annotations

from typing import NamedTuple

# Flash attention makes the scores again and four more products of their size: 5 products in the
# backward pass for the forward's 2.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
# Cycles of one multiprocessor for a score: its exponential, and what is computed of it backward.
_FORWARD_CYCLES, _BACKWARD_CYCLES = 1 / 16, 1 / 5
# Of a causal mask the tiles on the diagonal are computed whole. With 2,048 rows a forward kernel
# takes 0.55 ms where one without a mask takes 0.95.
_TILE = 256
_SUMMED_ITEMSIZE = 4


class Attended(NamedTuple):
    """What one call does.

    Attributes:
        flops: floating-point operations of its products, 2 for each multiply-add.
        cycles: of one multiprocessor, beside the products.
        apart: bytes that kernels before and behind the large one read and write.
    """

    flops: float
    cycles: float
    apart: float


def attended(
    query: int,
    head: int,
    keys: float,
    itemsize: int,
    *,
    backward: bool,
    causal: bool,
    window: int = 0,
) -> Attended:
    """What flash attention does.

    Args:
        query: elements of the query.
        head: length of each of its vectors.
        keys: how many keys each of them meets, were there no mask.
        itemsize: bytes of an element.
        backward: whether it is the gradient.
        causal: whether a query meets no later keys.
        window: how many of the last keys it meets at most; 0 for all of them.

    >>> attended(4096 * 64, 64, 4096, 2, backward=False, causal=False).flops
    4294967296.0
    """
    met = min(keys, (keys + _TILE) / 2) if causal else keys
    met = min(met, window) if window else met
    products = _BACKWARD_PRODUCTS if backward else _FORWARD_PRODUCTS
    cycles = _BACKWARD_CYCLES if backward else _FORWARD_CYCLES
    # The query's gradient is added up in float32, from zeros, and rounded; rows of the result and
    # of its gradient are multiplied and summed.
    apart = query * (2 * _SUMMED_ITEMSIZE + 3 * itemsize) if backward else 0
    return Attended(2.0 * products * query * met, cycles * met * query / max(head, 1), float(apart))
