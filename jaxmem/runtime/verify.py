"""Check that a compiled program is what its plan says."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import dtypes

from jaxmem.errors import VerificationError
from jaxmem.program.ir import Block, Op
from jaxmem.program.primitives import Kind, kind_of
from jaxmem.program.source import origin_of
from jaxmem.runtime.alike import named_alike
from jaxmem.targets.compiling import CompiledMemory
from jaxmem.units import format_bytes

_KERNELS = ("dot_general", "conv_general_dilated")
# Only kernels count: element-wise work that the user does late anyway, such as the derivative of
# an activation, is recomputed under the same name and is never merged. A kernel is known by its
# own name, which it keeps when XLA makes something else of it (a reduction), or by its opcode:
# XLA gives it the name of what it folds into it, such as a transposition of the result (every
# layer of an Equinox MLP under vmap).
_TAG = re.compile(r"jaxmem\.recompute\.[^/\")]+")
_NAMED = re.compile(rf"(jaxmem\.recompute\.[^/\")]+)\)*/(?:{'|'.join(_KERNELS)})")
# XLA keeps one of two loop bodies that are equal, and its names; the loops keep their own.
_WHILE = re.compile(r" while\(.*op_name=\"[^\"]*(jaxmem\.recompute\.[^/\")]+)\)*/while\"")
_OPCODE = re.compile(r" (?:dot|convolution)\(| custom-call\(.*(?:gemm|matmul|conv|cublas|cudnn)")
# Alignment, and how the compiler orders copies, leave it within this share of what is simulated.
_HOST_SHARE = 0.95
_TO_HOST = re.compile(
    r"= \(?(\w+)\[([\d,]*)\]\{[^}]*S\(5\)[^}]*\}"
    r"(?:, \w+\[[\d,]*\]\{[^}S]*\}, u32\[\][^)]*\) copy-start| dynamic-update-slice)\("
)
# A rewrite changes fusion, and fusion changes rounding. FACTS section 5: the error of a rewrite
# may be a few times the error of the plain program, not more.
_ROUNDING = {
    "float64": 1e-9,
    "float32": 2e-3,
    "bfloat16": 6e-2,
    "float16": 1e-2,
    "complex128": 1e-9,
    "complex64": 2e-3,
}
_NOISE = 8.0


def undone(block: Block, hlo_text: str) -> tuple[Op, ...]:
    """Recomputed kernels that the compiler merged with the originals.

    A recomputation is found in the compiled program by the name that was put on it; XLA drops
    the name together with the instruction when it merges the copy with the original.

    Args:
        block: the schedule that was compiled.
        hlo_text: the optimised program.

    Returns:
        The user's own operations of which no copy is left in one of the recomputations.
    """
    kernels, loops = _kernel_tags(hlo_text), set(_WHILE.findall(hlo_text))
    gone = {
        tag: ops
        for (tag, in_loop), ops in _recomputed_kernels(block).items()
        if tag not in kernels and not (in_loop and tag in loops)
    }
    alike = named_alike(block) if gone else {}
    missing = [ops for tag, ops in gone.items() if kernels.isdisjoint(alike.get(tag, ()))]
    return tuple(op.origin for ops in missing for op in ops)


def _kernel_tags(hlo_text: str) -> set[str]:
    """The recomputations that have a matrix product or a convolution in the compiled program."""
    found: set[str] = set()
    for line in hlo_text.splitlines():
        if "jaxmem.recompute." in line:
            found.update(_NAMED.findall(line))
            if _OPCODE.search(line):
                found.update(_TAG.findall(line))
    return found


def _recomputed_kernels(block: Block, within: str = "") -> dict[tuple[str, bool], list[Op]]:
    """The recomputed matrix products, convolutions and loops, by recomputation.

    Beside the name of each whether these are the iterations of a recomputed loop, ``within``.
    """
    found: dict[tuple[str, bool], list[Op]] = {}
    for op in block.ops:
        if op.recompute and not op.barrier and op.name in _KERNELS:
            found.setdefault((op.recompute, op.recompute == within), []).append(op)
        if op.loop is not None and kind_of(op) is Kind.OPAQUE:
            for key, ops in _recomputed_kernels(op.loop.body, op.recompute or within).items():
                found.setdefault(key, []).extend(ops)
    return found


def not_on_host(
    block: Block, hlo_text: str, memory: CompiledMemory, temp_bytes: int, argument_bytes: int = 0
) -> list[str]:
    """What of a plan's host memory the compiler did not use, in words; empty if nothing.

    XLA cancels a copy to the host with the copy back when nothing keeps them apart, without a
    word. A copy that it made is seen as a ``copy-start`` into memory space 5 (pinned host), in
    loops as an update of a stacked buffer there; it has lost its name by then, so copies are
    matched by their bytes. In nested loops some look different; where all the planned bytes are
    in host memory nothing was dropped.

    Args:
        block: the schedule that was compiled.
        hlo_text: the optimised program.
        memory: what the compiler says it uses.
        temp_bytes: of the temporaries that should be in host memory, as simulated.
        argument_bytes: of the arguments that should be in host memory; 0 if not known.
    """
    problems = []
    found = _host_copies(hlo_text)
    planned = Counter(nbytes for nbytes, _ in _sends(block))
    missing = planned - found
    fewer = memory.host_temp_bytes < _HOST_SHARE * temp_bytes or not temp_bytes
    if fewer and missing and found.total() < planned.total():
        first = next(op for nbytes, op in _sends(block) if nbytes in missing)
        problems.append(
            f"the compiler dropped {planned.total() - found.total()} of {planned.total()} copies "
            f"to host memory, such as that of {origin_of(first).label}"
        )
    if memory.host_argument_bytes < argument_bytes:
        problems.append(
            f"the compiler put {format_bytes(memory.host_argument_bytes)} of the arguments in "
            f"host memory instead of {format_bytes(argument_bytes)}"
        )
    return problems


def _sends(block: Block, times: int = 1) -> Iterator[tuple[int, Op]]:
    """Bytes and operation of every copy to the host; in loops of what it is stacked to."""
    for op in block.ops:
        if op.transfer == "send":
            yield op.outputs[0].host_bytes * times, op
        if op.loop is not None:
            yield from _sends(op.loop.body, op.loop.length)


def _host_copies(hlo_text: str) -> Counter[int]:
    """How many copies of each size the compiled program makes to host memory."""
    found: Counter[int] = Counter()
    for line in hlo_text.splitlines():
        if "S(5)" in line and (match := _TO_HOST.search(line)):
            dtype, dims = match.groups()
            bits = re.search(r"\d+", dtype)
            size = max(int(bits[0]) // 8, 1) if bits else 1
            found[size * math.prod(int(d) for d in dims.split(",") if d)] += 1
    return found


def compare(
    reference: Sequence[Any],
    outputs: Sequence[Any],
    paths: Sequence[str],
    function: str,
    nearby: Callable[[], Sequence[Any]] | None = None,
) -> None:
    """Raise unless two runs of a step agree up to rounding.

    Floats and complex numbers must agree within a dtype-dependent fraction of the leaf's largest
    magnitude; everything else exactly. A leaf that differs more may still be right where the step
    itself magnifies rounding: Adam turns a gradient that is zero but for rounding into a full
    update. Then it may differ by a few times what the step as written differs from itself on
    inputs that were changed in their last bit.

    Args:
        reference: results of the step as written.
        outputs: results of the planned step.
        paths: tree path of each result.
        function: name of the step.
        nearby: gives the results of the step as written on nearby inputs; asked for only when a
            leaf differs by more than rounding.

    Raises:
        VerificationError: a leaf differs; it is named.
    """
    others: Sequence[Any] | None = None
    for number, (path, expected, found) in enumerate(zip(paths, reference, outputs, strict=True)):
        message = _difference(expected, found)
        if message and nearby is not None and _ROUNDING.get(str(expected.dtype)):
            others = nearby() if others is None else others
            noise = _NOISE * _relative_error(expected, others[number])
            message = _difference(expected, found, noise)
        if message:
            raise VerificationError(
                f"{function}: result {path} differs from the step as written {message}."
            )


def nudged(leaf: Any, seed: int) -> Any:
    """``leaf`` with every float moved by one unit in its last place, up or down at random."""
    tolerance = _ROUNDING.get(str(leaf.dtype))
    if tolerance is None or np.iscomplexobj(leaf):
        return leaf
    up = np.random.default_rng(seed).integers(0, 2, leaf.shape, dtype=bool)
    step = jax.numpy.finfo(leaf.dtype).eps
    return leaf * jax.numpy.where(up, 1 + step, 1 - step).astype(leaf.dtype)


def _relative_error(expected: Any, found: Any) -> float:
    """Largest difference over the largest magnitude; infinite where what is not finite differs."""
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, b = np.asarray(expected).astype(wide), np.asarray(found).astype(wide)
    finite = np.isfinite(a)
    if (
        not np.array_equal(a[~finite], b[~finite], equal_nan=True)
        or not np.isfinite(b[finite]).all()
    ):
        return math.inf
    a, b = a[finite], b[finite]
    scale = np.max(np.abs(a), initial=0.0) or 1.0
    return float(np.max(np.abs(a - b), initial=0.0) / scale)


def _difference(expected: Any, found: Any, noise: float = 0.0) -> str:
    """How two results differ, in words; ``""`` if they agree."""
    is_key = dtypes.issubdtype(expected.dtype, dtypes.prng_key)  # pyright: ignore[reportPrivateImportUsage]
    if is_key:
        expected, found = jax.random.key_data(expected), jax.random.key_data(found)
    tolerance = _ROUNDING.get(str(expected.dtype))
    if tolerance is None:
        same = np.array_equal(np.asarray(expected), np.asarray(found))
        return "" if same else "(it is not a float, so it must be equal)"
    error, allowed = _relative_error(expected, found), max(tolerance, noise)
    if error <= allowed:
        return ""
    return f"by {error:.1e} of its largest magnitude (allowed for {expected.dtype}: {allowed:.0e})"
