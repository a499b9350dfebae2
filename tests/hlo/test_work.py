"""Arithmetic and bytes of compiled programs are those of the functions they were made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxmem.attending import attended
from jaxmem.hlo.module import Computation, Instruction, Module, read_module
from jaxmem.hlo.schedule import scheduled
from jaxmem.hlo.wire import WireError
from jaxmem.hlo.work import work_of
from jaxmem.program.work import arithmetic
from jaxmem.targets import Target
from jaxmem.targets.compiling import compile_for
from jaxmem.work import Work
from tests.messages import field_bytes

H200 = Target("h200")
COUNTED = ("dot_general", "conv_general_dilated")


def shaped(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def compiled(function, *args) -> Module:
    return read_module(compile_for(H200, function, args).executable)


def works(module: Module) -> list[tuple[int, Work]]:
    """How often each instruction runs, and its work."""
    schedule = scheduled(module)
    return [(schedule.turns[one.computation], work_of(module, one)) for one in schedule.order]


def counted(jaxpr) -> float:
    """Floating-point operations of products and convolutions, as the function has them."""
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [p.jaxpr for p in eqn.params.values() if isinstance(p, jax.extend.core.ClosedJaxpr)]
        total += eqn.params.get("length", 1) * sum(map(counted, inner))
        if eqn.primitive.name in COUNTED:
            total += arithmetic(eqn)
    return total


def product(a, b):
    return a @ b


def batched(a, b):
    return jnp.einsum("bij,bkj->bik", a, b)


def layers(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()


def convolved(x, k, stride=1, groups=1):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, k, (stride, stride), "SAME", dimension_numbers=dims, feature_group_count=groups
    )


def gradients(function):
    return jax.grad(lambda x, w: jnp.square(function(x, w)).sum(), argnums=(0, 1))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (product, (shaped(256, 512), shaped(512, 384))),
        (product, (shaped(256, 512, dtype="bfloat16"), shaped(512, 384, dtype="bfloat16"))),
        (batched, (shaped(4, 128, 64), shaped(4, 96, 64))),
        (gradients(product), (shaped(256, 512), shaped(512, 384))),
        (jax.grad(layers, argnums=1), (shaped(128, 64), shaped(6, 64, 64))),
        (convolved, (shaped(4, 16, 16, 32), shaped(3, 3, 32, 64))),
        (gradients(convolved), (shaped(4, 16, 16, 32), shaped(3, 3, 32, 64))),
        (lambda x, k: convolved(x, k, 2), (shaped(4, 16, 16, 32), shaped(3, 3, 32, 64))),
        (lambda x, k: convolved(x, k, 1, 4), (shaped(4, 16, 16, 32), shaped(3, 3, 8, 64))),
    ],
)
def test_arithmetic_is_that_of_the_function(function, args):
    expected = counted(jax.make_jaxpr(function)(*args).jaxpr)
    found = works(compiled(function, *args))
    assert expected > 0
    assert sum(turns * work.flops for turns, work in found) == expected
    assert {w.dtype for _, w in found if w.flops} == {str(args[0].dtype)}


def test_element_wise_work_reads_operands_and_writes_results():
    found = works(compiled(lambda a, b: jnp.tanh(a) * b + 1, shaped(64, 32), shaped(64, 32)))
    assert sum(work.nbytes for _, work in found) == 3 * 64 * 32 * 4


def test_of_a_slice_only_that_is_read():
    def step(table, at):
        return jax.lax.dynamic_slice(table, (at, 0), (4, 32)) * 2

    found = works(compiled(step, shaped(4096, 32), shaped(dtype="int32")))
    assert 2 * 4 * 32 * 4 <= sum(work.nbytes for _, work in found) < 2 * 4 * 32 * 4 + 64


def test_what_is_updated_in_place_is_neither_read_nor_written_whole():
    def step(table, row, at):
        return jax.lax.dynamic_update_slice(table, row * 2, (at, 0))

    args = shaped(4096, 32), shaped(4, 32), shaped(dtype="int32")
    module = read_module(compile_for(H200, step, args, donate=(0,)).executable)
    assert sum(work.nbytes for _, work in works(module)) < 4 * 4 * 32 * 4


def test_names_of_what_is_there_take_nothing():
    module = compiled(lambda a: (a + 1, a), shaped(64, 32))
    names = ("parameter", "tuple", "get-tuple-element", "bitcast")
    found = [i for i in module.instructions.values() if i.opcode in names]
    assert found
    assert {work_of(module, one) for one in found} == {Work(0.0, 0, "")}


def called(target: str, config: str, *dims: tuple[int, ...]) -> tuple[Module, Instruction]:
    """A call of a library with operands and a result of these dimensions, the result last."""
    shapes = [
        field_bytes(2, 16) + b"".join(field_bytes(3, size) for size in shape) for shape in dims
    ]
    made = [
        Instruction(n, f"i{n}", "parameter", [], [], 0, n, "", "", 1, shape, b"", b"")
        for n, shape in enumerate(shapes[:-1])
    ]
    operands = [one.id for one in made]
    call = Instruction(
        9,
        "call",
        "custom-call",
        operands,
        [],
        0,
        0,
        "",
        target,
        1,
        shapes[-1],
        b"",
        config.encode(),
    )
    instructions = {one.id: one for one in [*made, call]}
    main = Computation(1, "main", list(instructions), 9, list(instructions))
    return Module("m", main, {1: main}, instructions), call


CONTRACTED = (
    '{"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"]}}}'
)
SCORES = (
    '{"cudnn_fmha_backend_config":{"mask_type":"%s",'
    '"intermediate_tensor_shape":{"dimensions":["2","8","64","128"]}}}'
)


LONG = SCORES.replace("128", "4096")


@pytest.mark.parametrize(
    ("target", "config", "dims", "flops"),
    [
        ("__cublas$gemm", CONTRACTED, ((2, 8, 16), (2, 16, 4), (2, 8, 4)), 2 * 2 * 8 * 16 * 4),
        ("__cublas$lt$matmul", CONTRACTED, ((2, 8, 16), (2, 16, 4), (2, 8, 4)), 2 * 2 * 8 * 16 * 4),
        ("__cudnn$fmhaSoftmax", SCORES % "NO_MASK", ((2, 8, 64, 32),) * 2, 4 * 16 * 64 * 32 * 128),
        ("__cudnn$fmhaSoftmax", SCORES % "CAUSAL", ((2, 8, 64, 32),) * 2, 4 * 16 * 64 * 32 * 128),
        (
            *("__cudnn$fmhaSoftmax", LONG % "CAUSAL", ((2, 8, 64, 32),) * 2),
            2 * 16 * 64 * 32 * (4096 + 256),
        ),
        (
            *("__cudnn$fmhaSoftmaxBackward", SCORES % "NO_MASK"),
            *(((2, 8, 64, 32),) * 2, 10 * 16 * 64 * 32 * 128),
        ),
        ("a_kernel_of_mine", "not JSON", ((8, 4), (8, 4)), 0),
    ],
)
def test_calls_of_libraries(target: str, config: str, dims, flops: int):
    assert work_of(*called(target, config, *dims)).flops == flops


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("right", [0, 1])
def test_what_sums_the_rows_of_both_operands_is_known_in_a_compiled_program(left: int, right: int):
    def step(a, b):
        return jax.lax.dot_general(a, b, (((left,), (right,)), ((), ())))

    found = [
        w.rows for _, w in works(compiled(step, shaped(256, 256), shaped(256, 256))) if w.flops
    ]
    assert found == [left == right == 0]


def test_attention_is_counted_in_a_compiled_program_as_in_a_traced_one():
    shapes = ((2, 8, 64, 32),) * 2
    module, call = called("__cudnn$fmhaSoftmaxBackward", LONG % "CAUSAL", *shapes)
    made = attended(2 * 8 * 64 * 32, 32, 4096, 2, backward=True, causal=True)
    work = work_of(module, call)
    assert (work.flops, work.cycles, work.apart) == made
    assert work.dtype == "bfloat16"
    eight = work_of(*called("__cudnn$fmhaSoftmaxBackwardF8", LONG % "CAUSAL", *shapes))
    assert eight == work, "that of eight bits is a gradient, too"


def test_a_window_bounds_attention_in_a_compiled_program():
    shapes = ((2, 8, 64, 32),) * 2
    windowed = LONG.replace('"mask_type"', '"sliding_window_length":256,"mask_type"')
    whole = work_of(*called("__cudnn$fmhaSoftmax", LONG % "NO_MASK", *shapes))
    within = work_of(*called("__cudnn$fmhaSoftmax", windowed % "CAUSAL", *shapes))
    assert within.flops == whole.flops * 256 / 4096
    assert within.nbytes == whole.nbytes


@pytest.mark.parametrize("config", ["", "not JSON", "[]", "{}", '{"gemm_backend_config": null}'])
def test_a_call_that_does_not_say_what_it_does_is_named(config: str):
    with pytest.raises(WireError, match=r"call \(__cublas\$gemm\) has no gemm_backend_config"):
        work_of(*called("__cublas$gemm", config, (8, 4), (4, 8), (8, 8)))
