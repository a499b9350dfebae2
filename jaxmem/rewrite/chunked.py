"""Run an update in one program that takes its leaves from host memory some rows at a time.

Rows are fetched one chunk ahead and written back in their place, while the link goes both ways: an
array cannot be read and written at once, so while rows of one leaf are fetched, those of the leaf
before it are written. Barriers say so; without them XLA copies the leaves. Indices are the loop's
own counter, times a constant and plus one: only then is a copy of rows one that no kernel does (on
an H200 a forward pass over 24 weights in host memory took 18.6 ms, as with weights on the device,
and 34.4 with indices out of an array). Some jaxlibs forget what is added: see runtime/guard.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.program.ir import Value
from jaxmem.program.rowwise import Chunks
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.rows import not_seen_through, rows_of, write_rows

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def as_loop(chunks: Chunks) -> Callable[..., list[Any]]:
    """A function of the inputs of the update that returns its outputs.

    Leaves are given in host memory, and what takes their places is left there.
    """
    return _Loop(chunks)


class _Loop:
    def __init__(self, chunks: Chunks):
        rows = self.rows = chunks.rows
        self.chunks, self.count = chunks, chunks.count
        self.full = rows.length // self.count
        self.once = as_function(rows.once)
        self.each = {n: as_function(rows.block(n)) for n in {self.count, *self._rest()}}
        taken_by = {leaf: value for value, leaf in chunks.homes.items()}
        self.leaves = rows.leaves
        # For each leaf the result that is written in its place.
        self.written = [taken_by.get(leaf) for leaf in rows.leaves]
        self.here = [v for v in rows.in_rows if v not in chunks.homes]
        self.under = chunks.under(self.here)

    def _rest(self) -> list[int]:
        rest = self.rows.length % self.count
        return [rest] if rest else []

    def __call__(self, *args: Any) -> list[Any]:
        rows = self.rows
        env: dict[Value, Any] = dict(zip(rows.inputs, args, strict=True))
        made = self.once(*(env[v] for v in rows.once.inputs))
        handed = zip(rows.once.outputs, made, strict=True)
        env.update((v, a) for v, a in handed if isinstance(v, Value))
        stacks = [jax.device_put(env[v], _HOST) for v in self.leaves]
        here = [
            env[self.under[v]] if v in self.under else jnp.zeros(v.aval.shape, v.aval.dtype)
            for v in self.here
        ]
        now = [self._fetch(stack, 0, self.count) for stack in stacks]

        def body(i: Any, carry: Any) -> Any:
            i = not_seen_through(i)
            start = (i - 1) * self.count
            return self._turn(env, start, self.count, *carry, ahead=i * self.count)

        carry = lax.fori_loop(1, self.full, body, (now, stacks, here))
        last = (self.full - 1) * self.count
        _, stacks, here = self._turn(env, last, self.count, *carry)
        for rest in self._rest():
            start = self.full * self.count
            now = [self._fetch(stack, start, rest) for stack in stacks]
            _, stacks, here = self._turn(env, start, rest, now, stacks, here)
        for leaf, value, stack in zip(self.leaves, self.written, stacks, strict=True):
            env[leaf if value is None else value] = stack
        env.update(zip(self.here, here, strict=True))
        return [env[a] if isinstance(a, Value) else a.val for a in rows.outputs]

    def _turn(
        self,
        env: dict[Value, Any],
        start: Any,
        count: int,
        now: Sequence[Any],
        stacks: Sequence[Any],
        here: Sequence[Any],
        *,
        ahead: Any = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Some rows: what was fetched is used, written back, and the next ones are fetched."""
        rows, stacks, here = self.rows, list(stacks), list(here)
        fetched = dict(zip(self.leaves, now, strict=True))
        buffers = {
            self.under[v]: a for v, a in zip(self.here, here, strict=True) if v in self.under
        }
        taken = [
            fetched[v]
            if v in fetched
            else rows_of(buffers.get(v, env[v]), rows.axes[v], start, count)
            for v in rows.taken
        ]
        results = self.each[count](*taken, *(env[v] for v in rows.whole))
        made = dict(zip(rows.in_rows, results, strict=True))
        for n, value in enumerate(self.here):
            here[n] = write_rows(here[n], made[value], rows.axes[value], start)
        following = self._swap(start, made, stacks, ahead, count)
        return following, stacks, here

    def _swap(
        self, start: Any, made: dict[Value, Any], stacks: list[Any], ahead: Any, count: int
    ) -> list[Any]:
        """Write what was made in the place of leaves, and fetch their next rows beside it."""

        def write(n: int, behind: list[Any] | None = None) -> None:
            value = self.written[n]
            if value is None:
                return
            new = made[value]
            if behind:
                behind[n], new = lax.optimization_barrier((behind[n], new))
            stacks[n] = write_rows(stacks[n], jax.device_put(new, _HOST), 0, start)

        number = len(stacks)
        if ahead is None:
            for n in range(number):
                write(n)
            return []
        fetched: list[Any] = []
        write(number - 1)
        for n in range(number):
            fetched.append(self._fetch(stacks[n], ahead, count))
            if n:
                # Its rows are here, so it may be written while those of the next one are fetched.
                write(n - 1, behind=fetched)
        return fetched

    def _fetch(self, stack: Any, start: Any, count: int) -> Any:
        return jax.device_put(rows_of(stack, 0, start, count), _DEVICE)
