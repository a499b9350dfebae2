"""Make what a backward iteration only hands out before the iteration needs the most bytes.

The gradient of a layer's weights is read by nothing else in the iteration, so XLA:GPU makes it when
it likes: in a scanned transformer after the attention's gradient, and keeps the two activations
that it is made of until then. A simulation makes it where it is written. Where putting it off
would take more than the iteration takes at most, it is tied, behind a barrier, to what the next
operation reads; where there is room it is not, as kernels before and after a barrier are not one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxmem.planner.simulate import Simulator
from jaxmem.program.fusion import Fusion
from jaxmem.program.ir import Atom, Block, Op, Value, has_transfers
from jaxmem.program.primitives import Kind

# Whose barriers these are; nothing is computed again behind them.
_TAG = "jaxmem.inorder"


def in_order(scan: Op, simulator: Simulator) -> Op:
    """``scan`` with barriers in its body, where putting off what is handed out takes more bytes.

    One that copies to or from host memory stays as it is, and one over several devices: copies and
    exchanges of gradients run beside other work, which would wait for them behind a barrier.
    """
    loop = scan.loop
    assert loop is not None
    body = loop.body
    split = any(v.layout is not None for op in body.ops for v in (*op.values, *op.outputs))
    if split or has_transfers(body):
        return scan
    fusion = simulator.fused(body)
    ties = _ties(body, fusion, simulator.iteration(loop).timeline)
    if not ties:
        return scan
    loop = replace(loop, body=_tied(body, ties), rewritten=True)
    return Op(scan.eqn, scan.inputs, scan.outputs, loop, scan.recompute, origin=scan.origin)


def _ties(
    body: Block, fusion: Fusion, timeline: Sequence[int]
) -> list[tuple[int, Value, list[Value]]]:
    """Before which operation which value is tied to which results that come earlier."""
    most = max(timeline, default=0)
    put_off = _put_off(body, fusion)
    born = {v for made in fusion.made for v in made}
    found: list[tuple[int, Value, list[Value]]] = []
    waiting: list[Value] = []
    more = 0
    # The last operation that can be tied to, and what waits for it.
    candidate: tuple[int, Value, int, int] | None = None
    for index, (op, kind) in enumerate(zip(body.ops, fusion.kinds, strict=True)):
        if index in put_off:
            waiting += op.outputs
            more += put_off[index]
            continue
        read = [v for v in op.values if v in born] if kind is Kind.OPAQUE and waiting else ()
        if read:
            candidate = index, max(read, key=lambda v: v.nbytes), len(waiting), more
        if candidate is not None and timeline[index] + more > most:
            place, value, count, less = candidate
            found.append((place, value, waiting[:count]))
            waiting, more, candidate = waiting[count:], more - less, None
    return found


def _put_off(body: Block, fusion: Fusion) -> dict[int, int]:
    """The kernels that no other kernel needs, with the bytes that stay if they run last."""
    last: dict[Value, int] = {}
    for index, op in enumerate(body.ops):
        for root in (root for v in op.values for root in fusion.roots[v]):
            last[root] = index
    stays = {*body.inputs, *body.outputs}
    needed: set[Value] = set()
    found: dict[int, int] = {}
    for index in range(len(body.ops) - 1, -1, -1):
        op = body.ops[index]
        opaque = fusion.kinds[index] is Kind.OPAQUE
        if opaque or any(v in needed for v in op.outputs):
            if opaque and not any(v in needed for v in op.outputs) and op.loop is None:
                roots = {root for v in op.values for root in fusion.roots[v]}
                found[index] = sum([r.nbytes for r in roots - stays if last[r] == index])
            needed.update(op.values)
    return found


def _tied(body: Block, ties: Sequence[tuple[int, Value, list[Value]]]) -> Block:
    """``body`` with the barriers; what was tied is read from behind them."""
    at = {place: (value, waited) for place, value, waited in ties}
    late: dict[Value, Value] = {}

    def now(atom: Atom) -> Atom:
        return late.get(atom, atom) if isinstance(atom, Value) else atom

    ops: list[Op] = []
    for index, op in enumerate(body.ops):
        if index in at:
            value, waited = at[index]
            tied = list(dict.fromkeys([value, *waited]))
            operands = [now(v) for v in tied]
            results = [v.like() for v in tied]
            ops.append(Op(op.eqn, operands, results, None, _TAG, barrier=True))
            late.update(zip(tied, results, strict=True))
        if any(v in late for v in op.values):
            inputs = [now(atom) for atom in op.inputs]
            op = Op(op.eqn, inputs, op.outputs, op.loop, op.recompute, op.barrier, op.origin)
        ops.append(op)
    return Block(body.path, body.inputs, tuple(ops), tuple(map(now, body.outputs)))
