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
from jaxmem.planner.windows import Copies, Windows
from jaxmem.program.ir import Atom, Block, Hosting, Op, Value
from jaxmem.program.primitives import Kind

# Bytes: smaller arrays are not worth a copy of their own.
FEWEST_MOVED = 2**18


@dataclass(frozen=True)
class Moved:
    """What of a line is in host memory, and when.

    Attributes:
        across: for each turn the values that cross it in host memory.
        hosted: inputs that live there; they are fetched, and after each turn fetched again, but
            for those that nothing read since the turn before where updates are early.
        returned: numbers of the results that are returned there.
        updates: by its first operation, what runs for each result that is made early of hosted
            inputs.
    """

    across: Mapping[int, frozenset[Value]]
    hosted: frozenset[Value] = frozenset()
    returned: frozenset[int] = frozenset()
    updates: Mapping[Op, Sequence[Op]] = field(default_factory=dict)


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
        away: those that are there now and must be fetched to be read; ``away_next`` those that are
            from each turn on.
        sent: the copy in host memory of each.
        fetched: every fetch, and the operation before which it was written out.
        due: what should be on the host by now, and nothing waits for that yet.
        bounds: how many operations were written out when each of the line's was.
        of_kernels: what kernels made that may be read yet, of the first ``followed`` operations.
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
        places = itertools.pairwise([0, *(turn for turn, _, _ in self.turns)])
        away = [self._away_at(turn, before) for before, turn in places]
        self.turns = [
            (turn, since, [*dropped, *(v for v in there if v not in dropped)])
            for (turn, since, dropped), there in zip(self.turns, away, strict=True)
        ]
        self.away_next = iter(away)
        self.leaving = {v for _, _, values in self.turns for v in values}
        self.sent: dict[Value, Value] = {v: v.on_host() for v in moved.hosted}
        self.given = tuple([self.sent.get(v, v) for v in facts.block.inputs])
        self.inputs = frozenset(self.given)
        self.returned = {v for v in outputs if isinstance(v, Value)} - self.home
        self.away: set[Value] = set()
        self.fetched: list[tuple[Value, int]] = []
        self.due: list[Value] = []
        self.bounds: list[int] = []
        self.of_kernels: list[Value] = []
        self.followed = 0
        self._absent(moved.hosted)

    def _away_at(self, turn: int, before: int) -> list[Value]:
        """What crosses ``turn`` in host memory, in program order.

        Where updates run early, a hosted input that nothing read since the turn before it is still
        there, or is on the way to what reads it later.
        """
        readers, hosted = self.facts.readers, self.moved.hosted
        if self.moved.updates:
            hosted = {v for v in hosted if any(before <= n < turn for n in readers.get(v, ()))}
        moved = self.moved.across.get(turn, frozenset()).union(hosted)
        return self._in_order(moved)

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
        return self._in_order((self.leaves & came_back) | self.home)

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
        for value in self._in_order(self.inputs & self.leaves):
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
        self.away.update(next(self.away_next))

    def _emit_late(self, index: int, op: Op) -> None:
        self._fetch(self.windows.fetch.get(index, ()), index, op)
        if self.barriers and op in self.moved.updates:
            self._wait_with(self.moved.updates[op], index)
        super()._emit_late(index, op)
        for value in op.outputs:
            if value in self.leaves:
                self._send(value, op)
        self._land(self.windows.land.get(index, ()), index, op)
        self.bounds.append(len(self.emitted))

    def _wait_with(self, update: Sequence[Op], index: int) -> None:
        """Have an update wait for the kernel before it, beside which what it reads is copied.

        Without it XLA updates as soon as it can, with nothing beside the copies, and takes what is
        made of arguments alone, such as decayed weights, before the forward pass: 384 MiB of six
        layers were there until the end.
        """
        read = dict.fromkeys([v for op in update for v in op.values if v.nbytes >= FEWEST_MOVED])
        here = [v for v in read if v not in self.gone and v not in self.made]
        last = self._made_last(index) if here else []
        if last:
            now = {v: self._now(v) for v in here}
            behind = self._barrier(update[0], list(now.values()), last, self._tag())
            self._stands_for({self.again.get(v, v): behind[now[v]] for v in here})

    def _made_last(self, index: int) -> list[Value]:
        """What the last kernel before ``index`` made that is read from there on."""
        facts, made = self.facts, self.of_kernels
        for position in range(self.followed, index):
            if facts.kinds[position] is Kind.OPAQUE:
                made += [v for v in reversed(self.ops[position].outputs) if v in facts.read_until]
        self.followed = max(self.followed, index)
        while made and not self._is_read(made[-1], index):
            made.pop()
        for value in reversed(made):
            now = self._as_read(value, index)
            if self._is_read(value, index) and self._stays(now, index, facts.read_until[now]):
                return [self.again.get(now, now)]
        return []

    def _is_read(self, value: Value, index: int) -> bool:
        """Whether a value made since the turn, or its transposition, is read from ``index`` on."""
        late = self.made[value] >= self.turn
        return late and self.facts.read_until.get(self._as_read(value, index), -1) >= index

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

    def copies(self) -> Copies:
        """What was written out of transfers, to place them."""
        return Copies(
            self.facts,
            tuple((turn, frozenset(away)) for turn, _, away in self.turns),
            self.moved.across,
            tuple(self._leaving()),
            tuple(self.fetched),
            tuple(self.bounds),
        )

    def _in_order(self, values: Iterable[Value]) -> list[Value]:
        """In program order: that of a set is another one in every process."""
        return sorted(values, key=lambda v: (self._position(v), str(v.key)))

    def _position(self, value: Value) -> int:
        return self.facts.made.get(value, -1)


def moved_of(
    facts: Facts,
    turns: Turns,
    offload: Mapping[int, frozenset[str]],
    hosting: Hosting,
    updates: Iterable[Sequence[Op]] = (),
) -> Moved:
    """What ``offload`` and ``hosting`` name in one line, in which ``updates`` run early.

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
    return Moved(across, hosted, hosting.results, {made[0]: made for made in updates if made})
