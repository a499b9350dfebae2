"""Cut a step by its results: what needs nothing that waits on the host, then updates in parts.

An optimizer's update reads each leaf of its state once, late, and with little else. So the step
becomes a first part, which computes loss and gradients, and for each leaf that waits in host
memory a part of its own, which runs when that leaf has arrived. The parts are slices of the traced
program: whatever an optimizer does with each leaf, they do.

Where leaves meet only in small values (the norm of all updates, by which they are clipped), each
leaf has two parts, one before those are known and one after, and is fetched for both.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxmem.errors import CutError
from jaxmem.program.crossing import Crossing
from jaxmem.program.ir import Block, Hosting, Leaf, Op, Program, Value, kind_of_array
from jaxmem.program.keeping import Kept, keep
from jaxmem.program.lending import lend
from jaxmem.program.parts import Part, donating, lasting, layout_of, lined_up, state_among
from jaxmem.program.rowwise import Chunks, rows_at_once, rows_of
from jaxmem.program.spreading import count_inputs, layouts_of
from jaxmem.program.waiting import SMALL_BYTES, Waiting


@dataclass(frozen=True, eq=False)
class Cut:
    """A step that is cut.

    Attributes:
        program: the step.
        hosting: which of its inputs and results wait in host memory.
        first: the first part, a program of its own: it takes every argument that is on the device.
        sent: results of the first part that go to the host.
        parts: the others, in order.
        lent: for each input of the first part that is a leaf in host memory, that leaf.
        written: the step as it was given; in ``program`` stacks of gradients may have buffers.
        later: for what parts read in the place of such a stack the result that holds it.
        layouts: over several devices, how what is known before is split: what is on the host, the
            results, and gradients like the state that they update.
    """

    program: Program
    hosting: Hosting
    first: Program
    sent: tuple[Value, ...]
    parts: tuple[Part, ...]
    written: Program
    lent: Mapping[Value, Value] = field(default_factory=dict)
    later: Mapping[Value, Value] = field(default_factory=dict)
    layouts: Mapping[Value, Any] = field(default_factory=dict)

    @functools.cached_property
    def buffers(self) -> list[tuple[int, Value]]:
        """The leaves that the step keeps for itself, and the numbers of the results they become."""
        program, held = self.program, {*self.later.values()}
        numbered = [n for n, v in self.hosted_results if v in held]
        return [(n, program.block.inputs[program.places[n]]) for n in numbered]

    def paths_of(self, part: Part) -> list[str]:
        """The paths of the argument leaves that wait in host memory and ``part`` takes."""
        leaves = _leaves(self.written, range(len(self.written.arguments)))
        return [leaves[v] for v in part.leaves if v in leaves]

    @property
    def lent_bytes(self) -> int:
        """Bytes of leaves that wait on the host and that the first part reads."""
        return sum(v.nbytes for v in self.lent)

    @property
    def hosted_results(self) -> list[tuple[int, Value]]:
        """The results that go to the host, with their numbers."""
        outputs = self.program.block.outputs
        numbered = ((n, outputs[n]) for n in sorted(self.hosting.results))
        return [(n, v) for n, v in numbered if isinstance(v, Value)]

    @functools.cached_property
    def stay(self) -> frozenset[Value]:
        """Values that are of use on the device after they were sent."""
        read = {v for part in self.parts for v in part.reads}
        outputs, hosted = self.program.block.outputs, self.hosting.results
        here = {v for n, v in enumerate(outputs) if isinstance(v, Value) and n not in hosted}
        return frozenset(read | here)

    @property
    def returned_bytes(self) -> int:
        """Bytes of leaves that wait on the host and are results on the device as they are."""
        inputs = {self.program.block.inputs[n] for n in self.hosting.inputs}
        outputs = enumerate(self.program.block.outputs)
        return sum(
            v.nbytes
            for n, v in outputs
            if isinstance(v, Value) and v in inputs and n not in self.hosting.results
        )

    @property
    def fetched_bytes(self) -> int:
        """Bytes that come from the host in a step."""
        return sum(part.moved_bytes[0] for part in self.parts)

    @property
    def sent_bytes(self) -> int:
        """Bytes that go to the host in a step."""
        return sum(v.nbytes for v in self.sent) + sum(part.moved_bytes[1] for part in self.parts)


def cut(
    program: Program,
    hosted: Iterable[int],
    bucket_bytes: int = 0,
    whole_bytes: float = math.inf,
    *,
    keeping: bool = False,
) -> Cut:
    """Cut a step so that argument leaves may wait in host memory until they are updated.

    Args:
        program: the step.
        hosted: numbers of argument leaves that are donated and come back as results, or are read
            and stay as they are.
        bucket_bytes: leaves that are smaller are updated together, up to so many bytes.
        whole_bytes: an update that fetches more goes through its leaves some rows at a time,
            about ``bucket_bytes`` of each, where none of its rows needs others.
        keeping: stacks of gradients that all updates wait for wait in host memory, too.

    Raises:
        CutError: a leaf does not come back, or an effect needs one that waits; or there is no such
            stack, or it is not read by rows.
    """
    return _Cutter(program, frozenset(hosted), bucket_bytes, whole_bytes, keeping).cut()


def _leaves(program: Program, numbers: Iterable[int]) -> dict[Value, str]:
    """Argument leaves by their numbers, with their paths."""
    inputs = program.block.inputs[len(program.consts) :]
    return {inputs[n]: program.arguments[n].path for n in sorted(numbers)}


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part before it is known who reads what last.

    Attributes:
        leaf: the leaf that stands for those it updates; ``None`` for a joint.
        ready: how late in the step the last of what it is handed is made.
    """

    leaf: Value | None
    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    fetched: tuple[Value, ...]
    ready: int

    @property
    def fetched_bytes(self) -> int:
        return sum(v.nbytes for v in self.fetched)


class _Cutter:
    def __init__(
        self,
        program: Program,
        hosted: frozenset[int],
        bucket_bytes: int,
        whole_bytes: float = math.inf,
        keeping: bool = False,
    ):
        lent, self.written = lend(program, hosted), program
        self.bucket_bytes, self.whole_bytes, self.keeping = bucket_bytes, whole_bytes, keeping
        kept = Kept(lent.program)
        if keeping:
            kept = keep(lent.program, _leaves(lent.program, hosted), bucket_bytes + 1)
            hosted = hosted.union(kept.buffers)
        self.program, self.lent, self.later = kept.program, lent.leaves, kept.later
        program = kept.program
        count_inputs(program)
        self.hosting = program.hosting(hosted)
        self._check_returned(hosted)
        block = program.block
        paths = _leaves(program, hosted) | dict.fromkeys(kept.later, "gradients")
        self.buffers = {*_leaves(program, kept.buffers)}
        self.waiting = Waiting(program, paths, kept.totals)
        self.makers = {v: op for op in block.ops for v in op.outputs}
        self.at = {op: n for n, op in enumerate(block.ops)}
        self.resident = {v: n for n, v in enumerate(block.inputs) if v not in paths}
        self.crossing = Crossing(self.makers, self.resident)

    def _check_kept(self, parts: Iterable[Part]) -> None:
        """What holds gradients is written and read by rows: there may be no room for all of it."""
        if not self.later:
            raise CutError(f"{self.program.name}: no stack of gradients decides about all updates.")
        away = {*self.buffers, *self.later}
        if any(away.intersection(part.reads) and not part.chunks for part in parts):
            raise CutError(f"{self.program.name}: a row of an update needs all gradients.")

    def _check_returned(self, hosted: frozenset[int]) -> None:
        program = self.program
        consts, inputs, outputs = len(program.consts), program.block.inputs, program.block.outputs
        back = {position - consts for position in program.places.values()}
        fresh = {
            kind_of_array(v)
            for n, v in enumerate(outputs)
            if n not in program.places and isinstance(v, Value) and v not in inputs
        }
        lent = set(self.lent.values())
        for n in sorted(hosted - back):
            leaf, value = program.arguments[n], inputs[consts + n]
            # Read, and left as it is: by gradients, or by updates of others.
            if not leaf.donated and (value in lent or kind_of_array(value) not in fresh):
                continue
            why = "no result of that shape takes its place."
            if not leaf.donated:
                why = "it is not donated, so no result takes its place. See donate_argnums."
            raise CutError(f"{program.name} cannot keep {leaf.path} in host memory: {why}")

    def cut(self) -> Cut:
        waiting, block = self.waiting, self.program.block
        results = list(dict.fromkeys(v for v in block.outputs if isinstance(v, Value)))
        pieces = self._pieces([v for v in results if v in waiting and v not in waiting.hosted])
        handed = {v for p in pieces for v in p.inputs if v not in waiting and v in self.makers}
        first = self._first([v for v in self.makers if v in handed], pieces)
        numbers = sorted(self.hosting.results)
        hosted = {v for n in numbers if isinstance(v := block.outputs[n], Value)}
        line = [self._part(n, pieces, hosted) for n in range(len(pieces))]
        layouts = layouts_of(self.program, self.hosting, self.lent, line)
        first = replace(first, wanted=tuple(layout_of(layouts, v) for v in first.block.outputs))
        kept = {v for v in results if v not in hosted}
        parts = lined_up(line, kept, lasting(self.program), layouts)
        sent = tuple(v for v in results if v in hosted and v in first.block.outputs)
        if self.keeping:
            self._check_kept(parts)
        pieces = Cut(self.program, self.hosting, first, sent, parts, self.written)
        return replace(pieces, lent=self.lent, later=self.later, layouts=layouts)

    def _part(self, number: int, pieces: Sequence[_Piece], hosted: Collection[Value]) -> Part:
        piece = pieces[number]
        block = Block("", piece.inputs, piece.ops, piece.outputs)
        sent = tuple(v for v in piece.outputs if v in hosted)
        found = None
        if piece.fetched_bytes > self.whole_bytes and piece.leaf is not None:
            found = self._by_rows(piece, sent, pieces[number + 1 :])
        return found or Part(block, piece.inputs, piece.outputs, piece.fetched, sent)

    def _by_rows(
        self, piece: _Piece, sent: Sequence[Value], later: Sequence[_Piece]
    ) -> Part | None:
        """An update that goes through its leaves by rows, if it may write them where they are."""
        homes = self._homes(sent)
        if homes is None:
            return None
        # Some are only written: bfloat16 weights beside float32 masters.
        leaves = tuple(dict.fromkeys([*piece.fetched, *homes.values()]))
        handed = piece.inputs[len(piece.fetched) :]
        outputs = self.program.block.outputs
        # Others may still read what would be written over.
        busy = {self.lent.get(v, v) for p in later for v in p.inputs}
        results = [(n, a) for n, a in enumerate(outputs) if isinstance(a, Value)]
        here = {v for n, v in results if n not in self.hosting.results}
        if {*leaves} & {*busy, *(v for _, v in results)} or {*sent} & {*busy, *here}:
            return None
        # JAX lets results take donated buffers in order, whichever memory they are in: leaves come
        # first among the inputs, and so what takes their places is first.
        taking = {v: leaves.index(leaf) for v, leaf in homes.items()}
        made = tuple(sorted(piece.outputs, key=lambda v: taking.get(v, len(leaves))))
        block = Block("", (*leaves, *handed), piece.ops, made)
        rows = rows_of(block, leaves, sent)
        if rows is None:
            return None
        count = rows_at_once(rows, self.bucket_bytes * len(leaves))
        return Part(block, block.inputs, made, chunks=Chunks(rows, count, homes))

    def _homes(self, sent: Sequence[Value]) -> dict[Value, Value] | None:
        """The leaf whose place each result takes; ``None`` where that is not one for each."""
        program, homes = self.program, dict[Value, Value]()
        for n, position in program.places.items():
            value = program.block.outputs[n]
            if isinstance(value, Value) and value in sent and n in self.hosting.results:
                if value in homes:
                    return None
                homes[value] = program.block.inputs[position]
        whole = len(homes) == len(sent) == len(set(homes.values()))
        return homes if whole else None

    # --- pieces -----------------------------------------------------------------------------

    def _pieces(self, results: Sequence[Value]) -> list[_Piece]:
        """All pieces in the order in which they run.

        From the last to the first: what is joined, and of which leaves, follows from what is read.
        """
        waiting = self.waiting
        own = [v for v in results if not waiting.is_joint(v) and not self._is_held(v)]
        closing = [v for v in results if waiting.is_joint(v)]
        pieces = list(self._of_leaves(own))
        wanted = self._joints_of(pieces)
        while True:
            # What no leaf reads can be joined at the end, of what its last piece gives.
            early, closing = wanted.intersection(closing), [v for v in closing if v not in wanted]
            joint = [self._piece(closing, None)] if closing else []
            given = [v for piece in joint for v in piece.inputs if self._is_given(v)]
            pieces = [*self._of_leaves(dict.fromkeys([*own, *given])), *joint]
            wanted = early | (self._joints_of(pieces) - set(closing))
            if not self._joints_of(pieces[: len(pieces) - len(joint)]).intersection(closing):
                break
            wanted.update(self._joints_of(pieces))
        while wanted:
            wave = max(waiting[v].wave for v in wanted)
            now = {v for v in wanted if waiting[v].wave == wave}
            joined = self._piece([v for v in self.makers if v in now], None)
            before = list(self._of_leaves(v for v in joined.inputs if self._is_given(v)))
            pieces = [*before, joined, *pieces]
            wanted = wanted - now | self._joints_of([*before, joined])
        return [*self._holding(results, pieces), *pieces]

    def _holding(self, results: Sequence[Value], pieces: Sequence[_Piece]) -> list[_Piece]:
        """What writes gradients to their buffers, once, with what all others need of them."""
        needed = dict.fromkeys([*results, *(v for piece in pieces for v in piece.inputs)])
        groups: dict[Value | None, list[Value]] = {}
        for v in needed:
            if self._is_held(v):
                groups.setdefault(self.waiting[v].leaf, []).append(v)
        return [self._piece(wanted, leaf) for leaf, wanted in groups.items()]

    def _is_given(self, value: Value) -> bool:
        return self.waiting.is_given(value) and not self._is_held(value)

    def _is_held(self, value: Value) -> bool:
        """Whether ``value`` is made of gradients on their way to a buffer."""
        return self.waiting.is_given(value) and self.waiting[value].leaf in self.buffers

    def _joints_of(self, pieces: Iterable[_Piece]) -> set[Value]:
        return {v for piece in pieces for v in piece.inputs if self.waiting.is_joint(v)}

    def _of_leaves(self, outputs: Iterable[Value]) -> Iterator[_Piece]:
        """A piece for each leaf, or for several that are small, in the order of their gradients."""
        groups: dict[Value | None, list[Value]] = {}
        for value in outputs:
            groups.setdefault(self.waiting[value].leaf, []).append(value)
        pieces = [self._piece(wanted, leaf) for leaf, wanted in groups.items()]
        together: list[_Piece] = []
        for piece in sorted(pieces, key=lambda piece: piece.ready):
            filled = sum(p.fetched_bytes for p in together) + piece.fetched_bytes
            if together and filled > self.bucket_bytes:
                yield self._merged(together)
                together = []
            together.append(piece)
        if together:
            yield self._merged(together)

    def _merged(self, pieces: Sequence[_Piece]) -> _Piece:
        if len(pieces) == 1:
            return pieces[0]
        return self._piece([v for p in pieces for v in p.outputs], pieces[0].leaf)

    def _piece(self, wanted: Sequence[Value], leaf: Value | None) -> _Piece:
        """What computes ``wanted`` from leaves, what was joined and what the first part gives."""
        waiting = self.waiting
        wave, outputs = max(waiting[v].wave for v in wanted), set(wanted)

        def stops(value: Value) -> bool:
            if value in outputs:
                return False
            if value not in waiting or value in waiting.hosted:
                return True
            small = value.nbytes <= SMALL_BYTES
            if leaf is None and waiting.is_joint(value):
                return small and waiting[value].wave < wave
            return small and waiting.is_joint(value) if leaf is not None else True

        ops, borders = self._slice(wanted, stops)
        again = self.crossing.made_again(v for v in borders if v not in waiting)
        ordered = tuple(sorted({*ops, *again}, key=self.at.__getitem__))
        made = {v for op in ordered for v in op.outputs}
        read = list(dict.fromkeys(v for op in ordered for v in op.values if v not in made))
        fetched = tuple(v for v in read if v in waiting.hosted or v in self.lent)
        handed = tuple(v for v in read if v not in fetched)
        early = [self.at[self.makers[v]] for v in handed if v in self.makers]
        ready = max(early, default=-1)
        return _Piece(leaf, ordered, (*fetched, *handed), tuple(wanted), fetched, ready)

    def _slice(
        self, wanted: Iterable[Value], stops: Callable[[Value], bool]
    ) -> tuple[set[Op], list[Value]]:
        """The operations that ``wanted`` needs, back to where it stops, and what is read there."""
        ops: set[Op] = set()
        borders: dict[Value, None] = {}
        open_ends = list(wanted)
        while open_ends:
            value = open_ends.pop()
            if stops(value):
                borders[value] = None
            elif (op := self.makers[value]) not in ops:
                ops.add(op)
                open_ends += op.values
        return ops, list(borders)

    # --- the first part, and who reads last ---------------------------------------------------

    def _first(self, handed: Sequence[Value], pieces: Sequence[_Piece]) -> Program:
        """The first part: results that need no hosted leaf, then what is handed on."""
        program, block = self.program, self.program.block
        results = [
            (atom, leaf)
            for atom, leaf in zip(block.outputs, program.results, strict=True)
            if not (isinstance(atom, Value) and atom in self.waiting)
        ]
        given = [atom for atom, _ in results if isinstance(atom, Value)]
        effects = [op for op in block.ops if op.eqn.effects]
        read_by_effects = [v for op in effects for v in op.values]
        ops, _ = self._slice(
            [*given, *handed, *read_by_effects], lambda value: value in self.resident
        )
        ops.update(effects)
        more = [v for v in handed if v not in given]
        consts, layouts = len(program.consts), program.layouts()
        positions = list(self.resident.values())
        numbers = [n - consts for n in positions if n >= consts]
        paths = "\n".join(self.waiting.hosted.values())
        digest = hashlib.sha256(f"{program.fingerprint}\n{paths}".encode()).hexdigest()[:16]
        whole = replace(
            program,
            block=Block(
                path="",
                inputs=tuple(block.inputs[n] for n in positions),
                ops=tuple(op for op in block.ops if op in ops),
                outputs=(*(atom for atom, _ in results), *more),
            ),
            arguments=tuple(program.arguments[n] for n in numbers),
            results=(*(leaf for _, leaf in results), *(Leaf(f"handed on: {v.key}") for v in more)),
            fingerprint=digest,
            shardings=tuple(layouts[consts + n] for n in numbers),
            state=state_among(program, numbers),
        )
        return donating(whole, {v for piece in pieces for v in piece.inputs})
