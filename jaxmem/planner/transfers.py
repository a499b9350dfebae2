"""Write out one straight line of operations of which some values wait in host memory.

A value that is offloaded across a turn is sent to the host after it is made and fetched before
its first use after the turn. What XLA:GPU needs to really do so in a straight line, each seen on
an absent H200 with jax 0.10.2 and 0.12.0 (6 layers of 32 MiB, all offloaded; 224 MiB without):

- Without a barrier between send and fetch it cancels the two: 256 MiB, nothing on the host.
- With a barrier on the host copy at the fetch it sends, but late, because nothing needs the copy
  before the fetch: the originals stay, 320 MiB. So a second barrier, the landing, makes what is
  computed next wait for the copy: the original dies there.
- The results that are ready when something is fetched wait in the same barrier, for otherwise
  weight gradients are put off and hold the fetched copies: 320 MiB again; with it 128 MiB.

Inside the two scans of a pair none of this is needed: a stacked host buffer is written and read
slice by slice (680 MiB of which 512 are offloaded: 176 MiB), with the loop's own counter.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxmem.errors import ArgumentError
from jaxmem.planner.facts import Facts, kept_name
from jaxmem.planner.level import MOST_YOUNG, Level, Turns
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Atom, Block, Hosting, Op, Value
from jaxmem.program.primitives import Kind, kind_of

# Chosen, not measured: one copy on its link while the one before it is used. Counted in bytes, as
# so many times the largest copy: small ones do not fill the device.
MOST_ON_THE_WAY = 4
# Bytes: smaller arrays are not worth a copy of their own.
FEWEST_MOVED = 2**18


@dataclass(frozen=True)
class Windows:
    """When the transfers of a line run.

    Attributes:
        land: for each operation, the values whose copies must be on the host after it.
        fetch: for each operation, the values that start to come back before it.
    """

    land: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)
    fetch: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """What of a line is in host memory, and when.

    Attributes:
        across: for each turn the values that cross it in host memory.
        hosted: inputs that live there; they are fetched, and after each turn fetched again.
        returned: numbers of the results that are returned there.
    """

    across: Mapping[int, frozenset[Value]]
    hosted: frozenset[Value] = frozenset()
    returned: frozenset[int] = frozenset()


def movable(facts: Facts, turn: int) -> dict[str, list[Value]]:
    """What may cross ``turn`` in host memory, by name; it need not be repeatable.

    What has no bytes, is returned, or is a number that the compiler knows may be named and is not
    moved.
    """
    found: dict[str, list[Value]] = {}
    returned = {v for v in facts.block.outputs[facts.carried :] if isinstance(v, Value)}
    for value in facts.carries:
        found[str(value.key)] = [] if value in returned else [value]
    for op in facts.ops[:turn]:
        for value in op.outputs:
            named = found.setdefault(kept_name(op, value), [])
            if value.nbytes and value not in facts.numbers and value not in returned:
                named.append(value)
    return found


class TransferLevel(Level):
    """A line with transfers; everything else is as in :class:`Level`.

    Attributes:
        home: results that are returned in host memory.
        leaves: the values that are sent to the host.
        away: those that are there now and must be fetched to be read.
        sent: the copy in host memory of each.
        fetched: every fetch, and the operation before which it was written out.
        due: what should be on the host by now, and nothing waits for that yet.
        bounds: how many operations were written out when each of the line's was.
    """

    def __init__(
        self, facts: Facts, turns: Turns, moved: Moved, windows: Windows, *, barriers: bool
    ):
        super().__init__(facts, turns, barriers=barriers, host=False)
        self.moved, self.windows = moved, windows
        outputs = facts.block.outputs
        results = {outputs[n] for n in moved.returned}
        self.home = {v for v in results if isinstance(v, Value)} - moved.hosted
        self.leaves = self.home.union(*moved.across.values())
        self.turns = [
            (turn, since, [*dropped, *(v for v in self._away_at(turn) if v not in dropped)])
            for turn, since, dropped in self.turns
        ]
        self.leaving = {v for _, _, values in self.turns for v in values}
        self.sent: dict[Value, Value] = {v: v.on_host() for v in moved.hosted}
        self.given = tuple([self.sent.get(v, v) for v in facts.block.inputs])
        self.inputs = frozenset(self.given)
        self.returned = {v for v in outputs if isinstance(v, Value)} - self.home
        self.away: set[Value] = set()
        self.fetched: list[tuple[Value, int]] = []
        self.due: list[Value] = []
        self.bounds: list[int] = []
        self._absent(moved.hosted)

    def _away_at(self, turn: int) -> list[Value]:
        """What crosses ``turn`` in host memory, in program order."""
        made = self.facts.made
        moved = self.moved.across.get(turn, frozenset()) | self.moved.hosted
        return sorted(moved, key=lambda v: (made.get(v, -1), str(v.key)))

    def _absent(self, values: Iterable[Value]) -> None:
        for known in (self.away, self.gone, self.dropped, self.touched):
            known.update(values)

    def run(self) -> tuple[Block, int]:
        """The written-out block, and how many operations come before its first turn."""
        block, cut = super().run()
        carried = self.facts.carried
        outputs = [
            atom if number < carried else self._result(number, atom)
            for number, atom in enumerate(block.outputs)
        ]
        unread = {self.sent[v] for v in self.leaves & self.sent.keys() - set(self._leaving())}
        ops = [op for op in self.emitted if not (op.transfer == "send" and op.outputs[0] in unread)]
        cut -= sum(op.transfer == "send" and op.outputs[0] in unread for op in self.emitted[:cut])
        return Block(block.path, self.given, tuple(ops), tuple(outputs)), cut

    def _leaving(self) -> list[Value]:
        """What is sent and fetched or returned, in the order in which it is made."""
        came_back = {v for v, _ in self.fetched}
        return sorted((self.leaves & came_back) | self.home, key=self._position)

    def _result(self, number: int, atom: Atom) -> Atom:
        if not isinstance(atom, Value):
            return atom
        original = self.facts.block.outputs[number]
        assert isinstance(original, Value)
        if number in self.moved.returned:
            if original not in self.sent:
                self._send(original, self.ops[-1])
            return self.sent[original]
        if original in self.away and original in self.gone:
            self._fetch([original], len(self.ops), self.ops[-1])
        return self._now(original)

    def _early(self, first_turn: int) -> None:
        """What comes before the first turn, with its transfers."""
        for value in self.inputs & self.leaves:
            self._send(value, self.ops[0])
        for index in range(first_turn):
            self._emit_late(index, self.ops[index])
        self._note(first_turn)
        # XLA puts off what only the caller reads, such as the loss, and with it what it is made of.
        last = {v: reads[-1] for v, reads in self.facts.readers.items()}
        self.pending = [
            v for v in self.pending if v in self.returned and last.get(v, -1) < first_turn
        ]
        self.young = []

    def _pass(self, turn: int, dropped: Sequence[Value]) -> None:
        early = set() if self.turn else set(self.late)
        super()._pass(turn, dropped)
        if self.barriers:
            # What waited for a landing was not read by anything late yet.
            early &= {v for _, v, at in self.facts.droppable if at < turn}
            self.fresh.update(early - self.dropped)
        self.away.difference_update(dropped)
        self.away.update(self._away_at(turn))

    def _emit_late(self, index: int, op: Op) -> None:
        self._fetch(self.windows.fetch.get(index, ()), index, op)
        super()._emit_late(index, op)
        for value in op.outputs:
            if value in self.leaves:
                self._send(value, op)
        self._land(self.windows.land.get(index, ()), index, op)
        self.bounds.append(len(self.emitted))

    def _tag(self) -> str:
        place = self.facts.block.path.replace("/", "_") or "step"
        return f"jaxmem.offload.{place}.{next(self.numbers)}"

    def _send(self, value: Value, op: Op) -> None:
        self.sent[value] = value.on_host()
        copy = (self.sent[value],)
        now = self._now(value)
        self.emitted.append(Op(op.eqn, (now,), copy, None, self._tag(), transfer="send"))

    def _land(self, values: Sequence[Value], index: int, op: Op) -> None:
        """Make what is computed next wait until ``values`` are on the host.

        Where nothing computed next reads a buffer, the next transfer back waits for them.
        """
        self.due.extend(values)
        anchor = self._anchor(index + 1) if self.due else []
        if anchor:
            self._landed(op, [], anchor, self._tag())

    def _landed(self, op: Op, values: Sequence[Value], waited: Sequence[Value], tag: str) -> None:
        """A barrier that holds the copies of ``values``, and those that are due."""
        held, self.due = list(dict.fromkeys([*self.due, *values])), []
        behind = self._barrier(op, [self.sent[v] for v in held], waited, tag)
        self.sent.update({v: behind[self.sent[v]] for v in held})

    def _made_again(self, positions: Sequence[int]) -> int:
        """Fused values count too: where room for copies is needed more is written out early."""
        return sum([v.nbytes for p in positions for v in self.ops[p].outputs])

    def _rebuild(self, missing: Sequence[Value], index: int, use: Op) -> None:
        self._fetch(self._from_host(missing), index, use)
        left = [v for v in missing if v in self.gone]
        if left:
            super()._rebuild(left, index, use)

    def _from_host(self, missing: Sequence[Value]) -> list[Value]:
        """What must be fetched to have ``missing``, to read it or to make it again from it."""
        found: dict[Value, None] = {}
        seen: set[int] = set()
        stack = list(reversed(missing))
        while stack:
            value = stack.pop()
            if value in self.away:
                found[value] = None
            elif self.facts.made[value] not in seen:
                seen.add(self.facts.made[value])
                op = self.ops[self.facts.made[value]]
                stack.extend([v for v in reversed(op.values) if v in self.gone])
        return list(found)

    def _fetch(self, values: Sequence[Value], index: int, use: Op) -> None:
        """Bring ``values`` back, not before what was made last."""
        values = [v for v in values if v in self.gone and v in self.away]
        if not values:
            return
        tag = self._tag()
        if self.barriers:
            waited = dict.fromkeys(self._finished(index, sum([v.nbytes for v in values])))
            waited.update(dict.fromkeys(self._trigger(index, use) or self._anchor(index)))
            self._landed(use, values, list(waited), tag)
        for value in values:
            copy = value.on_device()
            maker = self.ops[self.facts.made[value]] if value in self.facts.made else use
            self.emitted.append(
                Op(maker.eqn, (self.sent[value],), (copy,), None, tag, transfer="fetch")
            )
            self.again[value] = copy
            self.gone.discard(value)
            self.arrived.add(copy)
            self.behind.add(copy)
            self.fetched.append((value, index))

    def _anchor(self, index: int) -> list[Value]:
        """The buffer made shortly before ``index`` that is read soonest from there on.

        What is dropped before it is read does not count: a copy is read instead.
        """
        found: dict[tuple[int, int], Value] = {}
        facts, seen = self.facts, 0
        for position in range(index - 1, -1, -1):
            buffers = [v for v in self.ops[position].outputs if facts.roots[v] == (v,)]
            if not buffers:
                continue
            for value in buffers:
                reads = facts.readers.get(value, [])
                place = bisect.bisect_left(reads, index)
                if place < len(reads) and self._stays(value, index, reads[place]):
                    found[reads[place], -position] = value
            seen += 1
            if seen == MOST_YOUNG:
                break
        soonest = [found[min(found)]] if found else []
        return [self.again.get(v, v) for v in soonest]

    def _stays(self, value: Value, index: int, read: int) -> bool:
        """Whether what is there before ``index`` is what is read at ``read``."""
        if value in self.gone or not value.nbytes:
            return False
        between = any(index <= turn <= read for turn, _, _ in self.turns)
        return not (between and value in self.leaving)

    def used(self) -> Moved:
        """What was really fetched or returned; sending the rest would be for nothing."""
        came_back = {v for v, _ in self.fetched}
        across = {turn: values & came_back for turn, values in self.moved.across.items()}
        return replace(self.moved, across=across)

    def at_once(self) -> Windows:
        """Every copy to the host ends where its value is made."""
        made: dict[int, tuple[Value, ...]] = {}
        for value in self._leaving():
            place = max(self._position(value), 0)
            made[place] = (*made.get(place, ()), value)
        return Windows(land=made)

    def _position(self, value: Value) -> int:
        return self.facts.made.get(value, -1)

    def well_placed(self, seconds: Sequence[float], rates: Rates) -> Windows:
        """When each transfer should run, judged by how long what was written out takes.

        Copies to the host follow each other in program order, each from when its value is made;
        copies back end when they are needed and start as late as that allows. None crosses its
        turn, whatever time that costs. Where a link is slower than the computation it is busy all
        the time with a few copies on the way, and more would only fill the device.

        Args:
            seconds: of each operation that was written out.
            rates: of the links.
        """
        clock = list(itertools.accumulate(seconds, initial=0.0))
        after = [clock[bound] for bound in self.bounds]
        return Windows(self._landings(after, rates), self._arrivals([0.0, *after], rates))

    def _start(self, index: int, earliest: int) -> int:
        """The first operation of what is fused with ``index``, from ``earliest`` on."""
        ends = self.facts.kernel_end
        while index > earliest and ends[index - 1] >= index:
            index -= 1
        return max(index, earliest)

    def _end(self, index: int) -> int:
        """The last operation of what is fused with ``index``.

        In the middle of a kernel a barrier makes the half of it that is done write out its results.
        """
        return self.facts.kernel_end[index]

    def _landings(self, after: Sequence[float], rates: Rates) -> dict[int, tuple[Value, ...]]:
        free, land = 0.0, {}
        leaving = self._leaving()
        room = _room(leaving)
        for number, value in enumerate(leaving):
            index = self._position(value)
            free = max(after[index] if index >= 0 else 0.0, free)
            free += rates.link_seconds("send", value.nbytes)
            turns = [turn - 1 for turn, moved in self.moved.across.items() if value in moved]
            behind = leaving[number + _together(leaving[number:], room) :][:1]
            behind = [self._position(v) for v in behind]
            place = self._end(min(bisect.bisect_left(after, free), len(after) - 1))
            place = max(min([place, *turns, *behind]), index, 0)
            land[place] = (*land.get(place, ()), value)
        return land

    def _arrivals(self, before: Sequence[float], rates: Rates) -> dict[int, tuple[Value, ...]]:
        fetch: dict[int, tuple[Value, ...]] = {}
        values = [value for value, _ in self.fetched]
        room = _room(values)
        for number in range(len(self.fetched) - 1, -1, -1):
            value, index = self.fetched[number]
            start = before[-1]
            together = _together(values[number:], room)
            for other, use in reversed(self.fetched[number:][:together]):
                start = min(before[use], start) - rates.link_seconds("fetch", other.nbytes)
            earlier = number + 1 - _together(values[number::-1], room)
            before_it = self.fetched[:earlier][-1:]
            passed = [t for t, _, away in self.turns if t <= index and value in away]
            earliest = max([*passed, *(use for _, use in before_it)], default=0)
            place = self._start(bisect.bisect_right(before, start) - 1, earliest)
            if place < index:
                fetch[place] = (value, *fetch.get(place, ()))
        return fetch


def _room(values: Iterable[Value]) -> int:
    """Bytes that may be on the way at once."""
    return MOST_ON_THE_WAY * max((v.nbytes for v in values), default=0)


def _together(values: Iterable[Value], room: int) -> int:
    """How many of the first ``values`` may be on the way together."""
    return sum(total <= room for total in itertools.accumulate(v.nbytes for v in values))


def by_result(ops: Sequence[Op], outputs: Sequence[Atom]) -> list[Op]:
    """``ops`` with what follows the last kernel in the order in which results need it.

    An optimizer is written one quantity at a time: all first moments, all second moments, all
    updates. In the order of its results each array's are updated together, and only a few arrays
    need to be on the device at once.
    """
    kernels = [n for n, op in enumerate(ops) if kind_of(op) is Kind.OPAQUE or op.eqn.effects]
    start = kernels[-1] + 1 if kernels else 0
    maker = {v: op for op in ops[start:] for v in op.outputs}
    ordered: dict[Op, None] = dict.fromkeys(ops[:start])
    for atom in outputs:
        stack = [maker[atom]] if isinstance(atom, Value) and atom in maker else []
        while stack:
            op = stack[-1]
            missing = [maker[v] for v in op.values if v in maker and maker[v] not in ordered]
            if missing:
                stack.extend(reversed(missing))
            else:
                ordered[stack.pop()] = None
    ordered.update(dict.fromkeys(ops))
    return list(ordered)


def moved_of(
    facts: Facts, turns: Turns, offload: Mapping[int, frozenset[str]], hosting: Hosting
) -> Moved:
    """What ``offload`` and ``hosting`` name in one line.

    Raises:
        ArgumentError: a name stands for nothing that may cross its turn in host memory.
    """
    kept = dict(turns)
    droppable = {name: at for name, _, at in facts.droppable}
    across = {}
    for turn, names in offload.items():
        known = movable(facts, turn)
        here = kept.get(turn)
        for name in sorted(names):
            if name not in known:
                raise ArgumentError(
                    f"nothing called {name!r} can be offloaded across operation {turn} of "
                    f"{facts.block.path or 'the step'}"
                )
            if here is not None and name not in here and droppable.get(name, turn) < turn:
                raise ArgumentError(
                    f"{name!r} is to be offloaded across operation {turn} of "
                    f"{facts.block.path or 'the step'} and is not kept there: offload is a part "
                    "of what is kept"
                )
        across[turn] = frozenset(v for name in names for v in known[name])
    hosted = frozenset(facts.block.inputs[n] for n in hosting.inputs)
    return Moved(across, hosted, hosting.results)
