"""Program: the operations of a step in order, loops as nested blocks, as plain objects."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend import core as jex
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxmem.errors import ArgumentError
from jaxmem.program.value import Atom, Value, aval_bytes

Transfer = Literal["", "send", "fetch"]
_BARRIER = jax.lax.optimization_barrier_p


class Op:
    """One operation: an equation as data with its operands and results as values.

    Attributes:
        eqn: the traced equation: primitive, parameters, source, context. Its own variables are
            not used; ``inputs`` and ``outputs`` are.
        inputs: operands; for a loop constants, carries, then sliced operands.
        outputs: results; for a loop carries, then stacked results.
        loop: for a ``scan`` its body and arity, else ``None``.
        recompute: name of the recomputation or transfer this operation belongs to, "" for the
            user's own.
        barrier: true for optimization barriers, the user's and those the schedule adds (results are
            the operands, unchanged).
        transfer: ``"send"`` for the copies to host memory that the schedule adds, ``"fetch"`` for
            those back to the device, "" for everything else.
        values: the distinct operands that are values, literals left out.
    """

    __slots__ = (
        "_origin",
        "barrier",
        "eqn",
        "inputs",
        "loop",
        "outputs",
        "recompute",
        "transfer",
        "values",
    )

    def __init__(
        self,
        eqn: jex.JaxprEqn,
        inputs: Sequence[Atom],
        outputs: Sequence[Value],
        loop: Loop | None = None,
        recompute: str = "",
        barrier: bool = False,
        origin: Op | None = None,
        transfer: Transfer = "",
    ):
        self.eqn = eqn
        self.inputs = inputs
        self.outputs = outputs
        self.loop = loop
        self.recompute = recompute
        self.barrier = barrier or eqn.primitive is _BARRIER
        self.transfer: Transfer = transfer
        self._origin = origin
        self.values = tuple(dict.fromkeys([v for v in inputs if isinstance(v, Value)]))

    @property
    def origin(self) -> Op:
        """The user's operation this one repeats; itself when it is the user's own."""
        return self._origin or self

    @property
    def name(self) -> str:
        """Name of the primitive."""
        if self.transfer:
            return "device_put"
        return "optimization_barrier" if self.barrier else self.eqn.primitive.name

    def with_loop(self, loop: Loop) -> Op:
        """The same operation around a loop that is written otherwise."""
        made = (self.eqn, self.inputs, self.outputs, loop, self.recompute, self.barrier)
        return Op(*made, self.origin, self.transfer)

    def __repr__(self) -> str:
        return f"Op({self.name}: {len(self.inputs)} -> {len(self.outputs)})"


@dataclass(frozen=True, eq=False)
class Block:
    """A straight line of operations: the whole step, or the body of a loop.

    Attributes:
        path: where the block sits: ``""`` for the step, then one name per nesting level.
        inputs: the values it is given.
        ops: the operations in order.
        outputs: the values it returns.
    """

    path: str
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]


def has_transfers(block: Block) -> bool:
    """Whether anything in ``block``, or in the loops in it, is copied to or from host memory."""
    return any(
        op.transfer or (op.loop is not None and has_transfers(op.loop.body)) for op in block.ops
    )


@dataclass(frozen=True, eq=False)
class Loop:
    """A ``scan``: its body and how operands are split.

    Body inputs are constants, carries, slices; body outputs are carries, slices to stack.

    Attributes:
        rewritten: the body is no longer the traced one.
        pieces: operations that take the operands and give the results of the loop, and stand in
            its place once the line it is in is written out.
        filled: how many of the last carries are whole arrays that are filled row by row in place.
        rows: how many of the last operands are whole arrays of which an iteration gets a row.
        step: how far the first carry, the index of these rows, moves with each iteration: 1 or
            -1. Where it is not 0 the body gives a row to write in the place of a filled array.
        ahead: which of the sliced operands are in host memory; the row of the next iteration is
            fetched while this one runs.
        apart: what it stacks into is made for it alone.
    """

    body: Block
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int
    rewritten: bool = False
    pieces: Block | None = None
    filled: int = 0
    rows: int = 0
    step: int = 0
    ahead: tuple[int, ...] = ()
    apart: bool = False


def fetched_in(op: Op) -> int:
    """Bytes that ``op`` fetches from host memory row by row, if it is such a loop."""
    if op.loop is None:
        return 0
    first = op.loop.num_consts + op.loop.num_carry
    fetched = (op.inputs[first + n] for n in op.loop.ahead)
    return sum(aval_bytes(a.aval) for a in fetched)


@dataclass(frozen=True)
class Hosting:
    """Which inputs and results of a step are in host memory, by their positions in its block."""

    inputs: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.results)


@dataclass(frozen=True)
class Leaf:
    """One argument or result leaf of the step: tree path, and whether its buffer is donated."""

    path: str
    donated: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step.

    Attributes:
        name: name of the user's function.
        block: its operations; ``block.inputs`` are captured constants, then the argument leaves.
        consts: the captured arrays.
        arguments: one :class:`Leaf` per argument leaf.
        results: one :class:`Leaf` per result leaf.
        shardings: for each argument leaf the sharding it was given with, ``None`` for one device.
        fingerprint: hash of the traced program and its shapes.
        state: of a step over a mesh, the argument leaves whose layout the results that replace
            them keep; ``None`` where arguments stay as they are given.
        wanted: layouts that results are to have whatever they replace; ``None`` for any.
    """

    name: str
    block: Block
    consts: tuple[Any, ...]
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    fingerprint: str
    shardings: tuple[Any, ...] = ()
    state: frozenset[int] | None = None
    equations: int = 0
    wanted: tuple[Any, ...] = ()

    def avals(self, hosting: Hosting | None = None) -> list[jax.ShapeDtypeStruct]:
        """What to compile the block for: shapes, dtypes and shardings of its inputs.

        Weak types are part of it: results that come from them must be as weak as under ``jit``.
        Inputs of ``hosting`` are in host memory.
        """
        return [
            jax.ShapeDtypeStruct(
                v.aval.shape,
                v.aval.dtype,
                sharding=sharding,
                weak_type=getattr(v.aval, "weak_type", False),
            )
            for v, sharding in zip(self.block.inputs, self.layouts(hosting), strict=True)
        ]

    def layouts(self, hosting: Hosting | None = None) -> list[Any]:
        """The sharding of each input of the block, ``None`` for one device."""
        given = [None] * (len(self.block.inputs) - len(self.shardings)) + [*self.shardings]
        hosted = hosting.inputs if hosting else frozenset()
        return [in_host_memory(s) if n in hosted else s for n, s in enumerate(given)]

    def out_shardings(self, hosting: Hosting | None = None) -> list[Any] | None:
        """Where results go; ``None``, for one or all of them, leaves it to the compiler.

        A result in host memory must say so itself, as donation does not ask where the argument
        was, and so must one that replaces state that is laid out over a mesh: XLA would give the
        parameters of a step with a split optimizer state back split (ZeRO-1), and the next step
        would be another program.
        """
        wanted = self.wanted or [None] * len(self.block.outputs)
        if not hosting and not self.replaced and all(s is None for s in wanted):
            return None
        layouts, places = self.layouts(hosting), {**self.places, **self.replaced}
        pinned = {*self.replaced, *(hosting.results if hosting else ())}
        return [
            layouts[places[n]] if own is None and n in pinned else own
            for n, own in enumerate(wanted)
        ]

    def host_bytes(self, hosting: Hosting) -> int:
        """Bytes of the inputs that live in host memory, on each device's part."""
        return sum(nbytes for n, nbytes in enumerate(self.input_bytes) if n in hosting.inputs)

    @property
    def sharded(self) -> bool:
        """Whether any argument is on several devices."""
        return any(s is not None and s.num_devices > 1 for s in self.shardings)

    @property
    def is_laid_out(self) -> bool:
        """Whether it is known how each value is split over several devices."""
        return any(v.layout is not None for v in self.block.inputs)

    @property
    def is_counted(self) -> bool:
        """Whether bytes are those of each device; else they are those of whole arrays."""
        return self.is_laid_out or not self.sharded

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes that arguments are laid out over."""
        named = [s.mesh.shape for s in self.shardings if isinstance(s, NamedSharding)]
        sizes = next((shape for shape in named if math.prod(shape.values()) > 1), {})
        return tuple((str(name), size) for name, size in sizes.items())

    @property
    def split(self) -> tuple[tuple[str, str], ...]:
        """The argument leaves that are split over several devices: their paths, and how."""
        layouts = self.layouts()[len(self.consts) :]
        return tuple(
            (leaf.path, str(getattr(layout, "spec", layout)))
            for leaf, layout in zip(self.arguments, layouts, strict=True)
            if layout is not None and not layout.is_fully_replicated
        )

    @property
    def argument_bytes(self) -> int:
        """Bytes of captured constants and all arguments, on each device."""
        return sum(self.input_bytes)

    @functools.cached_property
    def input_bytes(self) -> tuple[int, ...]:
        """Bytes of each input of the block, on each device."""
        return tuple(
            v.nbytes if sharding is None else _shard_bytes(v.aval, sharding)
            for v, sharding in zip(self.block.inputs, self.layouts(), strict=True)
        )

    @property
    def result_bytes(self) -> tuple[int, ...]:
        """Bytes of each result on each device, before donation.

        Those whose layout is left to the compiler count as a whole as long as it is not known.
        """
        given = self.out_shardings() or [None] * len(self.block.outputs)
        return tuple(
            _bytes_of(atom) if sharding is None else _shard_bytes(atom.aval, sharding)
            for atom, sharding in zip(self.block.outputs, given, strict=True)
        )

    @property
    def output_bytes(self) -> int:
        """Bytes of all results on each device, before donation."""
        return sum(self.result_bytes)

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions in ``block.inputs`` whose buffers results may take."""
        first = len(self.consts)
        return tuple(first + n for n, leaf in enumerate(self.arguments) if leaf.donated)

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """For each result that fits into a donated input of its shape and dtype, that input."""
        from jaxmem.program.places import places

        return places(self)

    @functools.cached_property
    def replaced(self) -> dict[int, int]:
        """For each result that replaces state over a mesh the input whose layout it keeps."""
        from jaxmem.program.places import updates

        if self.state is None:
            layouts = self.layouts() if self.sharded else []
            split = {n for n, s in enumerate(layouts) if s is not None and s.num_devices > 1}
            return {n: at for n, at in self.places.items() if at in split}
        first = len(self.consts)
        state = {first + n for n in self.state}
        found = {n: at for n, at in self.places.items() if at in state}
        return {**updates(self, sorted(state - {*self.donated})), **found}

    @property
    def aliased_results(self) -> frozenset[int]:
        """Positions of results that fit into donated arguments of the same shape and dtype."""
        return frozenset(self.places)

    def hosting(self, hosted: frozenset[int]) -> Hosting:
        """Argument leaves that live in host memory, and the results that take their places.

        Args:
            hosted: positions in ``arguments``.

        Raises:
            ArgumentError: there is no such argument.
        """
        wrong = sorted(n for n in hosted if not 0 <= n < len(self.arguments))
        if wrong:
            raise ArgumentError(f"{self.name} has {len(self.arguments)} arguments, no {wrong[0]}")
        inputs = frozenset(len(self.consts) + n for n in hosted)
        results = frozenset(n for n, position in self.places.items() if position in inputs)
        return Hosting(inputs, results)

    @property
    def aliased_bytes(self) -> int:
        """Bytes that results share with donated arguments."""
        sizes = self.result_bytes
        return sum(sizes[n] for n in self.aliased_results)

    @property
    def fixed_bytes(self) -> int:
        """Arguments and results, what donation shares counted once."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes


def in_host_memory(sharding: Any) -> Any:
    """The same layout in pinned host memory; ``None`` stands for the default device."""
    if sharding is None:
        return SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    return sharding.with_memory_kind("pinned_host")


def _bytes_of(atom: Atom) -> int:
    return atom.part_bytes if isinstance(atom, Value) else aval_bytes(atom.aval)


def _shard_bytes(aval: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize


def kind_of_array(atom: Atom) -> tuple:
    """Shape and dtype: arrays of one kind can take each other's buffers."""
    aval = atom.aval
    return getattr(aval, "shape", ()), str(getattr(aval, "dtype", ""))
