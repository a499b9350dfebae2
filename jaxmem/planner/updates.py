"""The order in which a line updates what lives in host memory.

An optimizer is written after the backward pass, one quantity at a time: all first moments, all
second moments, all updates. What waits in host memory would be copied there and back when nothing
is left to compute beside it. So an update runs as soon as its gradient is there, beside the rest of
the backward pass. That takes room before the gradient is there; where a budget lacks it, updates
run last, each array's together.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence

from jaxmem.program.ir import Atom, Op, Value
from jaxmem.program.primitives import Kind, kind_of


def by_result(ops: Sequence[Op], outputs: Sequence[Atom], until: int = 0) -> list[Op]:
    """``ops`` with what follows the last kernel in the order in which results need it.

    Each array's moments and update are then made together, and only a few arrays need to be on the
    device at once. What is before ``until`` stays where it is.
    """
    start = max(_after_kernels(ops), until)
    maker = _makers(ops[start:])
    ordered: dict[Op, None] = dict.fromkeys(ops[:start])
    for atom in outputs:
        ordered.update(dict.fromkeys(_needed(atom, maker, ordered)))
    return list(ordered | dict.fromkeys(ops))


def when_ready(
    ops: Sequence[Op],
    outputs: Sequence[Atom],
    hosted: Collection[Value],
    since: int = 0,
    until: int = 0,
) -> tuple[list[Op], list[tuple[int, list[Op]]]]:
    """``ops`` with updates of what is hosted as early as they can be, and these.

    An update is what a result is made of after the last kernel, where that reads anything hosted.
    It runs after the first kernel that follows all it needs: the gradient, and the last kernel that
    reads an argument which the update reads, as its result may take the argument's place.
    Everything else after the last kernel comes last, as :func:`by_result` has it; so does all of it
    where no kernel is left after any update, as where all gradients decide about each.

    Args:
        ops: a straight line.
        outputs: its results.
        hosted: inputs that live in host memory.
        since: nothing runs earlier than this position in ``ops``.
        until: what is before this position stays where it is.

    Returns:
        The operations; and of each update what runs for it, with the position in ``ops`` before
        which it is now, in order.
    """
    start = max(_after_kernels(ops), until)
    maker, ready = _makers(ops[start:]), _ready(ops, start, hosted)
    results = [(ready[v], n) for n, v in enumerate(outputs) if isinstance(v, Value) and v in ready]
    kernels = [n for n in range(since, start) if _is_kernel(ops[n])]
    updates: list[tuple[int, list[Op]]] = []
    moved: dict[int, list[Op]] = {}
    done: dict[Op, None] = {}
    for place, number in sorted(results):
        after = bisect.bisect_left(kernels, place)
        position = kernels[after] + 1 if after < len(kernels) else start
        made = _needed(outputs[number], maker, done)
        updates.append((position, made))
        moved.setdefault(position, []).extend(made)
        done.update(dict.fromkeys(made))
    if all(position == start for position, _ in updates):
        return by_result(ops, outputs, until), []
    ordered = [op for n in range(start) for op in (*moved.get(n, ()), ops[n])]
    ordered += moved.get(start, ())
    for atom in outputs:
        ordered += (made := _needed(atom, maker, done))
        done.update(dict.fromkeys(made))
    ordered += [op for op in ops[start:] if op not in done]
    return ordered, updates


def _is_kernel(op: Op) -> bool:
    return kind_of(op) is Kind.OPAQUE or bool(op.eqn.effects)


def _after_kernels(ops: Sequence[Op]) -> int:
    """The position after the last kernel that writes its result whatever reads it."""
    return next((n + 1 for n in range(len(ops) - 1, -1, -1) if _is_kernel(ops[n])), 0)


def _ready(ops: Sequence[Op], start: int, hosted: Collection[Value]) -> dict[Value, int]:
    """What is made from ``start`` on of anything hosted, and the last operation it waits for."""
    made = {v for op in ops[:start] for v in op.outputs}
    waits = {v: n for n, op in enumerate(ops[:start]) for v in op.values if v not in made}
    waits.update({v: n for n, op in enumerate(ops[:start]) for v in op.outputs})
    of_hosted = set(hosted)
    found: dict[Value, int] = {}
    for op in ops[start:]:
        waits.update(dict.fromkeys(op.outputs, max([waits.get(v, -1) for v in op.values] or [-1])))
        if not of_hosted.isdisjoint(op.values):
            of_hosted.update(op.outputs)
            found.update({v: waits[v] for v in op.outputs})
    return found


def _makers(ops: Sequence[Op]) -> dict[Value, Op]:
    return {v: op for op in ops for v in op.outputs}


def _needed(atom: Atom, maker: Mapping[Value, Op], done: Collection[Op]) -> list[Op]:
    """What of ``maker`` has to run to have ``atom`` and is not done, in order."""
    ordered: dict[Op, None] = {}
    stack = [maker[atom]] if isinstance(atom, Value) and atom in maker else []
    while stack:
        op = stack[-1]
        makers = [maker[v] for v in op.values if v in maker]
        missing = [m for m in makers if m not in done and m not in ordered]
        if missing:
            stack.extend(reversed(missing))
        else:
            ordered[stack.pop()] = None
    return [op for op in ordered if op not in done]
