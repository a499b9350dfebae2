"""Let loops read stacked arrays where they wait, in host memory: a row is fetched one turn ahead.

The weights of a scanned net are one array, of which every iteration reads a row. Fetched whole they
would be on the device all the time. A loop of ``fori_loop`` hands on the row of its next iteration,
which is fetched while this one computes: on an H200 a forward pass over 24 weights in host memory
took 18.6 ms, as with weights on the device; one ``lax.scan`` over them took 32.2. The last
iteration stands behind the loop, as nothing is to be fetched in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.program.ir import Block, Loop, Op, Value
from jaxmem.program.loops import goes_by_turns
from jaxmem.rewrite.rows import not_seen_through, rows_of, write_rows


def fetching_ahead(block: Block, waiting: Collection[Value]) -> tuple[Block, frozenset[Value]]:
    """A block whose loops fetch rows of arrays in host memory, and these arrays.

    They are those that loops read row by row and nothing reads otherwise.

    Args:
        block: a schedule.
        waiting: inputs of it that are in host memory.
    """
    sliced, read = Counter[Value](), Counter[Value]()
    for op in block.ops:
        taken = _sliced(op)
        sliced.update(taken)
        read.update(a for a in op.inputs if isinstance(a, Value))
    ours = frozenset(v for v in waiting if read[v] == sliced[v] > 0 and v not in block.outputs)
    if not ours:
        return block, ours
    return replace(block, ops=tuple(_fetching(op, ours) for op in block.ops)), ours


def _sliced(op: Op) -> list[Value]:
    """What the loop ``op`` reads a row of in every iteration, at its own counter."""
    loop = op.loop
    if loop is None or not goes_by_turns(op):
        return []
    return [a for a in op.inputs[loop.num_consts + loop.num_carry :] if isinstance(a, Value)]


def _fetching(op: Op, waiting: frozenset[Value]) -> Op:
    loop = op.loop
    if loop is None:
        return op
    first = loop.num_consts + loop.num_carry
    ahead = tuple(n for n, a in enumerate(op.inputs[first:]) if a in waiting)
    if not ahead:
        return op
    loop = replace(loop, ahead=ahead, rewritten=True)
    return op.with_loop(loop)


def run_fetching(
    loop: Loop,
    body: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    stacked: Sequence[Value],
) -> list[Any]:
    """What the loop gives: carries, then stacked results.

    Args:
        loop: one with rows to fetch ``ahead``.
        body: one iteration of it.
        operands: constants, carries, and what rows are taken of.
        stacked: its stacked results.
    """
    first = loop.num_consts + loop.num_carry
    consts, start, arrays = operands[: loop.num_consts], operands[:first], operands[first:]
    last = loop.length - 1

    def place(turn: Any) -> Any:
        return last - turn if loop.reverse else turn

    def fetch(turn: Any) -> list[Any]:
        rows = [_row(arrays[n], place(turn)) for n in loop.ahead]
        return [jax.device_put(row, jax.memory.Space.Device) for row in rows]

    def iterate(turn: Any, carry: Sequence[Any], now: Sequence[Any], stacks: Sequence[Any]) -> Any:
        fetched = dict(zip(loop.ahead, now, strict=True))
        given = [
            fetched[n] if n in fetched else _row(array, place(turn))
            for n, array in enumerate(arrays)
        ]
        results = body(*consts, *carry, *given)
        rows = zip(stacks, results[loop.num_carry :], strict=True)
        written = [
            # A body may give a number that is no array.
            write_rows(stack, jnp.asarray(row, stack.dtype)[None], 0, place(turn))
            for stack, row in rows
        ]
        return list(results[: loop.num_carry]), written

    def turn(following: Any, state: Any) -> Any:
        carry, now, stacks = state
        following = not_seen_through(following)
        fetched = fetch(following)
        carry, stacks = iterate(following - 1, carry, now, stacks)
        return carry, fetched, stacks

    stacks = [lax.empty(v.aval.shape, v.aval.dtype) for v in stacked]
    state = ([*start[loop.num_consts :]], fetch(0), stacks)
    carry, now, stacks = lax.fori_loop(1, loop.length, turn, state)
    carry, stacks = iterate(last, carry, now, stacks)
    return [*carry, *stacks]


def _row(array: Any, place: Any) -> Any:
    return lax.squeeze(rows_of(array, 0, place, 1), (0,))
