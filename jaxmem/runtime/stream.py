"""Run a step that is cut: its parts one after the other, copies to and from the host beside them.

Both directions of the link are busy at once, 48.5 GB/s each way on an H200 whose link gives 48.8.
A copy waits for what was started before it (``copies``): it is fetched before that starts.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxmem import processes
from jaxmem.program.cut import Cut
from jaxmem.program.ir import Value, in_host_memory
from jaxmem.program.parts import Part
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime.buffers import Buffers
from jaxmem.runtime.copies import Copier, Send, delete
from jaxmem.runtime.interrupts import finish, undisturbed
from jaxmem.runtime.parts import compile_parts
from jaxmem.runtime.spread import spread_of
from jaxmem.runtime.timeline import STAGES_AHEAD, STAGES_QUEUED
from jaxmem.targets.compiling import compile_for


@dataclass(frozen=True, eq=False)
class Item:
    """A part, compiled.

    Attributes:
        part: what it takes and gives.
        run: the executable.
        way_bytes: device memory of what is copied for it, from its first fetch to the end of its
            last copy back.
        room_bytes: device memory for what is copied, its own included, while it runs.
    """

    part: Part
    run: Callable[..., Sequence[Any]]
    way_bytes: int
    room_bytes: int


@dataclass(frozen=True, eq=False)
class Stream:
    """The programs of a step that is cut; called with the arrays of the step it gives its results.

    Attributes:
        cut: the step.
        first: the executable of the first part.
        items: the others, in order.
        ahead_bytes: device memory for what is fetched while the first part runs.
        tail_bytes: device memory for what is still on its way to the host when a step returns.
        names: what the outputs of the first part are called by the others, where not as they are.
        lowered: the programs of the items, as JAX has lowered them, equal ones once.
    """

    cut: Cut
    first: Callable[..., Sequence[Any]]
    items: tuple[Item, ...]
    ahead_bytes: int
    tail_bytes: int
    names: tuple[Any, ...] = ()
    lowered: tuple[jax.stages.Lowered, ...] = ()

    def __call__(self, ready: Sequence[Any]) -> list[Any]:
        """Run a step.

        ``ready``: captured constants, then each argument leaf, those that wait on the host there.

        Raises:
            StepInterruptedError: a part failed twice, after others had changed their leaves.
        """
        run = Run(self, [*ready, *self.buffers.taken()])
        with undisturbed():
            run.begin()
            return finish(run)

    def compiled_again(self, options: Mapping[str, str]) -> Stream:
        """The same with executables of this machine."""
        first = self.cut.first
        local = compile_for(
            None,
            as_function(first.block),
            first.avals(),
            donate=first.donated,
            out_shardings=first.out_shardings(),
            options=options,
        )
        spread = spread_of(self.cut, self.names, local)
        parts = compile_parts(self.cut.parts, None, options, spread)
        pairs = zip(self.items, parts, strict=True)
        items = tuple(replace(item, run=part.executable) for item, part in pairs)
        return replace(self, first=local.executable, items=items)

    @property
    def rooms(self) -> tuple[int, ...]:
        """Device memory that copies may take: beside the first part, at the end, beside each."""
        beside = (max(item.room_bytes, item.way_bytes) for item in self.items)
        return self.ahead_bytes, self.tail_bytes, *beside

    @functools.cached_property
    def buffers(self) -> Buffers:
        """What holds stacks of gradients from the loop that makes them to their updates."""
        return Buffers(self.cut, self.homes)

    @functools.cached_property
    def homes(self) -> dict[Value, Any]:
        """Where each result that goes to the host lives there."""
        return {v: self.home_of(n) for n, v in self.cut.hosted_results}

    def home_of(self, number: int) -> Any:
        """Where a result that goes to the host lives there."""
        return in_host_memory(self._layouts[self.cut.program.places[number]])

    @functools.cached_property
    def _layouts(self) -> Sequence[Any]:
        return self.cut.program.layouts()

    @functools.cached_property
    def handed_back(self) -> frozenset[Value]:
        """Results; a leaf among them is handed back as it is, and must not be deleted."""
        return frozenset(v for v in self.cut.program.block.outputs if isinstance(v, Value))

    @functools.cached_property
    def used_up(self) -> list[list[Value]]:
        """For each item the leaves in host memory that nothing needs after it."""
        lent, places = self.cut.lent, self.cut.program.places
        inputs = self.cut.program.block.inputs
        # What is not replaced was only read, and stays the caller's own.
        replaced = {inputs[places[n]] for n, _ in self.cut.hosted_results}
        last = {lent.get(v, v): n for n, item in enumerate(self.items) for v in item.part.leaves}
        found: list[list[Value]] = [[] for _ in self.items]
        for leaf, number in last.items():
            if leaf in replaced and leaf not in self.handed_back:
                found[number].append(leaf)
        return found

    @functools.cached_property
    def replaced(self) -> list[Value]:
        """The leaves in host memory that nothing reads and results of the first part replace."""
        program = self.cut.program
        lent = self.cut.lent
        fetched = (v for item in self.items for v in item.part.leaves)
        needed = self.handed_back.union(lent.get(v, v) for v in fetched)
        sent, places = set(self.cut.sent), program.places
        leaves = [program.block.inputs[places[n]] for n, v in self.cut.hosted_results if v in sent]
        return [v for v in leaves if v not in needed]

    @functools.cached_property
    def given(self) -> dict[int, int]:
        """Results that are constants or arguments on the device: outputs of the first part.

        By their numbers; they come first among its outputs, with the other results that need
        nothing else.
        """
        names = self.names or self.cut.first.block.outputs
        inputs = set(self.cut.first.block.inputs)
        places = [n for n, v in enumerate(names) if not isinstance(v, Value) or v in inputs]
        numbers = [
            n
            for n, v in enumerate(self.cut.program.block.outputs)
            if not isinstance(v, Value) or v in inputs
        ]
        return dict(zip(numbers, places, strict=True))


class Run:
    """One step under way.

    Attributes:
        at: the next item to run.
        fetched: the next item to fetch for.
        under_way: device memory of what is being copied, or waits to be used.
        stage: how many stages of the first part were started.
        queued: for each stage that may not have ended, an array that is ready when it has.
        leaving: what was fetched for parts that were started and send nothing, and its memory: a
            copy that has not ended keeps that, whoever else has forgotten the array.
        lost: copies to the host that failed; ``done`` the items that ran.
    """

    def __init__(self, stream: Stream, ready: Sequence[Any], copier: Any = None):
        self.stream, self.cut = stream, stream.cut
        block, hosting = self.cut.program.block, self.cut.hosting
        self.on_host: dict[Value, Any] = {}
        self.env: dict[Value, Any] = {}
        # The inputs that are lent are the leaves themselves.
        given = [(n, v) for n, v in enumerate(block.inputs) if v not in self.cut.lent]
        for (n, value), array in zip(given, ready, strict=True):
            (self.on_host if n in hosting.inputs else self.env)[value] = array
        self.on_host.update((v, self.on_host[leaf]) for v, leaf in self.cut.lent.items())
        first = next(iter(self.on_host.values()))
        self.copier = copier or Copier(first.sharding.addressable_devices)
        self.here: dict[tuple[int, Value], Any] = {}
        self.back: dict[Value, Any] = {}
        self.given: dict[int, Any] = {}
        self.sends: deque[Send] = deque()
        self.lost: list[Send] = []
        self.done: set[int] = set()
        self.at = self.fetched = self.under_way = 0
        self.stage = 1
        self.queued: deque[Any] = deque()
        self.leaving: deque[tuple[list[Any], int]] = deque()

    # --- the first part -----------------------------------------------------------------------

    def begin(self) -> None:
        """Fetch what there is room for and run the first part; until it has run nothing changes."""
        self._fetch_ahead(self.stream.ahead_bytes)
        first = self.cut.first.block
        self.copier.mark()
        outputs = self.copier.wait(self.stream.first(*(self.env[v] for v in first.inputs)))
        # The last copies of the step before have room beside the first part, and not later.
        self.copier.wait(list(self.on_host.values()))
        self.given = {n: outputs[place] for n, place in self.stream.given.items()}
        self._take(self.stream.names or first.outputs, outputs)

    def _take(self, names: Sequence[Any], arrays: Sequence[Any]) -> None:
        self.env.update((v, a) for v, a in zip(names, arrays, strict=True) if isinstance(v, Value))

    # --- updates ------------------------------------------------------------------------------

    def where(self) -> str:
        """Which item is run, for a message."""
        program, items = self.cut.program, self.stream.items
        if self.at >= len(items):
            return f"the last copy to the host of {program.name}"
        part = items[self.at].part
        paths = () if part.stage else self.cut.paths_of(part)
        what = f"the update of {paths[0]}" if paths else "a stage of the gradients"
        return f"{what} (part {self.at + 1} of {len(items)} of {program.name})"

    def go_on(self, *, alone: bool = False) -> None:
        """Run the items that are left; ``alone``: with nothing else under way."""
        while self.lost:
            send = self.lost[-1]
            self._copy(send.values, send.sources, 0, send.old)
            self.lost.pop()
        replaced = [self.on_host[v] for v in self.stream.replaced]
        self._send([v for v in self.cut.sent if v not in self.back], 0, replaced)
        while self.at < len(self.stream.items):
            item = self.stream.items[self.at]
            self.fetched = max(self.fetched, self.at)
            if self.fetched == self.at:
                self._wait_until(0 if alone else item.room_bytes - item.way_bytes)
                self._fetch()
            if item.part.stage and not alone:
                self._fetch_for_stage()
            elif not alone:
                self._fetch_ahead(item.room_bytes)
            fetched = [self.here[self.at, v] for v in item.part.fetched]
            self._run(item, alone)
            self.stage += item.part.stage
            used = [self.on_host[v] for v in self.stream.used_up[self.at]]
            sent = [v for v in item.part.sent if v not in self.back]
            if not sent:
                self.leaving.append((fetched, item.way_bytes))
            self._send(sent, item.way_bytes if sent else 0, used)
            del fetched
            self.at += 1
        while (self.leaving or self.under_way > self.stream.tail_bytes) and self._release():
            pass
        for send in self.sends:
            send.delete_old()

    def _run(self, item: Item, alone: bool) -> None:
        part = item.part
        if self.at in self.done:
            return  # What came after it failed.
        arrays = [self._given(v) for v in part.reads]
        while part.stage and len(self.queued) >= STAGES_QUEUED:
            self.copier.wait(self.queued.popleft())
        self.copier.mark()
        outputs = item.run(*arrays)
        del arrays
        # It has run, whatever happens next: what it was given is used up.
        self.done.add(self.at)
        for n in part.over:
            self.here.pop((self.at, part.reads[n]), None)
            self.env.pop(part.reads[n], None)
        self._take(part.names, outputs)
        self.back.update((v, self.env.pop(v)) for v in part.hosted)
        if alone:
            self.copier.wait(outputs)
        elif part.stage:
            self.queued.append(self.copier.end())

    def _given(self, value: Value) -> Any:
        """What the item that is run is given; gradients are where they were written to."""
        if value in self.cut.later:
            return self.back[self.cut.later[value]]
        return self.here[self.at, value] if value in self.on_host else self.env[value]

    def _fetch_for_stage(self) -> None:
        """Before a stage starts, fetch what is updated after it, and what the next stages read.

        A copy to the device waits for computations that were started before it: fetched later, it
        would wait for the stage. Copies to the host that go on beside the stage before this one
        are waited for where there is no room; later ones are not, as they wait for that stage.
        """
        items = self.stream.items
        self.fetched = max(self.fetched, self.at + 1)
        stages = STAGES_AHEAD if self.cut.lent else 1
        while self.fetched < len(items) and stages:
            item = items[self.fetched]
            stages -= item.part.stage
            room = self._room()
            while self.under_way + item.way_bytes > room:
                sent = self.sends and self.sends[0].stage < self.stage
                if not self.leaving and not sent:
                    return
                self._release()
            self._fetch()

    def _room(self) -> int:
        """What copies may take until the next item that is to be fetched for has run."""
        return min(item.room_bytes for item in self.stream.items[self.at : self.fetched + 1])

    def _fetch_ahead(self, most: int) -> None:
        """Fetch for the next items, where there is room for that until they have run."""
        items = self.stream.items
        while self.fetched < len(items):
            item, room = items[self.fetched], min(most, self._room())
            while self.sends and self.sends[0].has_ended():
                self._wait()
            # Waiting is worth it only when nothing is fetched beyond what runs next.
            while self.under_way + item.way_bytes > room:
                if (not self.leaving and self.fetched - self.at >= 2) or not self._release():
                    return
            self._fetch()

    def _fetch(self) -> None:
        number, part = self.fetched, self.stream.items[self.fetched].part
        leaves = part.fetched
        own = [v for v in part.leaves if v not in leaves and v in self.on_host]
        self.here.update(((number, v), self.on_host[v]) for v in own)
        if leaves:
            on_host = [self.on_host[v] for v in leaves]
            places = [array.sharding.with_memory_kind("device") for array in on_host]
            arrays = self.copier.put(on_host, places)
            self.here.update(((number, v), a) for v, a in zip(leaves, arrays, strict=True))
        self.under_way += self.stream.items[number].way_bytes
        self.fetched = number + 1

    def _send(self, values: Sequence[Value], way_bytes: int, used: Sequence[Any]) -> None:
        if not values:
            delete(used)
            return
        self._copy(values, [self.env[v] for v in values], way_bytes, used)
        for v in values:
            if v not in self.cut.stay:
                del self.env[v]

    def _copy(
        self, values: Sequence[Value], sources: list[Any], way_bytes: int, used: Sequence[Any]
    ) -> None:
        arrays = self.copier.put(sources, [self.stream.homes[v] for v in values])
        self.back.update(zip(values, arrays, strict=True))
        self.sends.append(Send(values, sources, arrays, way_bytes, used, self.stage))

    def _wait_until(self, limit: int) -> None:
        while self.under_way > limit and self._release():
            pass

    def _release(self) -> bool:
        """Until memory of the oldest copy is free; whether there was one to wait for."""
        if self.leaving:
            arrays, way_bytes = self.leaving[0]
            self.copier.wait([array for array in arrays if not array.is_deleted()])
            self.leaving.popleft()
            self.under_way -= way_bytes
            return True
        if self.sends:
            self._wait()
            return True
        return False

    def _wait(self) -> None:
        """Until the oldest copy to the host has ended; what it replaces is given up then."""
        send = self.sends[0]
        self.copier.wait(send.arrays)
        self.sends.popleft()
        self.under_way -= send.way_bytes
        send.delete_old()

    def settle(self) -> None:
        """Let what is under way end; forget what was fetched and not used, and what failed."""
        for send in self.sends:
            try:
                self.copier.wait(send.arrays)
                send.delete_old()
            except Exception:  # Whatever it was, it is copied again, and that may say so.
                self.lost.append(send)
                for v in send.values:
                    self.back.pop(v, None)
        self.sends.clear()
        for array in (*self.here.values(), *self.queued):
            with contextlib.suppress(Exception):
                self.copier.wait(array)
        self.here.clear()
        self.queued.clear()
        self.leaving.clear()
        self.fetched, self.under_way = self.at, 0

    # --- results ------------------------------------------------------------------------------

    def results(self) -> list[Any]:
        """The results of the step, in order."""
        found, seen = [], set()
        for n, atom in enumerate(self.cut.program.block.outputs):
            array = self._result(n, atom)
            # Results that are one value have buffers of their own, as under jax.jit.
            if id(array) in seen:
                array = jax.device_put(array, array.sharding, may_alias=False)
            found.append(array)
            seen.add(id(array))
        return self.stream.buffers.split_off(found)

    def _result(self, number: int, atom: Any) -> Any:
        if number not in self.cut.hosting.results:
            if number in self.given:
                return self.given[number]
            if atom in self.env:
                return self.env[atom]
            leaf = self.on_host[atom]
            return processes.put(leaf, leaf.sharding.with_memory_kind("device"))
        if not isinstance(atom, Value):
            return processes.put(self.given[number], self.stream.home_of(number))
        return self.back[atom] if atom in self.back else self.on_host[atom]
