"""Element-wise results that XLA:GPU keeps, as computing them again takes longer than reading them.

A result that is computed where it is read has no bytes. Where several kernels read one that is
costly, XLA's priority fusion weighs computing it in each of them against writing it once: the
``tanh`` of a GELU, read by the layer and by its gradient, is a second result of the layer's kernel
on an H200, 512 MiB in each of 24 blocks of a GPT. Small ones are computed again all the same, a
kernel more being worth a microsecond there.

What XLA writes as it would be read too often (:mod:`jaxmem.program.fusion`) is not known yet where
this is decided: a result that only such a buffer is made of is taken to be read by all that reads
the buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import jax.numpy as jnp

from jaxmem.program.ir import Op, Value
from jaxmem.program.primitives import Kind

# Floating-point operations that XLA counts for one element of two bytes, and of four. Worked out
# from sizes: between which two a program that reads the result forward and backward begins to keep
# it (deviceless H200 and H100, jax 0.11.2). ``exp``, ``log``, ``logistic``, ``erf``, ``sqrt``,
# ``rsqrt`` and ``pow`` were never kept.
_COSTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "cbrt": (227, 227),
        "cos": (1030, 900),
        "erf_inv": (284, 475),
        "erfc": (415, 566),
        "expm1": (212, 212),
        "log1p": (275, 275),
        "sin": (1030, 900),
        "tan": (1030, 900),
        "tanh": (358, 475),
    }
)
_ITEMSIZES = (2, 4)
# What XLA takes the start of a kernel to cost.
_LAUNCH_SECONDS = 1e-6


@dataclass(frozen=True)
class Weighing:
    """How fast XLA takes a GPU to be when it weighs computing again against reading.

    Attributes:
        flops: FLOP/s of all its scalar units.
        bytes_per_second: of its memory.
        widens: whether it computes bfloat16 as float32, and keeps that. GPUs before Hopper do.
    """

    flops: float
    bytes_per_second: float
    widens: bool = False

    def kept(self, ops: Sequence[Op], kinds: Sequence[Kind], demanded: Collection[Value]) -> Costly:
        """The results of element-wise ``ops`` that are buffers as they cost too much twice.

        Args:
            ops: a straight line.
            kinds: of each operation.
            demanded: values that are buffers anyway.
        """
        costly = [
            op
            for op, kind in zip(ops, kinds, strict=True)
            if kind is Kind.FUSED and op.name in _COSTS and op.outputs[0] not in demanded
        ]
        if not costly:
            return NOTHING_KEPT
        readers = _Readers(ops, kinds, demanded)
        counts = [len(readers.of(op.outputs[0])) for op in costly]
        found = [
            op.outputs[0]
            for op, n in zip(costly, counts, strict=True)
            if n > 1 and self.weigh(op, n)
        ]
        return Costly({value: self._buffer(value) for value in found}, readers)

    def _buffer(self, value: Value) -> Value:
        """What is in memory of a result that is kept."""
        if not self._is_widened(value):
            return value
        return Value(value.aval.update(dtype=jnp.float32), layout=value.layout)

    def _is_widened(self, value: Value) -> bool:
        return self.widens and value.aval.dtype == jnp.bfloat16

    def weigh(self, op: Op, kernels: int) -> bool:
        """Whether so many kernels take less to read the result of ``op`` than to compute it each.

        They are taken to be a layer and its gradients: the first reads what the result is made of
        and writes another as large, three with the result, each of the others one more. Where they
        compute it, all of that is hidden behind the arithmetic. Where they read it, arithmetic is
        done once, and there is the traffic.
        """
        result = op.outputs[0]
        if not result.nbytes or result.aval.dtype.itemsize not in _ITEMSIZES:
            return False
        elements = result.nbytes / result.aval.dtype.itemsize
        itemsize = 4 if self._is_widened(result) else result.aval.dtype.itemsize
        cost = _COSTS[op.name][_ITEMSIZES.index(itemsize)]
        again = (kernels - 1) * cost * elements / self.flops
        moved = (4 * kernels - 1) * elements * itemsize / self.bytes_per_second
        return again - moved > _LAUNCH_SECONDS


@dataclass(frozen=True)
class Costly:
    """Results that are kept.

    Attributes:
        buffers: what is in memory of each of them.
        readers: of values of the line they are from.
    """

    buffers: Mapping[Value, Value] = field(default_factory=dict)
    readers: _Readers | None = None

    @functools.cached_property
    def written(self) -> dict[Value, Value]:
        """By what is in memory of them, each of them."""
        return {buffer: value for value, buffer in self.buffers.items()}

    def nbytes(self, root: Value) -> int:
        """Bytes that a kernel is taken to read of a buffer: not of what it need not widen."""
        return self.written.get(root, root).nbytes

    def read_once(self, result: Value, roots: Collection[Value]) -> bool:
        """Whether one kernel reads ``result``, which is made of ``roots`` with kept ones in them.

        That kernel computes it, however many of its operations need it.
        """
        if self.readers is None or not any(root in self.written for root in roots):
            return False
        return len(self.readers.of(result)) <= 1


NOTHING_KEPT = Costly()


class _Readers:
    """The kernels that read each value, by what they write."""

    def __init__(self, ops: Sequence[Op], kinds: Sequence[Kind], demanded: Collection[Value]):
        self._demanded = demanded
        self._readers: dict[Value, list[tuple[Op, Kind]]] = {}
        for op, kind in zip(ops, kinds, strict=True):
            for value in op.values:
                self._readers.setdefault(value, []).append((op, kind))
        self._known: dict[Value, frozenset[Value]] = {}

    def of(self, value: Value) -> frozenset[Value]:
        """Those that read ``value``, directly or as part of what they compute."""
        waiting = [value]
        while waiting:
            last = waiting[-1]
            further = [v for v in self._through(last) if v not in self._known]
            if further:
                waiting += further
                continue
            waiting.pop()
            found = [self._known[v] for v in self._through(last)]
            self._known[last] = frozenset(self._written(last)).union(*found)
        return self._known[value]

    def _through(self, value: Value) -> list[Value]:
        """What is computed of ``value`` in the same kernels."""
        return [
            result
            for op, kind in self._readers.get(value, ())
            if kind in (Kind.FUSED, Kind.ALIAS)
            for result in op.outputs
            if result not in self._demanded
        ]

    def _written(self, value: Value) -> list[Value]:
        """The first result of each kernel that ends with an operation on ``value``."""
        found = []
        for op, kind in self._readers.get(value, ()):
            if kind in (Kind.FUSED, Kind.ALIAS):
                found += [result for result in op.outputs if result in self._demanded]
            elif op.outputs:
                found.append(op.outputs[0])
        return found
