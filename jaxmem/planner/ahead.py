"""Send and fetch what a pair of scans has in host memory one iteration apart from its use.

Written out plainly, an iteration sends a residual when it has made it, and the backward iteration
fetches it when it needs it: XLA:GPU lets computing wait for both. 16 layers on an H200 took 153 ms
with one such residual and 125 without any. So each is handed on for an iteration:

- The forward scan sends what the iteration before made, and hands the last one to the backward
  scan on the device. The host array is written at the loop's own index: with any other, XLA reads
  and writes host memory with a kernel instead of a copy.
- The backward scan fetches at its own index, too, and finds there what the next iteration needs.
- Where copies take longer than computing, what is sent stays where it is until its successor is
  made. XLA would write that over it, and wait for the copy first.
- What the forward scan sends waits, behind a barrier, for the slices that the iteration is given:
  they are copies as well, and would queue behind it.

What that gives is measured by benchmarks/offload.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace

from jaxmem.planner.simulate import Simulator
from jaxmem.program.ir import Block, Loop, Op, Value
from jaxmem.program.making import empty, is_typed, kept_apart, may_be_kept_apart


@dataclass(frozen=True, eq=False)
class _Stay:
    """A residual that waits in host memory.

    Attributes:
        send: the copy to the host, ``result`` its number among the results of the forward scan.
        fetch: the copy back, ``operand`` the number of the host array among the operands of the
            backward scan.
    """

    send: Op
    result: int
    fetch: Op
    operand: int

    @property
    def value(self) -> Value:
        """What is sent."""
        return self.send.values[0]


def one_ahead(forward: Op, backward: Op, simulator: Simulator | None = None) -> tuple[Op, Op]:
    """The two scans of a pair with their transfers one iteration apart from what needs them.

    The forward scan becomes one operation with pieces, as the arrays that its first iteration
    sends for nothing have to be made first.

    Args:
        forward: stacks what it sends.
        backward: fetches slices of that.
        simulator: tells how long operations and copies take; without one nothing is kept apart.
    """
    # Both in one direction: the backward scan of a rule that somebody wrote. What an iteration made
    # is then not what the next one back reads.
    opposite = _loop(forward).reverse != _loop(backward).reverse
    stays = _stays(forward, backward) if opposite else []
    if not stays:
        return forward, backward
    last = [stay.value.like() for stay in stays]
    slow = set() if simulator is None else _slow(_loop(forward).body, stays, simulator)
    return _forward(forward, stays, last, slow), _backward(backward, stays, last)


def _loop(op: Op) -> Loop:
    assert op.loop is not None
    return op.loop


def _stays(forward: Op, backward: Op) -> list[_Stay]:
    """Every residual that is sent, stacked, sliced and fetched once, and nothing else.

    Not those whose types say how they lie on a mesh: what is made here does not.
    """
    loop, back = _loop(forward), _loop(backward)
    sends = {op.outputs[0]: op for op in loop.body.ops if op.transfer == "send"}
    readers: dict[Value, list[Op]] = {}
    for op in back.body.ops:
        for value in op.values:
            readers.setdefault(value, []).append(op)
    given = Counter(v for v in backward.inputs if isinstance(v, Value))
    slices = {v: n for n, v in enumerate(backward.inputs) if isinstance(v, Value) and given[v] == 1}
    found = []
    for result in range(loop.num_carry, len(forward.outputs)):
        host, operand = loop.body.outputs[result], slices.get(forward.outputs[result])
        if operand is None or not isinstance(host, Value) or host not in sends:
            continue
        formal = back.body.inputs[operand]
        reading = readers.get(formal, [])
        alone = [op.transfer for op in reading] == ["fetch"] and formal not in back.body.outputs
        if alone and not is_typed(formal):
            found.append(_Stay(sends[host], result, reading[0], operand))
    return found


def _slow(body: Block, stays: list[_Stay], simulator: Simulator) -> set[Value]:
    """What is made again before the copy of the one before has left, the copies one by one."""
    seconds = simulator.seconds_of(body.inputs, body.ops, body.outputs)
    clock = itertools.accumulate(seconds)
    made = {v: now for op, now in zip(body.ops, clock, strict=True) for v in op.outputs}
    links = [simulator.rates.link_seconds("send", stay.value.nbytes) for stay in stays]
    left = itertools.accumulate(links)
    return {s.value for s, end in zip(stays, left, strict=True) if end > made.get(s.value, end)}


def _forward(op: Op, stays: list[_Stay], last: list[Value], slow: set[Value]) -> Op:
    loop, body = _loop(op), _loop(op).body
    carried = loop.num_consts + loop.num_carry
    before = [stay.value.like() for stay in stays]
    read = {v for o in body.ops for v in o.values} | {v for v in body.outputs if _is_value(v)}
    given = list(body.inputs)
    sliced = [n for n in range(carried, len(given)) if given[n] in read]
    # The values that operations read are what comes out of the barrier.
    held = [given[n] for n in sliced]
    for n in sliced:
        given[n] = given[n].like()
    leaving = [v.like() for v in before]
    sends = [stay.send for stay in stays]
    tag = sends[0].recompute
    ops = [
        Op(
            sends[0].eqn,
            (*before, *(given[n] for n in sliced)),
            (*leaving, *held),
            None,
            tag,
            barrier=True,
        )
    ]
    for send, value in zip(sends, leaving, strict=True):
        ops.append(Op(send.eqn, (value,), send.outputs, None, send.recompute, transfer="send"))
    ops += [o for o in body.ops if o not in sends]
    handed = [stay.value for stay in stays]
    for number, (value, left) in enumerate(zip(handed, leaving, strict=True)):
        if value in slow and may_be_kept_apart(value):
            more, handed[number] = kept_apart(value, left, sends[0].eqn)
            ops += more
    outputs = (
        *body.outputs[: loop.num_carry],
        *handed,
        *body.outputs[loop.num_carry :],
    )
    inputs = (*given[:carried], *before, *given[carried:])
    changed = replace(
        loop,
        body=Block(body.path, inputs, tuple(ops), outputs),
        num_carry=loop.num_carry + len(stays),
        rewritten=True,
    )
    firsts = [stay.value.like() for stay in stays]
    operands = (*op.inputs[:carried], *firsts, *op.inputs[carried:])
    results = (*op.outputs[: loop.num_carry], *last, *op.outputs[loop.num_carry :])
    scan = Op(op.eqn, operands, results, changed, op.recompute, origin=op.origin)
    line = (*(empty(first, op.eqn) for first in firsts), scan)
    formals = list(op.values)
    pieces = Block(body.path, tuple(formals), line, results)
    whole = replace(changed, pieces=pieces)
    return Op(op.eqn, formals, results, whole, op.recompute, origin=op.origin)


def _backward(op: Op, stays: list[_Stay], last: list[Value]) -> Op:
    loop, body = _loop(op), _loop(op).body
    carried = loop.num_consts + loop.num_carry
    fetches = [stay.fetch for stay in stays]
    following = [stay.fetch.outputs[0].like() for stay in stays]
    ops = [
        Op(fetch.eqn, fetch.inputs, (value,), None, fetch.recompute, transfer="fetch")
        for fetch, value in zip(fetches, following, strict=True)
    ]
    ops += [o for o in body.ops if o not in fetches]
    handed = [fetch.outputs[0] for fetch in fetches]
    inputs = (*body.inputs[:carried], *handed, *body.inputs[carried:])
    outputs = (*body.outputs[: loop.num_carry], *following, *body.outputs[loop.num_carry :])
    changed = replace(
        loop,
        body=Block(body.path, inputs, tuple(ops), outputs),
        num_carry=loop.num_carry + len(stays),
        rewritten=True,
    )
    operands = (*op.inputs[:carried], *last, *op.inputs[carried:])
    unread = [v.like() for v in last]
    results = (*op.outputs[: loop.num_carry], *unread, *op.outputs[loop.num_carry :])
    return Op(op.eqn, operands, results, changed, op.recompute, origin=op.origin)


def _is_value(atom: object) -> bool:
    return isinstance(atom, Value)
