"""What an operation costs: floating-point operations and bytes moved, turned into seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxmem.errors import TargetError
from jaxmem.program.collectives import Axes, Sent, sent, within
from jaxmem.program.convolving import SUMMED, steps_beside, sums_over_places
from jaxmem.program.exchange import exchange
from jaxmem.program.fusion import fuse
from jaxmem.program.ir import Block, Op, Transfer
from jaxmem.program.primitives import Kind
from jaxmem.program.trace import opened
from jaxmem.program.weighing import Weighing
from jaxmem.program.work import moved, work_of
from jaxmem.work import Work

NO_AXES: Axes = MappingProxyType({})


@dataclass(frozen=True)
class Rates:
    """How fast a device works.

    Attributes:
        flops: FLOP/s by dtype name; a dtype that is not listed runs at the float32 rate.
        bytes_per_second: device memory bandwidth.
        d2h_bytes_per_second: device to host; 0 where nothing is moved.
        h2d_bytes_per_second: host to device; 0 where nothing is moved.
        d2d_bytes_per_second: device to device, one direction; where it is 0, collectives count
            their traffic to device memory only.
        summing_rows: FLOP/s by dtype name of products that sum the rows of both operands, where it
            is not that of other products.
        convolving: FLOP/s of convolutions by dtype name, where it is not that of products.
        summing_places: FLOP/s of the gradients of their kernels by dtype name, likewise.
        cycle_seconds: what a cycle of one multiprocessor comes to where all of them work; 0 where
            that is not known.
        beside_seconds: what a convolution takes for each place and tap beside its products; the
            gradient of its kernel takes ``SUMMED`` of that.
        duplex_bytes_per_second: each way of the host link while both are busy; where it is 0, each
            is as fast as alone.
        barriers_keep: whether the compiler writes nothing over what comes from behind a barrier.
        stacks_at_once: whether it makes what several loops stack into before all else, where they
            stack alike, as XLA:GPU does before jax 0.12.
        together: whether it makes one kernel of several results, as XLA:GPU does.
        weighing: how it weighs computing element-wise results again, where that is known.
    """

    flops: Mapping[str, float]
    bytes_per_second: float
    d2h_bytes_per_second: float = 0.0
    h2d_bytes_per_second: float = 0.0
    d2d_bytes_per_second: float = 0.0
    summing_rows: Mapping[str, float] = field(default_factory=dict)
    convolving: Mapping[str, float] = field(default_factory=dict)
    summing_places: Mapping[str, float] = field(default_factory=dict)
    cycle_seconds: float = 0.0
    beside_seconds: float = 0.0
    duplex_bytes_per_second: float = 0.0
    barriers_keep: bool = False
    stacks_at_once: bool = False
    together: bool = False
    weighing: Weighing | None = None

    def seconds(self, work: Work) -> float:
        """Roofline time (Williams et al. 2009): the slower of arithmetic and memory traffic."""
        rate = self._rate(work.dtype, self.summing_rows if work.rows else {})
        arithmetic = work.flops / rate + work.cycles * self.cycle_seconds
        traffic = work.nbytes / self.bytes_per_second
        return max(arithmetic, traffic) + work.apart / self.bytes_per_second

    def _rate(self, dtype: str, of_some: Mapping[str, float]) -> float:
        return of_some.get(dtype) or self.flops.get(dtype) or self.flops["float32"]

    def convolution_seconds(self, eqn: Any, work: Work, devices: int = 1) -> float:
        """The slower of memory traffic and of arithmetic with what comes beside it.

        ``work`` is that of one of ``devices`` which share it.
        """
        summed = sums_over_places(eqn)
        rate = self._rate(work.dtype, self.summing_places if summed else self.convolving)
        beside = self.beside_seconds * (SUMMED if summed else 1)
        arithmetic = work.flops / rate + steps_beside(eqn) / devices * beside
        return max(arithmetic, work.nbytes / self.bytes_per_second)

    def link_seconds(self, transfer: Transfer, nbytes: int) -> float:
        """Time of a copy to (``"send"``) or from (``"fetch"``) host memory, alone on its link.

        Raises:
            TargetError: the rate of that link is not known.
        """
        rate = self.d2h_bytes_per_second if transfer == "send" else self.h2d_bytes_per_second
        if not rate:
            raise TargetError(
                "the rates have no host link, and the schedule moves values to host memory: give "
                "Rates d2h_bytes_per_second and h2d_bytes_per_second."
            )
        return nbytes / rate

    def collective_seconds(self, passed: Sent, nbytes: float) -> float:
        """Time of a collective: the slower of its links and its memory traffic, then latency."""
        linked = passed.nbytes / self.d2d_bytes_per_second if self.d2d_bytes_per_second else 0.0
        return max(linked, nbytes / self.bytes_per_second) + passed.seconds


def op_seconds(op: Op, rates: Rates, axes: Axes = NO_AXES, fewer_bytes: int = 0) -> float:
    """Seconds of one execution of an operation that runs as a kernel of its own.

    A loop counts its body once per iteration (a ``while`` once: nothing says how often); an
    operation with programs inside (a call, a branch) counts its largest one, fused as the step
    itself is; a collective what each device sends.

    Args:
        op: the operation.
        rates: of the device.
        axes: sizes of the mesh axes around it, by name.
        fewer_bytes: of what a product gives so many are not written.
    """
    if op.loop is not None:
        return op.loop.length * block_seconds(op.loop.body, rates, axes)
    eqn, parts = op.eqn, exchange(op)
    work = work_of(eqn)
    if work is not None:
        work = work._replace(
            flops=work.flops / parts.devices,
            nbytes=work.nbytes * parts.share - fewer_bytes,
            cycles=work.cycles / parts.devices,
            apart=work.apart * parts.share,
        )
        if eqn.primitive.name == "conv_general_dilated":
            computing = rates.convolution_seconds(eqn, work, parts.devices)
        else:
            computing = rates.seconds(work)
        return computing + exchange_seconds(op, rates)
    if (passed := sent(eqn, axes)) is not None:
        return rates.collective_seconds(passed, moved(eqn).nbytes)
    blocks = opened(eqn)
    if not blocks:
        nbytes = sum(v.nbytes for v in op.values) + sum(v.nbytes for v in op.outputs)
        return nbytes / rates.bytes_per_second + exchange_seconds(op, rates)
    times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    axes = within(eqn, axes)
    # What is inside is written for whole arrays.
    return times * parts.share * max(block_seconds(block, rates, axes) for block in blocks)


def exchange_seconds(op: Op, rates: Rates) -> float:
    """Seconds of what the compiler makes devices exchange for ``op``."""
    parts = exchange(op)
    if not parts.is_collective:
        return 0.0
    return rates.collective_seconds(parts.sent, 2.0 * parts.sent.nbytes)


def block_seconds(block: Block, rates: Rates, axes: Axes = NO_AXES) -> float:
    """Seconds of a line of operations, element-wise work fused."""
    fusion = fuse(block.inputs, block.ops, block.outputs)
    total = 0.0
    for op, kind, made in zip(block.ops, fusion.kinds, fusion.made, strict=True):
        if not made and op.loop is None:
            continue
        if kind is Kind.OPAQUE and not op.transfer:
            total += op_seconds(op, rates, axes)
        else:
            total += fusion.moved_bytes(op) / rates.bytes_per_second + exchange_seconds(op, rates)
    return total
