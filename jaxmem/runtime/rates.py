"""How fast a target works, as predictions count: its rates, and what is known of its kernels."""

from __future__ import annotations

from jaxmem._compat import BARRIERS_KEEP_PLACES, STACKS_MADE_AT_ONCE
from jaxmem.program.cost import Rates
from jaxmem.program.weighing import Weighing
from jaxmem.targets import table
from jaxmem.targets.target import Target

# What TF32 products whose operands both have to be turned make over what others do, and what the
# gradients of kernels do.
_BOTH_TURNED, _KERNELS_TURNED = 0.69, 0.54


def rates_of(target: Target) -> Rates:
    """How fast a target works."""
    return Rates(
        dict(target.flops),
        target.hbm_bytes_per_second,
        target.d2h_bytes_per_second,
        target.h2d_bytes_per_second,
        target.d2d_bytes_per_second,
        summing_rows=_turned(target, _BOTH_TURNED),
        convolving=_convolving(target),
        summing_places=_turned(target, _KERNELS_TURNED),
        cycle_seconds=_cycle(target),
        beside_seconds=_beside(target) if target.platform == "gpu" else 0.0,
        duplex_bytes_per_second=target.duplex_bytes_per_second,
        barriers_keep=target.platform == "gpu" and BARRIERS_KEEP_PLACES,
        stacks_at_once=target.platform == "gpu" and STACKS_MADE_AT_ONCE,
        together=target.platform == "gpu",
        weighing=_weighing(target),
    )


def _weighing(target: Target) -> Weighing | None:
    """How fast XLA takes a GPU of the table to be: all its scalar units, two operations a cycle."""
    if target.platform != "gpu" or not target.model:
        return None
    entry = table.gpu(target.model)
    units = entry["sm_count"] * table.sm_limits(entry["compute_capability"])["fpus_per_sm"]
    return Weighing(
        2e9 * units * entry["clock_ghz"],
        entry["memory_bytes_per_second"],
        widens=float(entry["compute_capability"]) < 9.0,
    )


def _cycle(target: Target) -> float:
    """Seconds of a cycle of one multiprocessor, all of a GPU of the table being at work."""
    if target.platform != "gpu" or not target.model:
        return 0.0
    entry = table.gpu(target.model)
    return 1e-9 / (entry["clock_ghz"] * entry["sm_count"])


def _turned(target: Target, share: float) -> dict[str, float]:
    """How fast a Hopper multiplies float32 where neither operand's summed axis is contiguous.

    Its tensor cores take TF32 operands only so (PTX ISA, ``wgmma``): of 8192 x 8192 an H200 makes
    256 TFLOP/s that way, 371 where one of them is so and 387 where both are; of 4096 x 4096 228,
    322 and 364, and in bfloat16 there is no such difference. The gradients of ResNet-152's kernels
    make 173 to 195, where its convolutions make 365 to 408.
    """
    if not target.model or table.gpu(target.model)["compute_capability"] != "9.0":
        return {}
    return {"float32": share * target.flops_per_second("float32")}


def _convolving(target: Target) -> dict[str, float]:
    """How fast a GPU convolves float32, where that is faster than what it multiplies.

    Convolutions of 256 channels run at 360 to 412 of the 495 TFLOP/s of an H200. They are taken for
    as near to the table's rate as products of bfloat16 were found to be.
    """
    if not target.model or "bfloat16" not in target.flops:
        return {}
    peak = table.gpu(target.model)["flops"]
    reached = target.flops["bfloat16"] / peak["bfloat16"]
    return {"float32": max(target.flops["float32"], peak["float32"] * reached)}


def _beside(target: Target) -> float:
    """14.4 ps a place and tap where products of bfloat16 run at 735 TFLOP/s, as on an H200."""
    return 14.4e-12 * 735e12 / target.flops_per_second("bfloat16")
