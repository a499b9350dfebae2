"""Loop bodies of a schedule that are the same program, of which XLA keeps one."""

from __future__ import annotations

from collections.abc import Iterator

from jaxmem.program.ir import Atom, Block, Value


def named_alike(block: Block) -> dict[str, set[str]]:
    """For every recomputation inside loops those in its place where the iterations are the same.

    Two nets of one form have equal backward loops. XLA keeps one of their bodies, with its names:
    the other's recomputations run under these.
    """
    groups: dict[tuple, list[list[str]]] = {}
    for body in _bodies(block):
        names: list[str] = []
        groups.setdefault(_form(body, names), []).append(names)
    found: dict[str, set[str]] = {}
    for alike in groups.values():
        for place in zip(*alike, strict=True):
            for name in place:
                found.setdefault(name, set()).update(place)
    return found


def _bodies(block: Block) -> Iterator[Block]:
    for op in block.ops:
        if op.loop is not None:
            yield op.loop.body
            yield from _bodies(op.loop.body)


def _form(body: Block, names: list[str]) -> tuple:
    """What a body computes, with values by number; its recomputations are added to ``names``."""
    numbers: dict[Value, int] = {}

    def of(atom: Atom) -> tuple:
        if isinstance(atom, Value):
            return numbers.setdefault(atom, len(numbers)), str(atom.aval)
        return "", str(atom)

    form: list[tuple] = [tuple(map(of, body.inputs))]
    for op in body.ops:
        reads, makes = tuple(map(of, op.inputs)), tuple(map(of, op.outputs))
        names.append(op.recompute)
        if op.loop is not None:
            how = vars(op.loop) | {"body": _form(op.loop.body, names)}
            inside = tuple((key, how[key]) for key in sorted(how.keys() - {"pieces"}))
        else:
            # As text, in which programs that are parameters are written out.
            inside = str(sorted(op.eqn.params.items(), key=lambda item: item[0]))
        form.append((op.name, op.barrier, op.transfer, bool(op.recompute), reads, makes, inside))
    form.append(tuple(map(of, body.outputs)))
    return tuple(form)
