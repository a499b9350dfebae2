"""What single operations do, as laws, and against counts that are made in another way."""

from __future__ import annotations

import dataclasses
import enum
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.program.cost import Rates, block_seconds, op_seconds
from jaxmem.program.work import arithmetic, work_of
from jaxmem.runtime.rates import rates_of
from jaxmem.targets import Target
from tests.planner.lines import program

RATES = Rates({"float32": 1e12}, 1e11)


def only(name: str, function, *args):
    """The one operation of that name in a traced function."""
    (op,) = [op for op in program(function, *args).block.ops if op.name == name]
    return op


def work(name: str, function, *args):
    found = work_of(only(name, function, *args).eqn)
    assert found is not None
    return found


# --- data movement -----------------------------------------------------------------------------


ROWS = jnp.arange(8)
MOVING = {
    "gather": lambda table: table[ROWS],
    "dynamic_slice": lambda table: lax.dynamic_slice(table, (3, 0), (8, 16)),
    "slice": lambda table: table[3:11],
    "scatter-add": lambda table: table.at[ROWS].add(1.0),
    "dynamic_update_slice": lambda table: lax.dynamic_update_slice(
        table, jnp.ones((8, 16)), (3, 0)
    ),
}


@pytest.mark.parametrize("name", MOVING)
def test_parts_of_a_table_cost_the_same_in_a_larger_table(name: str):
    def seconds(rows: int) -> float:
        return block_seconds(program(MOVING[name], jnp.ones((rows, 16))).block, RATES)

    assert 0 < seconds(16) == seconds(1 << 16)


def test_a_gather_reads_what_it_returns_and_its_indices():
    found = work("gather", lambda table, i: table.at[i].get(mode="clip"), jnp.ones((99, 16)), ROWS)
    assert found.nbytes == 2 * 8 * 16 * 4 + 8 * 4


def test_what_is_computed_from_parts_reads_the_parts():
    """Through element-wise work and reshapes, each half of a matrix read once."""

    def halves(x):
        left, right = jnp.split(x, 2, axis=1)
        return (left.reshape(-1) * 2 + right.reshape(-1)).sum()

    def rows(x):
        return jnp.sin(x[:4] * 3).sum()

    x = jnp.ones((64, 64))
    assert block_seconds(program(halves, x).block, RATES) * 1e11 == pytest.approx(x.nbytes + 4)
    assert block_seconds(program(rows, x).block, RATES) * 1e11 == pytest.approx(x.nbytes / 16 + 4)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float16, jnp.float32])
def test_sorting_passes_over_the_data_once_for_each_byte_of_a_key(dtype):
    found = work("sort", lax.sort, jnp.ones(1024, dtype))
    size = jnp.dtype(dtype).itemsize
    assert found.nbytes == (2 * size + 1) * 1024 * size


def test_the_best_of_many_cost_one_reading_while_they_are_few():
    x = jnp.ones((8, 4096))
    few, many = (work("top_k", lambda x, k=k: lax.top_k(x, k), x).nbytes for k in (4, 64))
    assert x.nbytes < few < 1.1 * x.nbytes
    assert many > 8 * x.nbytes


def test_prefix_sums_cost_more_than_a_sum_and_less_than_a_sort():
    x = jnp.ones(4096)
    prefixes = op_seconds(only("cumsum", lax.cumsum, x), RATES)
    assert op_seconds(only("reduce_sum", jnp.sum, x), RATES) < prefixes
    assert prefixes < op_seconds(only("sort", lax.sort, x), RATES)


@pytest.mark.parametrize("reduction", [jnp.sum, jnp.max, jnp.argmax, jnp.prod])
def test_reductions_cost_what_xla_says_they_access(reduction):
    x = jnp.ones((64, 64))
    step = program(lambda x: reduction(x, axis=0), x)
    counted = 64 * 64 * 4 + 64 * 4
    assert block_seconds(step.block, RATES) * 1e11 == pytest.approx(counted)
    if reduction is jnp.sum:
        compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
        assert compiled.cost_analysis()["bytes accessed"] == counted


def test_reducing_windows_costs_traffic_not_the_sum_of_two_numbers():
    def pooled(x):
        return lax.reduce_window(x, 0.0, lambda a, b: a + b, (2, 2), (2, 2), "VALID")

    def loss(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()

    x = jnp.ones((256, 256))
    for function in (pooled, jax.grad(loss)):
        assert block_seconds(program(function, x).block, RATES) * 1e11 >= 1.25 * x.nbytes


# --- arithmetic --------------------------------------------------------------------------------


class Mask(enum.Enum):
    NO_MASK = 0
    CAUSAL = 2


class Layout(enum.Enum):
    BTNH = 0
    BNTH = 1


B, T, S, N, H = 2, 64, 128, 4, 32


def attention(name: str, *, layout=Layout.BTNH, keys: int = S, head: int = H, **params):
    def atom(length):
        shape = (B, length, N, head) if layout is Layout.BTNH else (B, N, length, head)
        return SimpleNamespace(aval=jax.ShapeDtypeStruct(shape, jnp.bfloat16))

    return SimpleNamespace(
        primitive=SimpleNamespace(name=f"dot_product_attention_{name}_wrapper"),
        params={"layout": layout.value, **params},
        invars=[atom(T), atom(keys), atom(keys)],
        outvars=[atom(T)],
    )


@pytest.mark.parametrize("layout", Layout)
def test_attention_computes_its_two_products(layout):
    q, k = jnp.ones((B, T, N, H), jnp.bfloat16), jnp.ones((B, S, N, H), jnp.bfloat16)
    step = program(lambda q, k, v: jax.nn.dot_product_attention(q, k, v), q, k, k)
    products = sum(arithmetic(op.eqn) for op in step.block.ops if op.name == "dot_general")
    fused = work_of(attention("fwd", layout=layout, mask_type=Mask.NO_MASK))
    assert fused is not None and fused.flops == products and fused.dtype == "bfloat16"
    # It never writes the scores.
    assert fused.nbytes == 2 * B * N * H * (2 * T + 2 * S)


@pytest.mark.parametrize("keys", [64, 256, 512, 4096, 65536])
def test_a_causal_mask_halves_attention_but_for_the_tiles_on_its_diagonal(keys: int):
    whole = work_of(attention("fwd", keys=keys, mask_type=Mask.NO_MASK))
    masked = work_of(attention("fwd", keys=keys, mask_type=Mask.CAUSAL))
    fp8 = work_of(attention("fp8_fwd", keys=keys, use_causal_mask=True))
    for one in (masked, fp8):
        share = one.flops / whole.flops
        assert one.cycles / whole.cycles == share
        assert share == 1.0 if keys <= 256 else 0.5 < share <= 0.5 + 128 / keys
    assert masked.nbytes == whole.nbytes


def test_a_window_bounds_attention_and_the_gradient_is_five_products_for_two():
    whole = work_of(attention("fwd", mask_type=Mask.NO_MASK))
    windowed = attention("fwd", mask_type=Mask.CAUSAL, sliding_window_length=S // 4)
    assert work_of(windowed).flops == whole.flops / 4
    assert work_of(windowed).cycles == whole.cycles / 4
    everything = attention("fwd", keys=4096, mask_type=Mask.CAUSAL, sliding_window_length=4096)
    masked = attention("fwd", keys=4096, mask_type=Mask.CAUSAL)
    assert work_of(everything) == work_of(masked), "a window of all keys leaves the mask's"
    back = work_of(attention("bwd", mask_type=Mask.NO_MASK))
    assert back.flops == 2.5 * whole.flops
    assert back.cycles > whole.cycles == B * N * T * S / 16, "16 exponentials in a cycle"


def test_smaller_heads_take_as_many_cycles_for_fewer_products():
    """Of heads of 64 an H200 made 411 TFLOP/s, of heads of 128 it made 593."""
    rates = dataclasses.replace(rates_of(Target("h200")), flops={"bfloat16": 765e12, "float32": 1})

    def reached(head: int, name: str) -> float:
        work = work_of(attention(name, keys=8192, head=head, mask_type=Mask.NO_MASK))
        return work.flops / rates.seconds(work._replace(nbytes=0, apart=0)) / 1e12

    assert reached(128, "fwd") == pytest.approx(593, rel=0.1)
    assert reached(64, "fwd") == pytest.approx(411, rel=0.1)
    assert reached(128, "bwd") == pytest.approx(529, rel=0.1)
    assert reached(64, "bwd") == pytest.approx(387, rel=0.1)


def test_what_a_gradient_of_attention_does_beside_its_kernel_is_bytes_of_the_query():
    assert work_of(attention("fwd", mask_type=Mask.NO_MASK)).apart == 0
    few, many = (work_of(attention("bwd", keys=k, mask_type=Mask.NO_MASK)).apart for k in (64, 512))
    assert few == many == B * T * N * H * (4 + 4 + 3 * 2)


def test_groups_of_rows_cost_one_product():
    x, w = jnp.ones((64, 32)), jnp.ones((4, 32, 16))
    sizes = jnp.array([10, 20, 30, 4])
    found = work("ragged_dot_general", lax.ragged_dot, x, w, sizes)
    assert found.flops == 2 * 64 * 32 * 16

    def loss(w):
        return lax.ragged_dot(x, w, sizes).sum()

    ops = program(jax.value_and_grad(loss), w).block.ops
    assert [work_of(o.eqn).flops for o in ops if o.name == "ragged_dot_general"] == 2 * [
        found.flops
    ]


def test_factorizations_grow_with_the_cube_and_solves_with_the_square():
    def flops(name, function, n, *more):
        return work(name, function, jnp.eye(n), *more).flops

    for name, function in {
        "cholesky": lambda a: lax.linalg.cholesky(a, symmetrize_input=False),
        "lu": lambda a: lax.linalg.lu(a)[0],
        "qr": lambda a: lax.linalg.qr(a, full_matrices=False)[0],
        "eigh": lambda a: lax.linalg.eigh(a, symmetrize_input=False)[0],
        "svd": lambda a: lax.linalg.svd(a)[0],
    }.items():
        small, large = flops(name, function, 16), flops(name, function, 32)
        assert large == pytest.approx(8 * small), name
        assert 16**3 / 3 <= small <= 25 * 16**3, name
        batched = work(name, function, jnp.ones((5, 16, 16)))
        assert batched.flops == pytest.approx(5 * small), name

    def solve(a, b):
        return lax.linalg.triangular_solve(a, b, left_side=True)

    assert flops("triangular_solve", solve, 32, jnp.ones((32, 8))) == 32 * 32 * 8
    assert work("cholesky", lax.linalg.cholesky, jnp.eye(16, dtype=complex)).flops == 4 * 16**3 / 3


def test_fourier_transforms_count_their_butterflies():
    x = jnp.ones((3, 64), jnp.complex64)
    whole = work("fft", jnp.fft.fft, x).flops
    assert whole == 3 * 5 * 64 * 6
    assert work("fft", jnp.fft.rfft, x.real).flops == whole / 2
    assert work("fft", jnp.fft.fft2, jnp.ones((64, 64), jnp.complex64)).flops == 5 * 4096 * 12


def kernel(estimate):
    atom = SimpleNamespace(aval=jax.ShapeDtypeStruct((1024,), jnp.float32))
    params = {"cost_estimate": estimate, "jaxpr": None}
    primitive = SimpleNamespace(name="pallas_call")
    return SimpleNamespace(primitive=primitive, params=params, invars=[atom], outvars=[atom])


def test_kernels_cost_what_their_author_says_and_their_bytes_otherwise():
    said = SimpleNamespace(flops=10**9, bytes_accessed=123, transcendentals=0)
    assert work_of(kernel(said))[:2] == (1e9, 123)
    assert work_of(kernel(None))[:2] == (0.0, 8192)


def test_a_real_kernel_is_costed_from_outside():
    from jax.experimental import pallas as pl

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        estimate = pl.CostEstimate(flops=7 * 10**12, transcendentals=0, bytes_accessed=1)
        return pl.pallas_call(double, out_shape=shape, cost_estimate=estimate)(x)

    assert op_seconds(only("pallas_call", step, jnp.ones(256)), RATES) == 7.0


def test_calls_out_of_the_program_cost_their_bytes():
    def step(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    op = only("pure_callback", step, jnp.ones(1024))
    assert op_seconds(op, RATES) * 1e11 == pytest.approx(8192)
    foreign = only(
        "ffi_call",
        lambda x: jax.ffi.ffi_call("nobody", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
        jnp.ones(1024),
    )
    assert op_seconds(foreign, RATES) * 1e11 == pytest.approx(8192)


def test_what_is_inside_a_branch_is_fused_as_outside():
    def chain(x):
        for _ in range(9):
            x = jnp.sin(x)
        return x

    x = jnp.ones((64, 64))
    branch = only("cond", lambda x: lax.cond(x[0, 0] > 0, chain, lambda x: x, x), x)
    assert op_seconds(branch, RATES) * 1e11 == pytest.approx(2 * x.nbytes)
