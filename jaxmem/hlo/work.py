"""What an instruction of a compiled program does: arithmetic, and bytes of device memory.

Enough to tell how long it takes beside others. Products and convolutions are counted from their
shapes, wherever the compiler put them: as they are, in a fusion, or in a call of cuBLAS or cuDNN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from jaxmem.attending import Attended, attended
from jaxmem.hlo.module import Computation, Instruction, Module, Shape
from jaxmem.hlo.wire import WireError, fields, number, numbers
from jaxmem.work import Work

# They give names to what is there.
_NAMES = frozenset(
    "parameter constant tuple get-tuple-element bitcast opt-barrier after-all add-dependency "
    "partition-id replica-id domain".split()
)
_ROOM = "AllocateBuffer"  # A call that gives a name to memory and leaves in it what is there.
# Of their first operand they read what they return.
_PARTS = frozenset(["dynamic-slice", "slice", "gather"])
# They write into their first operand.
_IN_PLACE = frozenset(["dynamic-update-slice", "scatter"])
_AGAIN = frozenset(["bitcast", "copy", "convert"])
# cuBLAS's calls of one product.
PRODUCTS = ("__cublas$gemm", "__cublas$lt$matmul")
_ATTENTION = "__cudnn$fmha"
# cuDNN's calls, and where the image of a convolution's result and its kernel are in them: -1 is
# what they return.
CONVOLUTIONS = {
    "__cudnn$convForward": (-1, 1),
    "__cudnn$convForwardGraph": (-1, 1),
    "__cudnn$convBiasActivationForward": (-1, 1),
    "__cudnn$convBackwardInput": (0, 1),
    "__cudnn$convBackwardFilter": (1, -1),
}


def is_name(instruction: Instruction) -> bool:
    """Whether an instruction does nothing: it only gives a name to what is there."""
    return instruction.opcode in _NAMES or instruction.target == _ROOM


def work_of(module: Module, instruction: Instruction) -> Work:
    """The work of an instruction that runs once, without what loops, calls and branches run.

    Calls that are not known count by their bytes.

    Raises:
        WireError: a call of cuBLAS or cuDNN does not say what it does.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem.hlo.module import read_module
    >>> a = jnp.ones((64, 32))
    >>> module = read_module(jax.jit(lambda a: a @ a.T).lower(a).compile())
    >>> sum(work_of(module, module.instructions[i]).flops for i in module.entry.sequence)
    262144.0
    """
    if is_name(instruction):
        return Work(0.0, 0, "")
    nbytes = _nbytes(module, instruction)
    if instruction.target.startswith(_ATTENTION):
        made = _attention(module, instruction)
        return Work(made.flops, nbytes, _dtype(module, instruction), made.cycles, made.apart)
    found = [*_arithmetic(module, instruction)]
    flops = sum(flops for _, flops in found)
    if not found:
        return Work(flops, nbytes, "")
    first, _ = found[0]
    return Work(flops, nbytes, _dtype(module, first), rows=_sums_rows(module, first))


def _dtype(module: Module, one: Instruction) -> str:
    return module.instructions[one.operands[0]].shape.dtype


def _arithmetic(module: Module, one: Instruction) -> Iterator[tuple[Instruction, float]]:
    """The products and convolutions that an instruction fuses, and what each computes."""
    if one.opcode == "fusion":
        for inner in _inside(module, one):
            yield from _arithmetic(module, inner)
    elif flops := _flops(module, one):
        yield one, flops


def _flops(module: Module, one: Instruction) -> float:
    if one.opcode == "convolution":
        return _convolution(module, one, -1, 1)
    if one.opcode == "custom-call" and one.target in CONVOLUTIONS:
        return _convolution(module, one, *CONVOLUTIONS[one.target])
    if (summed := _summed(one)) is None:
        return 0.0
    left = module.instructions[one.operands[0]].shape.dims
    return 2.0 * math.prod(_result(one).dims) * math.prod(left[d] for d in summed[0])


def _summed(one: Instruction) -> tuple[list[int], list[int]] | None:
    """Axes of both operands over which a product sums; ``None`` of all else."""
    if one.opcode == "dot":
        # xla_data.proto, DotDimensionNumbers: lhs_ and rhs_contracting_dimensions.
        said = [(n, numbers(v)) for n, v in fields(one.raw_dot)]
        left, right = ([d for n, dims in said if n == at for d in dims] for at in (1, 2))
        return left, right
    if one.opcode != "custom-call" or not one.target.startswith(PRODUCTS):
        return None
    where = "gemm_backend_config", "dot_dimension_numbers"
    left, right = (
        [int(d) for d in _config(one, *where, f"{side}_contracting_dimensions")]
        for side in ("lhs", "rhs")
    )
    return left, right


def _sums_rows(module: Module, one: Instruction) -> bool:
    """Whether a product sums the rows of both operands."""
    if (summed := _summed(one)) is None:
        return False
    shapes = (module.instructions[operand].shape for operand in one.operands)
    return all(len(shape.dims) - 1 not in axes for shape, axes in zip(shapes, summed, strict=False))


def _convolution(module: Module, one: Instruction, image: int, kernel: int) -> float:
    """Every place of the result is a product with the kernel, whichever way it is computed."""
    shapes = [
        _result(one) if at < 0 else module.instructions[one.operands[at]].shape
        for at in (image, kernel)
    ]
    # xla_data.proto, ConvolutionDimensionNumbers: kernel_output_feature_dimension; 0 is left out.
    features = next((number(v) for n, v in fields(one.raw_convolution) if n == 4), 0)
    taps = math.prod(shapes[1].dims) / max(1, shapes[1].dims[features])
    return 2.0 * math.prod(shapes[0].dims) * taps


def _attention(module: Module, one: Instruction) -> Attended:
    said = _config(one, "cudnn_fmha_backend_config")
    query = module.instructions[one.operands[0]].shape
    return attended(
        query.size,
        query.dims[-1],
        int(said["intermediate_tensor_shape"]["dimensions"][-1]),
        query.nbytes // max(query.size, 1),
        backward="Backward" in one.target,
        causal=str(said.get("mask_type", "")).endswith("CAUSAL"),
        window=int(said.get("sliding_window_length") or 0),
    )


def _config(one: Instruction, *names: str) -> dict[str, Any]:
    """What the compiler says of a call."""
    try:
        found = json.loads(one.raw_config)
        for name in names:
            found = found[name]
    except (ValueError, LookupError, TypeError) as error:
        raise WireError(f"{one.name} ({one.target}) has no {' / '.join(names)}") from error
    return found


def _result(one: Instruction) -> Shape:
    """What a call returns, without the room that it works in."""
    return one.shape.parts[0] if one.shape.parts else one.shape


def _inside(module: Module, fusion: Instruction) -> list[Instruction]:
    found: list[Computation] = [module.computations[c] for c in fusion.called]
    return [module.instructions[i] for computation in found for i in computation.instructions]


def _nbytes(module: Module, one: Instruction) -> int:
    """Bytes that an instruction reads and writes: slices where it has no use for the rest."""
    if one.opcode != "fusion":
        read = sum(_read(module, one, at, {}) for at in range(len(one.operands)))
        return read + _written(module, one)
    inside = _inside(module, one)
    readers: dict[int, list[Instruction]] = {}
    for inner in inside:
        for operand in dict.fromkeys(inner.operands):
            readers.setdefault(operand, []).append(inner)
    parameters = [inner for inner in inside if inner.opcode == "parameter"]
    read = sum(_read_of(module, inner, readers) for inner in parameters)
    return read + _written(module, module.root(one.called[0]))


def _read_of(module: Module, value: Instruction, readers: dict[int, list[Instruction]]) -> int:
    """Bytes that are read of a value inside a fusion."""
    read = 0
    for reader in readers.get(value.id, ()):
        for at in (n for n, operand in enumerate(reader.operands) if operand == value.id):
            read += _read(module, reader, at, readers)
    return min(read, value.shape.nbytes)


def _read(
    module: Module, reader: Instruction, at: int, readers: dict[int, list[Instruction]]
) -> int:
    """Bytes that an instruction reads of its operand of number ``at``."""
    if at == 0 and reader.opcode in _PARTS:
        return reader.shape.nbytes
    if at == 0 and reader.opcode in _IN_PLACE:
        return 0
    if readers and reader.opcode in _AGAIN and reader.id in readers:
        return _read_of(module, reader, readers)
    return module.instructions[reader.operands[at]].shape.nbytes


def _written(module: Module, root: Instruction) -> int:
    """Bytes that are written of a result."""
    if root.opcode == "tuple":
        return sum(_written(module, module.instructions[part]) for part in root.operands)
    if root.opcode in _AGAIN and module.instructions[root.operands[0]].opcode in _IN_PLACE:
        root = module.instructions[root.operands[0]]
    if root.opcode in _IN_PLACE:
        new = root.operands[-1 if root.opcode == "scatter" else 1]
        return module.instructions[new].shape.nbytes
    return root.shape.nbytes
