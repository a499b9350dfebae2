"""Costly results that are kept: who reads them, when that pays, and what the compiler does."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

import jaxmem
from jaxmem.planner.search import Search
from jaxmem.program.demand import demand_of
from jaxmem.program.fusion import fuse
from jaxmem.program.ir import Hosting, Op, Value
from jaxmem.program.primitives import Kind, kind_of
from jaxmem.program.weighing import Weighing, _Readers
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from tests.planner.lines import Line, lines, program
from tests.rewrite.test_transfers import compiled

# As fast as XLA takes an H200 to be, and one that computes so slowly that everything is kept.
H200 = Weighing(66.9e12, 4.8e12)
SLOW = Weighing(1.0, 1e30)


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def kernels_of(value: Value, ops: Sequence[Op], demanded: set[Value]) -> set[Value]:
    """By definition: what is written where a path of computed values from ``value`` ends."""
    found = set()
    for op in ops:
        if value not in op.values:
            continue
        for number, result in enumerate(op.outputs):
            if kind_of(op) in (Kind.FUSED, Kind.ALIAS) and result not in demanded:
                found |= kernels_of(result, ops, demanded)
            elif kind_of(op) in (Kind.FUSED, Kind.ALIAS) or number == 0:
                found.add(result)
    return found


@given(lines(mixed=True))
@settings(max_examples=200)
def test_readers_are_those_that_a_walk_to_every_end_finds(line: Line):
    ops = line.block.ops
    kinds = [kind_of(op) for op in ops]
    opaque = [op for op, kind in zip(ops, kinds, strict=True) if kind is Kind.OPAQUE]
    demanded = {v for op in opaque for v in op.values} | set(line.block.outputs)
    readers = _Readers(ops, kinds, demanded)
    for value in [*line.block.inputs, *(v for op in ops for v in op.outputs)]:
        assert readers.of(value) == kernels_of(value, ops, demanded)


def forward_and_backward(x, w, v):
    return jax.grad(lambda ws: (jax.nn.gelu(x @ ws[0]) @ ws[1]).sum())((w, v))


def forward(x, w, v):
    return jax.nn.gelu(x @ w) @ v


WIDE = (shape(512, 256), shape(256, 1024), shape(1024, 256))


@pytest.mark.parametrize(("step", "kept"), [(forward_and_backward, 1), (forward, 0)])
def test_what_one_kernel_reads_is_not_kept(step, kept: int):
    block = program(step, *WIDE).block
    plain = fuse(block.inputs, block.ops, block.outputs, closely=True)
    weighed = fuse(block.inputs, block.ops, block.outputs, closely=True, weighing=SLOW)
    tanhs = [op.outputs[0] for op in block.ops if op.name == "tanh"]
    assert not any(plain.is_buffer(v) for v in tanhs)
    assert sum(weighed.is_buffer(v) for v in tanhs) == kept
    before = {v for made in plain.made for v in made}
    after = {v for made in weighed.made for v in made}
    assert after - before <= set(tanhs), "and nothing else is written"


@pytest.mark.parametrize("name", ["tanh", "erfc", "expm1"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_once_a_size_is_kept_every_larger_one_and_more_readers_are(name: str, dtype: str):
    def told(size: int) -> Op:
        run = {"tanh": jnp.tanh, "erfc": jax.scipy.special.erfc, "expm1": jnp.expm1}[name]
        return next(
            op for op in program(run, shape(size, dtype=dtype)).block.ops if op.name == name
        )

    sizes = [told(2**n) for n in range(4, 28)]
    for kernels in (2, 3):
        kept = [H200.weigh(op, kernels) for op in sizes]
        assert kept == sorted(kept)
        assert not kept[0], "starting a kernel costs more"
        assert kept[-1] == (name != "expm1" or dtype != "float32")
    assert all(H200.weigh(op, 3) for op in sizes if H200.weigh(op, 2))


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_of_what_nothing_is_known_nothing_is_kept(dtype: str):
    with jax.enable_x64(True):
        made = program(lambda x: jnp.tanh(x * 2), shape(2**26, dtype=dtype)).block
    (tanh,) = (op for op in made.ops if op.name == "tanh")
    assert not H200.weigh(tanh, 2)


def layers(act, count: int = 3):
    """Gradients of some layers with an activation, as in a transformer."""

    def step(weights, x):
        def loss(weights):
            y = x
            for up, down in weights:
                y = y + act(y @ up) @ down
            return (y.astype(jnp.float32) ** 2).mean()

        return jax.grad(loss)(weights)

    def arguments(rows: int, dtype: str):
        up, down = shape(1024, 4096, dtype=dtype), shape(4096, 1024, dtype=dtype)
        return [(up, down)] * count, shape(rows, 1024, dtype=dtype)

    return step, arguments


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


@pytest.mark.parametrize(
    ("target", "act", "dtype"),
    [
        ("h200", jax.nn.gelu, "bfloat16"),
        ("h200", exact_gelu, "float32"),
        ("h200", jax.nn.silu, "bfloat16"),
        ("h100", jax.nn.gelu, "bfloat16"),
        ("h100", exact_gelu, "bfloat16"),
        ("a100-80gb", jax.nn.gelu, "bfloat16"),
        ("a100-80gb", jax.nn.gelu, "float32"),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_a_step_as_written_compiles_to_what_is_predicted(target, act, dtype):
    step, arguments = layers(act)
    plan = jaxmem.plan(step, *arguments(8192, dtype), budget="60GiB", target=target, progress=False)
    assert plan.keep_all_predicted_bytes == pytest.approx(plan.compiled_bytes, rel=0.03)


def test_what_is_small_is_computed_again():
    step, arguments = layers(jax.nn.gelu)
    made = program(step, *arguments(32, "bfloat16")).block
    found = rates_of(Target("h200")).weighing
    fusion = fuse(made.inputs, made.ops, made.outputs, closely=True, weighing=found)
    assert not any(fusion.is_buffer(op.outputs[0]) for op in made.ops if op.name == "tanh")


def test_where_something_is_recomputed_it_is_kept_too():
    """XLA computes each tanh of a schedule once, whichever pass it is for."""
    step, arguments = layers(jax.nn.gelu, count=4)
    search = Search(program(step, *arguments(8192, "bfloat16")), rates_of(Target("h200")))
    solution = search.solve(search.keep_all.temp_bytes // 2)
    assert solution is not None
    written = search.schedule(solution)
    tanhs = [op for op in written.ops if op.name == "tanh"]
    assert any(op.recompute for op in tanhs)
    line = demand_of(written.ops, written.outputs, closely=True, tuples=True, weighing=None)
    readers = _Readers(written.ops, line.kinds, line.demanded)
    read_twice = {op.outputs[0] for op in tanhs if len(readers.of(op.outputs[0])) > 1}
    fusion = search.simulator.step(written).fusion
    assert read_twice
    assert {op.outputs[0] for op in tanhs if fusion.is_buffer(op.outputs[0])} == read_twice
    text = compiled(Target("h200"), search.program, written, Hosting()).hlo_text()
    assert text.count(" tanh(") == len(tanhs)


def test_before_hopper_what_is_kept_of_bfloat16_is_float32():
    step, arguments = layers(jax.nn.gelu)
    made = program(step, *arguments(4096, "bfloat16")).block
    for name, dtype in [("a100-80gb", jnp.float32), ("h200", jnp.bfloat16)]:
        found = rates_of(Target(name)).weighing
        fusion = fuse(made.inputs, made.ops, made.outputs, closely=True, weighing=found)
        roots = [fusion.roots[op.outputs[0]] for op in made.ops if op.name == "tanh"]
        assert [[root.aval.dtype for root in some] for some in roots] == [[dtype]] * 3


def test_a_gpu_that_is_not_in_the_table_and_a_cpu_are_not_known():
    assert rates_of(Target("cpu")).weighing is None
    assert rates_of(Target("h100")).weighing == Weighing(66.90816e12, 3352320000000)
