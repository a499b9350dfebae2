"""Run a loop and the updates that are joined to it: each turn makes a row of gradients and uses it.

A turn computes the gradients of a layer and updates that layer; meanwhile the rows of the next
layer come from host memory and those of the layer before go back. An array there cannot be read
and written at once, so half of the leaves are written in the first part of a turn and read in the
second, the others the other way round, and both directions of the link are busy. XLA starts a copy
as soon as it may: what is written in the second part is made to need something that the first part
computes. On an H200 a step of 1e9 parameters took 513 ms so, and 692 with the update after the loop
(benchmarks/README.md).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.program.ir import Atom, Block, Op, Value
from jaxmem.program.parts import Part
from jaxmem.program.trace import opened
from jaxmem.program.work import work_of
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.rows import not_seen_through, rows_of, write_rows

# How much of a turn's work is needed for what its second part waits for.
_MIDDLE = 0.55
# The parameters of a ``jax.checkpoint``.
_CHECKPOINT = {"jaxpr", "prevent_cse", "differentiated"}


def as_joined(part: Part) -> Callable[..., list[Any]]:
    """A function of the inputs of a part, a loop with updates beside it, that returns its outputs.

    Leaves are given in host memory, and what takes their places is left there.
    """
    return _Joined(part).run


@dataclass
class _State:
    """What one turn hands to the next.

    Attributes:
        carry: the loop's own.
        now: for each array in host memory the row that this turn reads.
        done: for each leaf the row that the turn before made for it.
        stacks: the leaves.
        here: arrays on the device that are filled, or written over, row by row.
    """

    carry: list[Any]
    now: dict[Value, Any]
    done: dict[Value, Any]
    stacks: dict[Value, Any]
    here: dict[Value, Any]

    @property
    def names(self) -> tuple[list[Value], ...]:
        """What the arrays are, by field; JAX does not sort them."""
        return tuple(map(list, (self.now, self.done, self.stacks, self.here)))

    @property
    def arrays(self) -> list[list[Any]]:
        """The arrays alone, as a loop of JAX takes them."""
        named = (self.now, self.done, self.stacks, self.here)
        return [self.carry, *([*field.values()] for field in named)]

    def like(self, arrays: Sequence[Sequence[Any]]) -> _State:
        """The same with these arrays."""
        carry, *rest = arrays
        named = (dict(zip(n, a, strict=True)) for n, a in zip(self.names, rest, strict=True))
        return _State([*carry], *named)


@dataclass(frozen=True)
class Turn:
    """How what a turn does is spread over its two parts.

    Attributes:
        share: how much of the computation the copies of the first part have to hide behind.
        nbytes: for each part what is copied in it each way, the larger of both.
    """

    share: float
    nbytes: tuple[int, int]


def turn_of(part: Part) -> Turn:
    """The two parts of each turn of a loop with updates beside it."""
    found = _Joined(part)

    def row_bytes(leaves: Sequence[Value]) -> int:
        return sum(v.nbytes for v in leaves) // found.loop.length

    early, late = row_bytes(found.early), row_bytes(found.late)
    coming = [row_bytes(found.fetched(leaves)) for leaves in (found.early, found.late)]
    read = row_bytes(found.read)
    return Turn(found.middle.share, (max(early, coming[1] + read), max(late, coming[0])))


class _Joined:
    """Names of arrays are those of the update; what the loop calls otherwise is looked up.

    Attributes:
        written: for each leaf the result that is written in its place, and ``read`` what is only
            read: other leaves, and arrays of which the loop alone reads rows.
        unread: those of the leaves that neither the loop nor the update reads.
        early: leaves that are written in the first part of a turn, ``late`` those in the second.
        filled: results on the device that are made in rows, of the update or stacked by the loop.
        under: for some of them the argument whose buffer is written over.
    """

    def __init__(self, part: Part):
        chunks = part.chunks
        assert chunks is not None and chunks.beside is not None
        self.part, self.rows, self.beside = part, chunks.rows, chunks.beside
        self.loop, self.op = self.beside.loop, self.beside.op
        self.first = self.loop.num_consts + self.loop.num_carry
        self.sliced = self.op.inputs[self.first :]
        self.written = {leaf: value for value, leaf in chunks.homes.items()}
        ahead = [self._of(self.sliced[n]) for n in self.loop.ahead]
        hosted = [v for v in (*self.rows.leaves, *ahead) if isinstance(v, Value)]
        self.read = tuple(v for v in dict.fromkeys(hosted) if v not in self.written)
        self.early, self.late = _halves(list(self.written))
        self.unread = self.rows.unread.difference(hosted[len(self.rows.leaves) :])
        made = set(self.beside.made)
        stacked = self.op.outputs[self.loop.num_carry :]
        self.stacked = {n: v for n, v in enumerate(stacked) if v in part.block.outputs}
        mine = [v for v in self.rows.in_rows if v not in chunks.homes and v not in made]
        self.filled = (*mine, *self.stacked.values())
        whole = {self._of(a) for a in self.op.inputs[: self.first]}
        self.under = chunks.under(mine, whole)
        self.each = as_function(self.rows.block(1))
        body = _without_checkpoints(self.loop.body)
        self.middle = _middle_of(body)
        extra = () if self.middle.value is None else (self.middle.value,)
        self.body = Block(body.path, body.inputs, body.ops, (*body.outputs, *extra))
        self.before = _made_by(self.beside.before)

    def _of(self, atom: Atom) -> Atom:
        return self.beside.called.get(atom, atom) if isinstance(atom, Value) else atom

    def fetched(self, leaves: Sequence[Value]) -> list[Value]:
        """Those of the leaves of which rows are read."""
        return [v for v in leaves if v not in self.unread]

    def run(self, *args: Any) -> list[Any]:
        env: dict[Value, Any] = dict(zip(self.part.block.inputs, args, strict=True))
        made = as_function(self.before)(*(env[self._named(v)] for v in self.before.inputs))
        env.update((v, a) for v, a in zip(self.before.outputs, made, strict=True) if _is_value(v))
        once = self.rows.once
        made = as_function(once)(*(env[v] for v in once.inputs))
        env.update((v, a) for v, a in zip(once.outputs, made, strict=True) if _is_value(v))
        start = self.op.inputs[self.loop.num_consts : self.first]
        stacks = {v: jax.device_put(env[v], jax.memory.Space.Host) for v in self.written}
        now = {v: self._fetch(env[v], 0) for v in (*self.read, *self.fetched([*self.written]))}
        state = _State(
            carry=[self._get(env, a) for a in start],
            now=now,
            done={},
            stacks=stacks,
            here={v: self._to_fill(env, v) for v in self.filled},
        )

        state = self._turn(env, 1, state)

        def body(following: Any, arrays: Any) -> Any:
            new = self._turn(env, not_seen_through(following), state.like(arrays))
            assert new.names == state.names
            return new.arrays

        arrays = lax.fori_loop(2, self.loop.length, body, state.arrays)
        state = self._last(env, state.like(arrays))
        env.update(zip(self.op.outputs[: self.loop.num_carry], state.carry, strict=True))
        env.update((self.written[v], stack) for v, stack in state.stacks.items())
        env.update(state.here)
        return [self._get(env, a) for a in self.part.block.outputs]

    # --- turns ----------------------------------------------------------------------------------

    def _turn(self, env: dict[Value, Any], following: Any, state: _State) -> _State:
        """One turn, with the rows of the turn before written and those of the next one fetched.

        XLA copies rows without a kernel only where their index is the loop's counter, times one
        number and plus another: the first turn, in which nothing is written, is none of the loop.
        """
        stacks, fetched = dict(state.stacks), dict[Value, Any]()

        def write(v: Value, row: Any) -> None:
            stacks[v] = self._write(stacks[v], row, following - 2)

        for v in self.early if state.done else ():
            write(v, state.done[v])
        late, early = self.fetched(self.late), self.fetched(self.early)
        for v in (*self.read, *late):
            fetched[v] = self._fetch(stacks.get(v, env.get(v)), following)

        def in_the_middle(computed: Any) -> None:
            done = [state.done[v] for v in self.late if state.done]
            rows, done = lax.optimization_barrier(([fetched[v] for v in late], done))
            fetched.update(zip(late, rows, strict=True))
            for v, row in zip(self.late, done, strict=False):
                other = fetched[v] if v in fetched else jnp.zeros_like(row)
                write(v, row if computed is None else _after(computed, row, other))
            for v in early:
                fetched[v] = self._fetch(stacks[v], following)

        carry, done, here = self._compute(env, following - 1, state, in_the_middle)
        return _State(carry, {v: fetched[v] for v in state.now}, done, stacks, here)

    def _last(self, env: dict[Value, Any], state: _State) -> _State:
        last = self.loop.length - 1
        stacks = {v: self._write(s, state.done[v], last - 1) for v, s in state.stacks.items()}
        carry, done, here = self._compute(env, last, state, lambda computed: None)
        stacks = {v: self._write(s, done[v], last) for v, s in stacks.items()}
        return _State(carry, {}, {}, stacks, here)

    def _compute(
        self,
        env: dict[Value, Any],
        turn: Any,
        state: _State,
        in_the_middle: Callable[[Any], None],
    ) -> tuple[list[Any], dict[Value, Any], dict[Value, Any]]:
        """What the loop and the updates compute in a turn: carries, rows of leaves, arrays here."""
        rows, place = self.rows, self._place(turn)
        here = dict(state.here)
        buffers = {self.under[v]: a for v, a in here.items() if v in self.under}
        # Read before it is written over: without the barrier XLA would copy all of it.
        own = {
            v: lax.optimization_barrier(rows_of(a, rows.axes[v], place, 1))
            for v, a in buffers.items()
        }
        given = [self._row(env, state.now, own, atom, place) for atom in self.sliced]
        consts = [self._get(env, a) for a in self.op.inputs[: self.loop.num_consts]]
        results = as_function(self.body)(*consts, *state.carry, *given)
        in_the_middle(None if self.middle.value is None else results[-1])
        carry, stacked = list(results[: self.loop.num_carry]), results[self.loop.num_carry :]
        made = {v: self._stackable(v, stacked[n]) for v, n in self.beside.made.items()}
        taken = [self._taken(env, state.now, own, made, v, place) for v in rows.taken]
        updated = self.each(*taken, *(env[v] for v in rows.whole))
        new = dict(zip(rows.in_rows, updated, strict=True))
        new.update((v, self._stackable(v, stacked[n])) for n, v in self.stacked.items())
        done = {leaf: new[value] for leaf, value in self.written.items()}
        fresh, carry = lax.optimization_barrier(([new[v] for v in self.filled], carry))
        for v, row in zip(self.filled, fresh, strict=True):
            here[v] = write_rows(here[v], row, rows.axes.get(v, 0), place)
        return carry, done, here

    # --- rows -----------------------------------------------------------------------------------

    def _place(self, turn: Any) -> Any:
        return self.loop.length - 1 - turn if self.loop.reverse else turn

    def _fetch(self, stack: Any, turn: Any) -> Any:
        return jax.device_put(rows_of(stack, 0, self._place(turn), 1), jax.memory.Space.Device)

    def _write(self, stack: Any, row: Any, turn: Any) -> Any:
        return write_rows(stack, jax.device_put(row, jax.memory.Space.Host), 0, self._place(turn))

    def _to_fill(self, env: dict[Value, Any], value: Value) -> Any:
        if value in self.under:
            return env[self.under[value]]
        return lax.empty(value.aval.shape, value.aval.dtype)

    def _stackable(self, value: Value, row: Any) -> Any:
        """A row as a stack of one; a body may give a number that is no array."""
        return jnp.asarray(row, value.aval.dtype)[None]

    def _row(
        self,
        env: dict[Value, Any],
        now: dict[Value, Any],
        own: dict[Value, Any],
        atom: Atom,
        place: Any,
    ) -> Any:
        """What the loop gets of one of the arrays that it goes through."""
        value = self._of(atom)
        if isinstance(value, Value) and value in now:
            return lax.squeeze(now[value], (0,))
        if isinstance(value, Value) and value in own and self.rows.axes[value] == 0:
            return lax.squeeze(own[value], (0,))
        return lax.squeeze(rows_of(self._get(env, atom), 0, place, 1), (0,))

    def _taken(
        self,
        env: dict[Value, Any],
        now: dict[Value, Any],
        own: dict[Value, Any],
        made: dict[Value, Any],
        value: Value,
        place: Any,
    ) -> Any:
        """The row that the update takes of an array."""
        for known in (now, own, made):
            if value in known:
                return known[value]
        if value in self.unread:
            return jnp.zeros((1, *value.aval.shape[1:]), value.aval.dtype)
        return rows_of(env[value], self.rows.axes[value], place, 1)

    def _get(self, env: dict[Value, Any], atom: Atom) -> Any:
        if not isinstance(atom, Value):
            return atom.val
        return env[atom] if atom in env else env[self._named(atom)]

    def _named(self, value: Value) -> Value:
        return self.beside.called.get(value, value)


def _is_value(atom: Atom) -> TypeGuard[Value]:
    return isinstance(atom, Value)


def _halves(leaves: Sequence[Value]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The leaves in two parts of about as many bytes."""
    whole, so_far = sum(v.nbytes for v in leaves), 0
    first: list[Value] = []
    for v in leaves:
        if 2 * so_far + v.nbytes <= whole:
            first.append(v)
            so_far += v.nbytes
    return tuple(first), tuple(v for v in leaves if v not in first)


def _made_by(ops: Sequence[Op]) -> Block:
    """A block of these operations that gives all they make."""
    made = [v for op in ops for v in op.outputs]
    known = set(made)
    read = dict.fromkeys(v for op in ops for v in op.values if v not in known)
    return Block("", tuple(read), tuple(ops), tuple(made))


@dataclass(frozen=True)
class _Middle:
    """What is computed just before the second part of a turn.

    Attributes:
        value: of the body; ``None`` if nothing in it is costly.
        share: how much of the computation comes before what makes it.
    """

    value: Value | None = None
    share: float = 0.0


def _middle_of(body: Block) -> _Middle:
    """The result of a product that about half of all work is needed for.

    XLA orders operations anew, so where one stands says nothing about when it is done.
    """
    costs = [_flops(op) for op in body.ops]
    whole = sum(costs)
    needed: dict[Value, int] = {}
    found, nearest = _Middle(), math.inf
    for n, (op, cost) in enumerate(zip(body.ops, costs, strict=True)):
        mask = functools.reduce(operator.or_, (needed.get(v, 0) for v in op.values), 0)
        before = sum(c for m, c in enumerate(costs[:n]) if c and mask >> m & 1)
        needed.update(dict.fromkeys(op.outputs, mask | bool(cost) << n))
        value = next(filter(_is_number, op.outputs), None)
        distance = abs((before + cost) / whole - _MIDDLE) if whole else math.inf
        if cost and value is not None and distance < nearest:
            found, nearest = _Middle(value, before / whole), distance
    return found


def _without_checkpoints(body: Block) -> Block:
    """The body with what checkpoints in it do written out, so that it can be parted.

    What the gradient of a checkpointed layer makes again was made in another loop, so XLA cannot
    merge the two. Checkpoints in a checkpoint stay: they may be there to forget in between.
    """
    ops: list[Op] = []
    known: dict[Value, Atom] = {}

    def now(atom: Atom) -> Atom:
        return known.get(atom, atom) if isinstance(atom, Value) else atom

    for op in body.ops:
        inside = opened(op.eqn) if _CHECKPOINT <= op.eqn.params.keys() else ()
        if len(inside) != 1 or len(inside[0].inputs) != len(op.inputs):
            ops.append(_reading(op, now))
            continue
        (block,) = inside
        known.update(zip(block.inputs, map(now, op.inputs), strict=True))
        ops += [_reading(one, now) for one in block.ops]
        known.update(zip(op.outputs, map(now, block.outputs), strict=True))
    return Block(body.path, body.inputs, tuple(ops), tuple(map(now, body.outputs)))


def _reading(op: Op, now: Callable[[Atom], Atom]) -> Op:
    inputs = list(map(now, op.inputs))
    if all(a is b for a, b in zip(inputs, op.inputs, strict=True)):
        return op
    return Op(op.eqn, inputs, op.outputs, op.loop, op.recompute, op.barrier, op.origin, op.transfer)


def _is_number(value: Value) -> bool:
    return value.nbytes > 0 and jnp.issubdtype(value.aval.dtype, jnp.inexact)


def _flops(op: Op) -> float:
    if op.loop is not None:
        return op.loop.length * sum(map(_flops, op.loop.body.ops))
    work = None if op.transfer or op.barrier else work_of(op.eqn)
    if work is not None:
        return work.flops
    return max((sum(map(_flops, block.ops)) for block in opened(op.eqn)), default=0.0)


def _after(computed: Any, row: Any, other: Any) -> Any:
    """``row``, which XLA cannot have before ``computed``; it does not see that 0 is always 0."""
    first = lax.slice(computed, (0,) * computed.ndim, (1,) * computed.ndim).reshape(())
    element = lax.convert_element_type(jnp.real(first), jnp.float32)
    bits = lax.bitcast_convert_type(element, jnp.uint32)
    return jnp.where((bits >> 16) >> 16 == 0, row, other)
