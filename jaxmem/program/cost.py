"""What an operation costs: floating-point operations and bytes moved, turned into seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxmem.errors import TargetError
from jaxmem.program.ir import Op, Transfer, aval_bytes
from jaxmem.program.primitives import inner_jaxprs


@dataclass(frozen=True)
class Rates:
    """How fast a device works.

    Attributes:
        flops: FLOP/s by dtype name; a dtype that is not listed runs at the float32 rate.
        bytes_per_second: device memory bandwidth.
        d2h_bytes_per_second: device to host; 0 where nothing is moved.
        h2d_bytes_per_second: host to device; 0 where nothing is moved.
    """

    flops: Mapping[str, float]
    bytes_per_second: float
    d2h_bytes_per_second: float = 0.0
    h2d_bytes_per_second: float = 0.0

    def seconds(self, flops: float, dtype: str, nbytes: float) -> float:
        """Roofline time (Williams et al. 2009): the slower of arithmetic and memory traffic."""
        rate = self.flops.get(dtype) or self.flops["float32"]
        return max(flops / rate, nbytes / self.bytes_per_second)

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


def op_seconds(op: Op, rates: Rates) -> float:
    """Seconds of one execution of an operation that runs as a kernel of its own.

    Element-wise operations count their memory traffic only; a loop counts its body once per
    iteration; an operation with programs inside (a call, a branch) counts its largest one.
    """
    if op.loop is not None:
        body = sum(op_seconds(inner, rates) for inner in op.loop.body.ops)
        return body * op.loop.length
    moved = sum(v.nbytes for v in op.values) + sum(v.nbytes for v in op.outputs)
    return _eqn_seconds(op.eqn, moved, rates)


def _eqn_seconds(eqn, moved: float, rates: Rates) -> float:
    name = eqn.primitive.name
    if name in ("dot_general", "conv_general_dilated"):
        dtype = str(eqn.invars[0].aval.dtype)
        return rates.seconds(arithmetic(eqn), dtype, moved)
    inner = inner_jaxprs(eqn)
    if not inner:
        return moved / rates.bytes_per_second
    times = eqn.params.get("length", 1) if name == "scan" else 1
    longest = max(sum(_eqn_seconds(e, _moved(e), rates) for e in jaxpr.eqns) for jaxpr in inner)
    return times * longest


def _moved(eqn) -> float:
    return sum(aval_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars))


def arithmetic(eqn) -> float:
    """Floating-point operations of a matrix product or a convolution, 2 per multiply-add."""
    if eqn.primitive.name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contract)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth
    numbers = eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    if all(d == 1 for d in eqn.params["lhs_dilation"]):
        per_output = math.prod(kernel) / max(kernel[numbers.rhs_spec[0]], 1)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * per_output
    # A strided convolution's input gradient: the holes that dilation adds cost nothing.
    per_input = math.prod(kernel) / max(kernel[numbers.rhs_spec[1]], 1)
    groups = eqn.params["feature_group_count"]
    return 2.0 * math.prod(eqn.invars[0].aval.shape) * per_input / groups
