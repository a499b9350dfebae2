"""What kernels take beside operands and results, by what one program of a step was compiled to.

Autotuning decides which products have a workspace, and no shape says how large one is: a product
of cuBLASLt takes 32 MiB on an H100 and an H200, whatever it multiplies, and the first convolution
of a ResNet-152 147 MiB forward and 986 backward. But calls of one size are given as much in
other programs of a step nearly always: all 67 sizes of the calls of that ResNet, and all 11 of a
BERT-Large, in a plan for 30% as in the step as written (one process each on an H200).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator

from jaxmem.hlo.products import Product
from jaxmem.planner.workspace import Workspace
from jaxmem.program.ir import Block, Op
from jaxmem.program.trace import opened

_PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
# Numbers of the operands, the smaller first, and of the result.
Sizes = tuple[tuple[int, int], int]


def workspaces_in(block: Block, compiled: Iterable[Product]) -> dict[Op, Workspace]:
    """The workspaces of a step's operations, from the products that were compiled of it.

    Operations are told apart by the sizes of what they multiply and make. Where there are as many
    of a size as were compiled they are taken in turn, else each is given the largest. Of what is
    kept whole (a branch) the products are told apart, and their workspaces not counted.
    """
    ops: dict[Sizes, list[Op]] = {}
    for op in _products(block):
        ops.setdefault(_sizes(op), []).append(op)
    found: dict[Sizes, list[Workspace]] = {key: [] for key in ops}
    for product in compiled:
        key = _whole(product, found)
        if key is not None:
            parts = product.nbytes if product.size > key[1] else 0
            found[key].append(Workspace(product.workspace_bytes, parts))
    pairs = itertools.chain.from_iterable(_paired(ops[key], found[key]) for key in ops)
    return {op: workspace for op, workspace in pairs if workspace.total_bytes}


def _products(block: Block) -> Iterator[Op]:
    for op in block.ops:
        if op.loop is not None:
            yield from _products(op.loop.body)
        elif op.name in _PRODUCTS:
            yield op
        elif not (op.barrier or op.transfer):
            yield from itertools.chain.from_iterable(map(_products, opened(op.eqn)))


def _sizes(op: Op) -> Sizes:
    arrays = (*op.inputs[:2], op.outputs[0])
    first, second, size = (math.prod(getattr(v.aval, "shape", ())) for v in arrays)
    return (min(first, second), max(first, second)), size


def _whole(product: Product, known: Collection[Sizes]) -> Sizes | None:
    """What a product, or the parts of one, are of: parts are counted by a dimension of theirs."""
    key = product.operands, product.size
    if key in known:
        return key
    sizes = [
        size
        for operands, size in known
        if operands == product.operands and size * max(1, *product.dims[:1]) == product.size
    ]
    return (product.operands, sizes[0]) if sizes else None


def _paired(ops: list[Op], found: list[Workspace]) -> Iterator[tuple[Op, Workspace]]:
    if len(ops) == len(found):
        return zip(ops, found, strict=True)
    largest = max(found, key=lambda w: w.total_bytes, default=Workspace())
    return zip(ops, itertools.repeat(largest), strict=False)
