"""Which values are real buffers once XLA has fused the element-wise work.

A value that only element-wise operations and reductions read is computed inside their kernels
and has no bytes; what it stands on (its roots) must stay alive instead. FACTS section 2: 32 GiB
of traced residuals are 17 GiB for XLA.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxmem.program.demand import Demand, demand_of
from jaxmem.program.ir import Atom, Op, Value
from jaxmem.program.passing import read_in_passing, summed_where_made
from jaxmem.program.primitives import CONVOLUTION, RESHAPES, Kind
from jaxmem.program.stacking import made_first, stacked_twice
from jaxmem.program.together import Kernels
from jaxmem.program.weighing import Costly, Weighing

# A fused kernel takes a limited number of operands; past that XLA writes a buffer.
_MOST_ROOTS = 8
# Several readers share one buffer instead of each recomputing it when reading its roots again
# would move clearly more bytes than reading the buffer (the residual stream of a transformer).
SHARING_RATIO = 1.5
# These read as much of their first operand as they return.
_SLICING = frozenset(["dynamic_slice", "gather", "slice", "split", "unstack"])
# Operations whose result is read or written in another order than their operands: a kernel cannot
# write over an operand that it reads through one of them. The gradient of a GPT's logits is padded
# and does not take the logits' place: 1.5 GiB of 50,304 words.
_MOVING = frozenset(
    "broadcast_in_dim concatenate dynamic_slice gather pad rev slice split stack tile "
    "unstack".split()
)


@dataclass(frozen=True)
class Fusion:
    """The buffers behind every value of one straight line of operations.

    Attributes:
        roots: for each value, the buffers that must be live to have it; ``(value,)`` for a buffer.
        kinds: the kind of each operation, by position.
        made: the buffers that each operation writes, by position.
        parts: for values that are computed from parts of buffers, the bytes read of each buffer.
        spared: the buffers whose place results of an operation cannot take, by position: it reads
            them in another order than it writes, as they are fetched, or behind a landing.
        passed: for reductions, the buffers that a kernel they are part of reads or makes anyway.
        at: the operation in whose place the kernel of each operation runs, by position.
        early: buffers that are there from the first operation on, whichever fills them.
    """

    roots: dict[Value, tuple[Value, ...]]
    kinds: tuple[Kind, ...]
    made: tuple[tuple[Value, ...], ...]
    spared: tuple[tuple[Value, ...], ...]
    parts: dict[Value, dict[Value, int]] = field(default_factory=dict)
    passed: dict[Op, frozenset[Value]] = field(default_factory=dict)
    at: tuple[int, ...] = ()
    early: Collection[Value] = frozenset()

    def is_buffer(self, value: Value) -> bool:
        """Whether ``value`` has bytes of its own."""
        roots = self.roots[value]
        return len(roots) == 1 and roots[0] is value

    def fewer_bytes(self, op: Op) -> int:
        """Bytes of the results of a kernel of its own that are written in fewer."""
        if op.name != "dot_general":
            return 0
        return sum([v.nbytes - sum([r.nbytes for r in self.roots[v]]) for v in op.outputs])

    def moved_bytes(self, op: Op) -> int:
        """Bytes that ``op`` reads of the buffers behind its operands, and writes."""
        written = sum([v.nbytes for v in op.outputs])
        passed = self.passed.get(op, frozenset())
        parts = _parts(op, self.roots, self.parts)
        if parts is not None:
            return written + sum([n for root, n in parts.items() if root not in passed])
        read = {r for v in op.values for r in self.roots[v]}
        return written + sum([r.nbytes for r in read - passed])


def fuse(
    inputs: Sequence[Value],
    ops: Sequence[Op],
    outputs: Sequence[Atom],
    *,
    barriers_keep: bool = False,
    stacks_at_once: bool = False,
    tuples: bool = False,
    closely: bool = False,
    weighing: Weighing | None = None,
) -> Fusion:
    """Decide for every value of ``ops`` whether it is a buffer.

    Args:
        inputs: what the line is given.
        ops: the line.
        outputs: what it returns.
        barriers_keep: nothing is written over what comes from behind a barrier of the program's, or
            waited for a copy in one.
        stacks_at_once: what several loops stack that stack alike is made before all else.
        tuples: as XLA:GPU has it, nothing is written over what convolutions give, which are tuples,
            products that are only rounded are written so, and what a loop stacks twice is one.
        closely: the line is written out as it is compiled, so that what XLA makes of several
            operations together is looked at as well: kernels that run in the place of an earlier
            one, paddings that are undone, axes that are taken apart, numbers that are widened
            where they are read.
        weighing: what is weighed where results cost much to compute; ``None`` for nothing.
            Bodies of loops, which are not looked at closely, are weighed, too.
    """
    demand = demand_of(ops, outputs, closely=closely, tuples=tuples, weighing=weighing)
    roots: dict[Value, tuple[Value, ...]] = {value: (value,) for value in inputs}
    made: list[tuple[Value, ...]] = []
    parts: dict[Value, dict[Value, int]] = {}
    moved: dict[Value, tuple[Value, ...]] = {}
    views: set[Value] = set()
    spared: list[tuple[Value, ...]] = []
    for op, kind in zip(ops, demand.kinds, strict=True):
        written: tuple[Value, ...] = ()
        away = _moved(op, kind, roots, moved, demand.sides)
        if kind is Kind.FUSED or op in demand.added:
            written = _computed(op, demand, roots, parts)
        elif kind is Kind.ALIAS:
            written = _renamed(op, roots, demand.same.get(op))
            if op.name in RESHAPES:
                views.update(op.outputs)
            if parts:
                parts.update(_parts_renamed(op, roots, parts))
        else:
            filled = _filled_in_place(op) | (stacked_twice(op) if tuples else {})
            made_here = [v for v in op.outputs if v not in filled]
            written = tuple([demand.narrowed.get(v, v) for v in made_here])
            roots.update({v: (root,) for v, root in zip(made_here, written, strict=True)})
            roots.update({result: roots[array] for result, array in filled.items()})
        made.append(written)
        spared.append(away)
        # XLA:GPU's kernels give a tuple for a convolution: the result and a workspace.
        if away or op.barrier or op.transfer or (tuples and op.name == CONVOLUTION):
            moved.update(_handed_on(op, roots, moved, (written, away), views, barriers_keep))
        moved.update({v: written for v in op.outputs if v in demand.sides})
    reducing = Kind.REDUCE in demand.kinds
    passed = read_in_passing(ops, demand.kinds, roots, made, demand.sides) if reducing else {}
    at = tuple(range(len(ops)))
    early = frozenset(made_first(ops) if stacks_at_once else ())
    fusion = Fusion(roots, demand.kinds, tuple(made), tuple(spared), parts, passed, at, early)
    if not closely:
        return fusion
    return _put_together(fusion, ops, outputs, demand.kept.written, demand.whole)


def _put_together(
    fusion: Fusion,
    ops: Sequence[Op],
    outputs: Sequence[Atom],
    beside: Collection[Value],
    whole: bool,
) -> Fusion:
    """With what XLA makes of several kernels; ``beside`` are what it keeps as it costs much.

    Where the line is not ``whole``, as it recomputes or moves something, very large sums are taken
    to be where what they read is made, and convolutions to add nothing up. That is not so, and
    makes up for gaps that XLA leaves there: of six such programs of a 3D U-Net five came to 0.992
    to 0.999 of what they compile to, and with both 0.915 to 0.999. As written it is 1.000 with
    both, and 1.034 without.
    """
    roots, spared = fusion.roots, list(fusion.spared)
    kernels = Kernels.of(ops, fusion.kinds, roots, fusion.made, beside)
    kept = {root for v in outputs if isinstance(v, Value) for root in roots[v]}
    at = kernels.runs_at(kept)
    passed = summed_where_made(fusion.passed) if whole else fusion.passed
    in_tuples = kernels.in_tuples(at, passed)
    for index, op in enumerate(ops):
        if fusion.made[index] and not in_tuples.isdisjoint(kernels.reads[index]):
            found = [root for root in _merged(op, roots) if root in in_tuples]
            spared[index] = (*spared[index], *found)
    for index in kernels.reduced_twice(passed):
        spared[index] = _merged(ops[index], roots)
    return replace(fusion, spared=tuple(spared), at=at)


def _handed_on(
    op: Op,
    roots: Mapping[Value, tuple[Value, ...]],
    moved: Mapping[Value, tuple[Value, ...]],
    found: tuple[tuple[Value, ...], tuple[Value, ...]],
    views: Collection[Value],
    barriers_keep: bool,
) -> dict[Value, tuple[Value, ...]]:
    """What of the buffers behind each result its readers cannot write over.

    ``found`` are the buffers that ``op`` writes, and those it cannot write over itself; ``views``
    what reshapes made.
    """
    if op.transfer == "fetch" or op.name == CONVOLUTION:
        return {v: roots[v] for v in op.outputs}
    if op.barrier:
        given = [(r, v) for r, v in zip(op.inputs, op.outputs, strict=True) if isinstance(r, Value)]
        counts = not op.recompute or any(r.host for r, _ in given)
        kept = {v: roots[v] for r, v in given if (barriers_keep and counts) or r in views}
        return {v: moved[r] for r, v in given if r in moved} | kept
    written, away = found
    return {v: away for v in op.outputs if not any(root in written for root in roots[v])}


def _computed(
    op: Op,
    demand: Demand,
    roots: dict[Value, tuple[Value, ...]],
    parts: dict[Value, dict[Value, int]],
) -> tuple[Value, ...]:
    """Note what is behind the results of ``op``, which is fused; those that are buffers."""
    written: tuple[Value, ...] = ()
    merged = _merged(op, roots)
    some = _parts(op, roots, parts)
    readers = {} if op in demand.widening else demand.readers
    for result in op.outputs:
        if result in demand.demanded or _is_shared(result, merged, readers, demand.kept):
            buffer = demand.kept.buffers.get(result, result)
            written = (*written, buffer)
            roots[buffer] = roots[result] = (buffer,)
            continue
        if some is not None:
            parts[result] = some
        roots[result] = merged
    return written


def _is_shared(
    result: Value, merged: Sequence[Value], readers: Mapping[Value, int], kept: Costly
) -> bool:
    """Whether XLA writes a fused result, rather than have each reader read what it is made of."""
    if len(merged) > _MOST_ROOTS:
        return True
    if readers.get(result, 0) <= 1 or kept.read_once(result, merged):
        return False
    return sum([kept.nbytes(root) for root in merged]) > SHARING_RATIO * result.nbytes


def _moved(
    op: Op,
    kind: Kind,
    roots: dict[Value, tuple[Value, ...]],
    moved: dict[Value, tuple[Value, ...]],
    sides: Mapping[Value, Value],
) -> tuple[Value, ...]:
    """The buffers that ``op`` reads, or what is fused into it does, and cannot write over.

    XLA:GPU never writes over a copy from the host, nor, before jax 0.12, over an operand that comes
    from behind a barrier: an Adam update of 64 MiB leaves that wait on the host takes 552 MiB, and
    472 if it did (absent H200, jax 0.10.2 and 0.11.2). The program's own barriers count, and of
    those that schedules add the landings, which hold copies: with all of them, what is recomputed
    was predicted no nearer (eight products of 4096, six programs: 0.2 to 10.6% off, and 1.1 to 5%
    without), and in half of its memory such a chain was predicted to take 5% longer. What went
    through a barrier as another shape is never written over.
    """
    if kind is Kind.OPAQUE or op.barrier or op.transfer:
        return ()
    found = [root for v in op.values if v in moved for root in moved[v]]
    if op.name in _MOVING or (kind is Kind.FUSED and op.name in RESHAPES):
        found += [root for v in op.values for root in roots[v]]
    if sides and (convolved := sides.get(op.outputs[0])):
        found.remove(convolved)
    return tuple(dict.fromkeys(found)) if found else ()


def _parts(
    op: Op, roots: dict[Value, tuple[Value, ...]], parts: dict[Value, dict[Value, int]]
) -> dict[Value, int] | None:
    """Bytes that ``op`` reads of each buffer; ``None`` where it reads all of them whole."""
    slicing = op.name in _SLICING
    if not slicing and not (parts and any(v in parts for v in op.values)):
        return None
    read: dict[Value, int] = {}
    taken = sum(_elements(v) for v in op.outputs) if slicing else 0
    for place, value in enumerate(op.values):
        known = parts.get(value)
        for root in roots[value]:
            nbytes = root.nbytes if known is None else known[root]
            if slicing and place == 0:
                nbytes = min(nbytes, taken * _itemsize(root))
            read[root] = min(root.nbytes, read.get(root, 0) + nbytes)
    return read


def _parts_renamed(
    op: Op, roots: dict[Value, tuple[Value, ...]], parts: dict[Value, dict[Value, int]]
) -> dict[Value, dict[Value, int]]:
    """What an alias of values in ``parts`` reads, where it is no buffer of its own."""
    if op.barrier:
        pairs = list(zip(op.inputs, op.outputs, strict=True))
    else:
        pairs = [(op.inputs[0], result) for result in op.outputs]
    return {
        result: parts[source]
        for source, result in pairs
        if isinstance(source, Value) and source in parts and roots[result] == roots[source]
    }


def _elements(value: Value) -> int:
    return value.nbytes // _itemsize(value) if value.nbytes else 0


def _itemsize(value: Value) -> int:
    return value.aval.dtype.itemsize if value.nbytes else 0


def _filled_in_place(op: Op) -> dict[Value, Value]:
    """The whole arrays that a loop returns filled, each with the one it was given to fill."""
    loop = op.loop
    if loop is None or not loop.filled:
        return {}
    given = op.inputs[loop.num_consts :][: loop.num_carry]
    first = loop.num_carry - loop.filled
    pairs = zip(op.outputs[first : loop.num_carry], given[first:], strict=True)
    return {result: array for result, array in pairs if isinstance(array, Value)}


def _renamed(
    op: Op, roots: dict[Value, tuple[Value, ...]], same: Value | None
) -> tuple[Value, ...]:
    """Note what is behind the results of an alias; the results that are buffers all the same."""
    written: tuple[Value, ...] = ()
    for position, result in enumerate(op.outputs):
        source = same or op.inputs[position if op.barrier else 0]
        if isinstance(source, Value):
            # A send reads its operand until something waits for it: a barrier, behind which the
            # copy on the host stands on its own.
            roots[result] = (result,) if op.barrier and result.host else roots[source]
        else:
            roots[result] = (result,)
            written = (*written, result)
    return written


def _merged(op: Op, roots: dict[Value, tuple[Value, ...]]) -> tuple[Value, ...]:
    if len(op.values) == 1:
        return roots[op.values[0]]
    return tuple(dict.fromkeys([root for value in op.values for root in roots[value]]))
