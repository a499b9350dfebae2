"""What the compiler makes devices exchange for one operation, from how its arrays are split.

Where a product sums over a dimension that is split, each device has a part of every sum: they are
reduced, or reduced and scattered where the result is split along the same devices. An operand that
is split along devices which the operation needs for something else is gathered first. That is how
XLA's partitioner goes about it (Xu et al. 2021, "GSPMD"); it may find something cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxmem.program.collectives import Sent, gathering, reducing, scattering
from jaxmem.program.ir import Atom, Block, Op, Value, aval_bytes
from jaxmem.program.layout import Axis, Layout, size_of

_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax "
    "argmin".split()
)
_MATCHING = frozenset(["select_n", "clamp", "add_any"])
NOTHING = Sent(0.0, 0.0)


class Exchange(NamedTuple):
    """What an operation over several devices takes.

    Attributes:
        devices: how many share its arithmetic.
        share: bytes that a device reads and writes, over those of whole arrays.
        sent: by each device, in all its collectives.
        working_bytes: gathered operands, and parts of sums before they are scattered.
    """

    devices: int = 1
    share: float = 1.0
    sent: Sent = NOTHING
    working_bytes: int = 0

    @property
    def is_collective(self) -> bool:
        """Whether devices wait for each other."""
        return self.sent is not NOTHING


ALONE = Exchange()


class _Dimension(NamedTuple):
    """One index of an operation: the dimension it is of each operand, and of the result."""

    operands: tuple[int | None, ...]
    result: int | None


def exchange(op: Op) -> Exchange:
    """What ``op`` takes as its operands and results are split; nothing where none is.

    An operation that says itself what is exchanged (``shard_map``) is left to its own parts.
    """
    known = any(v.layout is not None for v in (*op.values, *op.outputs))
    if not known or op.barrier or op.transfer or op.loop is not None:
        return ALONE
    if op.eqn.primitive.name == "shard_map":
        return ALONE
    whole = sum(aval_bytes(v.aval) for v in (*op.values, *op.outputs))
    part = sum(v.part_bytes for v in (*op.values, *op.outputs))
    plain = Exchange(_devices(op), part / whole if whole else 1.0)
    dimensions = _dimensions(op)
    return plain if not dimensions else _exchanged(op, dimensions, plain)


def sent_bytes(block: Block) -> float:
    """What each device sends for a block, in all iterations of its loops."""
    return sum(
        exchange(op).sent.nbytes if op.loop is None else op.loop.length * sent_bytes(op.loop.body)
        for op in block.ops
    )


def _devices(op: Op) -> int:
    """Devices whose results differ; where nothing is known of sums that is who shares the work."""
    return max((size_of(_layout(v).all_axes) for v in op.outputs if v.layout), default=1)


def _exchanged(op: Op, dimensions: Sequence[_Dimension], plain: Exchange) -> Exchange:
    result = op.outputs[0]
    summed = _summed(op, dimensions)
    axes = frozenset().union(*summed)
    needed = _needed(op, dimensions, summed)
    sent, working = [], 0
    for value, layout in _gathered(op, dimensions, needed):
        nbytes = layout.part_bytes(value.aval)
        sent.append(gathering(nbytes, size_of(_layout(value).all_axes - layout.all_axes)))
        working += nbytes
    kept = _layout(result).all_axes
    if scattered := axes & kept:
        whole = result.part_bytes * size_of(scattered)
        sent.append(scattering(whole, size_of(scattered)))
        working += whole
    if reduced := axes - kept:
        sent.append(reducing(result.part_bytes, size_of(reduced)))
    together = frozenset().union(*needed)
    if not sent:
        return plain._replace(devices=size_of(together))
    total = Sent(sum(s.nbytes for s in sent), sum(s.seconds for s in sent))
    return plain._replace(devices=size_of(together), sent=total, working_bytes=working)


def gathered(op: Op) -> dict[Value, Layout]:
    """The operands of ``op`` that are gathered for it, and how they are split then."""
    dimensions = _dimensions(op) if any(v.layout is not None for v in op.values) else []
    if op.barrier or op.transfer or op.loop is not None or not dimensions:
        return {}
    return dict(_gathered(op, dimensions, _needed(op, dimensions, _summed(op, dimensions))))


def _summed(op: Op, dimensions: Sequence[_Dimension]) -> list[frozenset[Axis]]:
    """The axes along which each device has a part of every sum, for each dimension."""
    kept = _layout(op.outputs[0]).all_axes
    found = []
    for d in dimensions:
        pairs = zip(op.inputs, d.operands, strict=True)
        given = [_axes(v, at) for v, at in pairs if isinstance(v, Value) and at is not None]
        if d.result is not None or not given:
            found.append(frozenset[Axis]())
            continue
        both = frozenset.intersection(*given)
        # What one operand alone is split along costs the other nothing: it has all of it.
        found.append(both | (frozenset().union(*given) - kept))
    return found


def _needed(
    op: Op, dimensions: Sequence[_Dimension], summed: Sequence[frozenset[Axis]]
) -> list[frozenset[Axis]]:
    """The axes that each dimension is split along while the operation runs."""
    axes, result = frozenset().union(*summed), op.outputs[0]
    return [
        own if d.result is None else _axes(result, d.result) - axes
        for d, own in zip(dimensions, summed, strict=True)
    ]


def _gathered(
    op: Op, dimensions: Sequence[_Dimension], needed: Sequence[frozenset[Axis]]
) -> Iterator[tuple[Value, Layout]]:
    for place, value in enumerate(op.inputs):
        if not isinstance(value, Value) or value.layout is None:
            continue
        at = {d.operands[place]: its for d, its in zip(dimensions, needed, strict=True)}
        axes = value.layout.axes
        left = tuple(
            tuple(axis for axis in own if axis in at.get(n, own)) for n, own in enumerate(axes)
        )
        if left != axes:
            yield value, Layout(left)


def _layout(value: Value) -> Layout:
    return value.layout or Layout(((),) * len(getattr(value.aval, "shape", ())))


def _rank(atom: Atom) -> int:
    return len(getattr(atom.aval, "shape", ()))


def _axes(value: Value, dimension: int) -> frozenset[Axis]:
    return _layout(value).of(dimension)


def _dimensions(op: Op) -> list[_Dimension]:
    """The indices of an operation; none where its operands are split as its results are."""
    name = op.eqn.primitive.name
    if name in _RULES:
        return _RULES[name](op)
    if name in _REDUCTIONS:
        return _reduction(op)
    if len(op.outputs) != 1:
        return []
    shape = getattr(op.outputs[0].aval, "shape", None)
    shapes = [getattr(a.aval, "shape", None) for a in op.inputs]
    if name in _MATCHING or (shapes and all(s == shape for s in shapes)):
        return [
            _Dimension(tuple(n if s == shape else None for s in shapes), n)
            for n in range(len(shape or ()))
        ]
    return []


def _product(op: Op) -> list[_Dimension]:
    (left, right), (left_batch, right_batch) = op.eqn.params["dimension_numbers"]
    found = [_Dimension((a, b), None) for a, b in zip(left, right, strict=True)]
    place = 0
    for a, b in zip(left_batch, right_batch, strict=True):
        found.append(_Dimension((a, b), place))
        place += 1
    for side, taken in ((0, {*left, *left_batch}), (1, {*right, *right_batch})):
        for n in range(_rank(op.inputs[side])):
            if n not in taken:
                found.append(_Dimension((n, None) if side == 0 else (None, n), place))
                place += 1
    return found


def _convolution(op: Op) -> list[_Dimension]:
    numbers = op.eqn.params["dimension_numbers"]
    left, right, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    return [
        _Dimension((left[0], None), out[0]),
        _Dimension((left[1], right[1]), None),
        _Dimension((None, right[0]), out[1]),
    ]


def _reduction(op: Op) -> list[_Dimension]:
    gone = {*op.eqn.params["axes"]}
    rank = _rank(op.inputs[0])
    left = iter(range(rank))
    return [_Dimension((n,), None if n in gone else next(left)) for n in range(rank)]


def _transposition(op: Op) -> list[_Dimension]:
    return [_Dimension((n,), at) for at, n in enumerate(op.eqn.params["permutation"])]


def _looked_up(op: Op) -> list[_Dimension]:
    """Rows of a table: each device looks in its part of it, and what it has not is zero there."""
    numbers = op.eqn.params["dimension_numbers"]
    rank = _rank(op.inputs[0])
    indexed = {*numbers.start_index_map, *numbers.collapsed_slice_dims}
    whole = [n for n in range(rank) if n not in {*numbers.collapsed_slice_dims}]
    batching = {*getattr(numbers, "operand_batching_dims", ())}
    others = [n for n in whole if n not in batching]
    places = dict(zip(others, numbers.offset_dims, strict=True))
    found = [_Dimension((n, None), None) for n in sorted(indexed - batching)]
    return found + [_Dimension((n, None), at) for n, at in places.items() if n not in indexed]


_RULES: dict[str, Callable[[Op], list[_Dimension]]] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "transpose": _transposition,
    "gather": _looked_up,
}
