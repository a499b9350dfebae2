"""Loops that stack alike stack into arrays of their own.

Where several loops stack arrays of one kind, XLA:GPU makes what all of them stack into before
anything else runs (:mod:`jaxmem.program.stacking`): two gradients of scans in one step, a GAN or
twins, hold what both of them keep from the beginning. All of these loops but the first are given
arrays that nobody else is. XLA:GPU makes those where the loop starts, if not always so in the
iterations of an outer loop.
"""

from __future__ import annotations

from dataclasses import replace

from jaxmem.program.ir import Block, Op
from jaxmem.program.stacking import may_stack_apart, shared_zeros


def stacked_apart(block: Block) -> Block:
    """``block`` with arrays of its own for every loop but the first of those that stack alike."""
    shared = shared_zeros(block.ops)
    if not shared:
        return block
    later = {index for loops in shared.values() for index in loops[1:]}
    ops = [_apart(op) if index in later else op for index, op in enumerate(block.ops)]
    return replace(block, ops=tuple(ops))


def inside_apart(op: Op) -> Op:
    """A loop with the loops inside it as :func:`stacked_apart` has them."""
    assert op.loop is not None
    body = stacked_apart(op.loop.body)
    if body is op.loop.body:
        return op
    loop = replace(op.loop, body=body, rewritten=True)
    return op.with_loop(loop)


def _apart(op: Op) -> Op:
    if op.loop is None or not may_stack_apart(op):
        return op
    loop = replace(op.loop, apart=True, rewritten=True)
    return op.with_loop(loop)
