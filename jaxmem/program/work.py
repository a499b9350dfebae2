"""What one operation does: floating-point operations, and bytes to and from device memory.

Counts of the LAPACK routines are those of Golub and Van Loan, "Matrix Computations"; they are for
real numbers, and a complex one counts four times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxmem.attending import attended
from jaxmem.program.ir import aval_bytes
from jaxmem.work import Work

# XLA's TopK kernel takes up to 16; above that XLA sorts (openxla/xla, topk_specializer.cc).
_MOST_TOP_K = 16
_CAUSAL_MASKS = frozenset([2, 3])  # CAUSAL and PADDING_CAUSAL of JAX's cuDNN MaskType
_ROWS_FIRST = 0  # BTNH of JAX's cuDNN AttentionLayout; the other is BNTH


def work_of(eqn) -> Work | None:
    """The work of an equation that is a kernel or a call of its own.

    ``None`` where the operation has no entry here: a collective, a call, a branch, and everything
    that is known by its bytes alone.
    """
    counted = _COUNTED.get(eqn.primitive.name)
    return counted(eqn) if counted is not None else None


def moved(eqn) -> Work:
    """Every operand read once and every result written once."""
    return Work(0.0, _nbytes(eqn.invars) + _nbytes(eqn.outvars))


def _sums_rows(eqn) -> bool:
    """Whether a product sums the rows of both operands, as the gradient of a weight does."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, _ = eqn.params["dimension_numbers"]
    last = (v.aval.ndim - 1 for v in eqn.invars)
    return all(at not in dims for at, dims in zip(last, contracted, strict=True))


def arithmetic(eqn) -> float:
    """Floating-point operations of a matrix product or a convolution, 2 per multiply-add."""
    if eqn.primitive.name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contract)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth
    numbers = eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    per_output = math.prod(kernel) / max(kernel[numbers.rhs_spec[0]], 1)
    # Gradients of strided and of transposed convolutions: holes that dilation adds cost nothing.
    holes = math.prod(eqn.params["lhs_dilation"])
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * per_output / holes


def _nbytes(atoms) -> float:
    return float(sum(aval_bytes(v.aval) for v in atoms))


def _dtype(eqn) -> str:
    return str(eqn.invars[0].aval.dtype)


def _computed(flops: float, eqn) -> Work:
    return Work(flops, moved(eqn).nbytes, _dtype(eqn))


def _product(eqn) -> Work:
    return _computed(arithmetic(eqn), eqn)._replace(rows=_sums_rows(eqn))


def _ragged_product(eqn) -> Work:
    """Every row meets one group's matrix: the work of one product, whatever the groups are."""
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (contract, _), _ = dims.dot_dimension_numbers
    left, made = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    depth = math.prod(left[d] for d in contract)
    if dims.lhs_ragged_dimensions[0] in contract:
        made = made[1:]  # a matrix for each group, of that group's rows alone
    return _computed(2.0 * math.prod(made) * depth, eqn)


def _scaled_product(eqn) -> Work:
    """``[B, M, K]`` with ``[B, N, K]``: scales cost their bytes."""
    return _computed(2.0 * math.prod(eqn.outvars[0].aval.shape) * eqn.invars[0].aval.shape[-1], eqn)


def _scaled_dot(eqn) -> Work:
    (contract, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[d] for d in contract)
    return _computed(2.0 * math.prod(eqn.outvars[0].aval.shape) * depth, eqn)


def _attention(backward: bool) -> Callable[[Any], Work]:
    def count(eqn) -> Work:
        params, query, key = eqn.params, eqn.invars[0].aval, eqn.invars[1].aval.shape
        length = key[1 if _number(params.get("layout")) == _ROWS_FIRST else 2]
        masked = _number(params.get("mask_type")) in _CAUSAL_MASKS
        made = attended(
            math.prod(query.shape),
            query.shape[-1],
            length,
            query.dtype.itemsize,
            backward=backward,
            causal=masked or bool(params.get("use_causal_mask")),
            window=params.get("sliding_window_length") or 0,
        )
        return _computed(made.flops, eqn)._replace(cycles=made.cycles, apart=made.apart)

    return count


def _number(setting: Any) -> Any:
    return getattr(setting, "value", setting)


def _pallas(eqn) -> Work:
    """What the kernel's author says; operands and results otherwise."""
    said = eqn.params.get("cost_estimate")
    if said is None:
        return moved(eqn)
    return Work(float(said.flops), float(said.bytes_accessed), _dtype(eqn))


def _gather(eqn) -> Work:
    """Reads the indices and what they point at, not the whole table."""
    return Work(0.0, _nbytes(eqn.invars[1:]) + 2 * _nbytes(eqn.outvars))


def _scatter(eqn) -> Work:
    """In place: reads the updates and their indices, reads and writes what they fall on."""
    _, indices, updates = (aval_bytes(v.aval) for v in eqn.invars[:3])
    return Work(0.0, indices + 3.0 * updates)


def _update_slice(eqn) -> Work:
    return Work(0.0, 2.0 * aval_bytes(eqn.invars[1].aval))


def _sort(eqn) -> Work:
    """A radix sort: one pass for each byte of the keys, each reads and writes everything.

    Adinets and Merrill 2022, "Onesweep"; one more reading counts the digits.
    """
    keys = eqn.invars[: eqn.params.get("num_keys", 1)]
    passes = sum(v.aval.dtype.itemsize for v in keys)
    return Work(0.0, (2 * passes + 1) * _nbytes(eqn.invars))


def _top_k(eqn) -> Work:
    if eqn.params["k"] <= _MOST_TOP_K:
        return moved(eqn)
    operand = eqn.invars[0].aval
    indices = math.prod(operand.shape) * 4
    passes = 2 * operand.dtype.itemsize + 1
    return Work(0.0, passes * (aval_bytes(operand) + indices))


def _prefixes(eqn) -> Work:
    """JAX's associative scan: halving and doubling, each about 1.5 times operand and result."""
    return Work(0.0, 3 * moved(eqn).nbytes)


def _fourier(eqn) -> Work:
    """``5 n log2 n`` for each transform (Cooley and Tukey), half of it for real numbers.

    One pass over memory for each dimension.
    """
    lengths = eqn.params["fft_lengths"]
    complex_to_complex = all(v.aval.dtype.kind == "c" for v in (eqn.invars[0], eqn.outvars[0]))
    whole = max(math.prod(v.aval.shape) for v in (eqn.invars[0], eqn.outvars[0]))
    flops = 5.0 * whole * sum(math.log2(n) for n in lengths if n > 1)
    work = _computed(flops if complex_to_complex else flops / 2, eqn)
    return work._replace(nbytes=work.nbytes * len(lengths))


def _triangular_solve(eqn) -> Work:
    """``n^2`` for each right-hand side, of which there are as many as columns."""
    size = eqn.invars[0].aval.shape[-1]
    return _factored(float(math.prod(eqn.invars[1].aval.shape)) * size, eqn)


def _dense(count: Callable[[float, float], float]) -> Callable[[Any], Work]:
    """Work of a routine on ``[..., rows, columns]``; the count takes the longer side first."""

    def work(eqn) -> Work:
        *batch, rows, columns = eqn.invars[0].aval.shape
        long, short = float(max(rows, columns)), float(min(rows, columns))
        return _factored(math.prod(batch) * count(long, short), eqn)

    return work


def _factored(flops: float, eqn) -> Work:
    return _computed(flops * (4 if eqn.invars[0].aval.dtype.kind == "c" else 1), eqn)


def _qr(m: float, n: float) -> float:
    return 2 * m * n**2 - 2 * n**3 / 3


_COUNTED: dict[str, Callable[[Any], Work]] = {
    "dot_general": _product,
    "conv_general_dilated": _product,
    "ragged_dot_general": _ragged_product,
    "scaled_dot": _scaled_dot,
    "scaled_matmul": _scaled_product,
    "scaled_matmul_wrapper": _scaled_product,
    "pallas_call": _pallas,
    "gather": _gather,
    "dynamic_update_slice": _update_slice,
    "sort": _sort,
    "top_k": _top_k,
    "fft": _fourier,
    "triangular_solve": _triangular_solve,
    "cholesky": _dense(lambda m, n: n**3 / 3),
    "lu": _dense(lambda m, n: m * n**2 - n**3 / 3),
    "qr": _dense(lambda m, n: 2 * _qr(m, n)),
    "geqrf": _dense(_qr),
    "householder_product": _dense(_qr),
    "eigh": _dense(lambda m, n: 9 * n**3),
    "eig": _dense(lambda m, n: 25 * n**3),
    "svd": _dense(lambda m, n: 4 * m**2 * n + 8 * m * n**2 + 9 * n**3),
}
for _name in ("fwd", "bwd"):
    for _form in (f"{_name}_wrapper", f"fp8_{_name}_wrapper", _name):
        _COUNTED[f"dot_product_attention_{_form}"] = _attention(_name == "bwd")
for _name in ("", "-add", "-sub", "-mul", "-min", "-max", "_add", "_mul", "_min", "_max"):
    _COUNTED[f"scatter{_name}"] = _scatter
for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    _COUNTED[_name] = _prefixes
# The jaxprs inside these combine two numbers.
for _name in ("reduce", "reduce_window", "select_and_scatter", "select_and_gather_add"):
    _COUNTED[_name] = moved
