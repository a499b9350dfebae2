"""What the compiler says of memory, here and for GPUs that are not there."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem.errors import TargetError
from jaxmem.targets import Target, compile_for, compiling
from jaxmem.targets.kernels import kernels_of
from tests.fitted_steps import optimising_less
from tests.problems import PROBLEMS, pure

pytestmark = pytest.mark.default_code

SIDE = 512
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
BYTES = SIDE * SIDE * 4
EVERYWHERE = pytest.mark.parametrize("target", ["cpu", "h200"])


def mesh_of(devices, axes=("x",), shape=None):
    return AbstractMesh(shape or (devices,), axes, axis_types=(AxisType.Auto,) * len(axes))


@EVERYWHERE
def test_total_counts_donated_buffers_once(target):
    def step(w, x):
        return w - 0.1 * (x @ w), (x * x).sum()

    plain = compile_for(target, step, [MATRIX, MATRIX]).memory
    donated = compile_for(target, step, [MATRIX, MATRIX], donate=(0,)).memory
    assert plain.argument_bytes == donated.argument_bytes == 2 * BYTES
    assert plain.alias_bytes == 0 and donated.alias_bytes == BYTES
    assert BYTES < plain.output_bytes < BYTES + 1024
    for memory in (plain, donated):
        parts = memory.argument_bytes + memory.output_bytes + memory.temp_bytes
        assert memory.total_bytes == parts - memory.alias_bytes
    # Whatever the GEMM's workspace is, donation takes the new weights out of the total.
    spared = plain.total_bytes - donated.total_bytes
    assert spared + donated.temp_bytes - plain.temp_bytes == BYTES
    assert 2 * BYTES <= donated.total_bytes < 2 * BYTES + 2**23


@EVERYWHERE
def test_arguments_that_are_not_used_still_take_memory(target):
    memory = compile_for(target, lambda x, unused: x + 1, [MATRIX, MATRIX]).memory
    assert memory.argument_bytes == 2 * BYTES


@EVERYWHERE
def test_pytrees_keys_and_weak_types_are_taken(target):
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)

    def noise(tree, k):
        return tree["x"] + jax.random.normal(k, (SIDE, SIDE))

    assert compile_for(target, noise, [{"x": MATRIX}, key]).memory.argument_bytes == BYTES + 8
    aval = jax.make_jaxpr(lambda x: x)(2.0).in_avals[0]
    compiled = compile_for(target, lambda s: jnp.ones((2,), jnp.bfloat16) * s, [aval])
    assert "bf16[2]" in compiled.hlo_text()
    # A Linen TrainState counts its steps in a Python number.
    assert compile_for(target, lambda n: n + 1, [3]).memory.argument_bytes == 4


def test_what_is_compiled_for_this_machine_runs():
    compiled = compile_for(None, lambda x: (x * 2).sum(), [jax.ShapeDtypeStruct((3,), "float32")])
    assert compiled.runs_here and compiled.target == Target.local(measure=False)
    assert compiled.executable(jnp.arange(3.0)) == 6
    assert 0 < compiled.seconds < 60


def test_a_gpu_runs_here_only_if_it_is_this_one_and_there_are_enough(monkeypatch):
    h200 = SimpleNamespace(device_kind="NVIDIA H200")
    monkeypatch.setattr(compiling.topology, "initialize_default_backend", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [h200] * 4)
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    names = ["h200", "4xh200", "cpu", "8xh200", "2x4xh200", "h100"]
    # "cpu" asks JAX for the real devices of this process, which the stand-ins do not touch.
    assert [compiling.runs_here(Target(name)) for name in names] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("name", ["transformer_scan", "lstm", "effects"])
def test_what_llvm_optimises_changes_neither_the_program_nor_its_bytes(name: str):
    """So other test files may compile with less of that: the fixture `quick_code`."""
    step = pure(PROBLEMS[name])

    def compiled():
        made = compile_for("cpu", step.function, step.args, donate=step.donate)
        return made.hlo_text(), made.memory

    expected = compiled()
    with optimising_less():
        assert compiled() == expected


def test_an_absent_gpu_does_not_run_here():
    compiled = compile_for("64xh200", lambda x: x * 2, [MATRIX])
    assert not compiled.runs_here
    assert compiled.memory.argument_bytes == BYTES  # replicated: all of it on every device
    assert "num_partitions=64" in compiled.hlo_text()


@pytest.mark.parametrize("model", ["v100", "t4", "a100-80", "rtx4090", "b200", "rtx5090"])
def test_every_generation_compiles(model):
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    memory = compile_for(model, lambda x: jax.nn.softmax(jnp.tanh(x @ x), -1), [x]).memory
    assert memory.argument_bytes == memory.output_bytes == 256 * 256 * 2
    assert 256 * 256 * 2 < memory.temp_bytes < 2**23  # a product, and a GEMM's workspace


@pytest.mark.wide
def test_xlas_own_rematerialisation_is_off_unless_asked_for():
    """A step that needs more than the small A100 compiles to what it takes on the large one."""
    length, layers = 8192, 9
    ws = jax.ShapeDtypeStruct((layers, 128, 128), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((16, length, 128), jnp.bfloat16)

    def loss(ws, x):
        causal = jnp.tril(jnp.ones((length, length), bool))
        for w in ws:
            scores = jnp.where(causal, jnp.einsum("bqd,bkd->bqk", x @ w, x), -1e9)
            shares = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
            x = x + jnp.einsum("bqk,bkd->bqd", shares, x)
        return x.astype(jnp.float32).sum()

    honest = compile_for("a100-40", jax.grad(loss), [ws, x]).memory
    remat = compile_for("a100-40", jax.grad(loss), [ws, x], xla_remat=True).memory
    fits = compile_for("a100-80", jax.grad(loss), [ws, x], xla_remat=True).memory
    assert honest.total_bytes > 0.8 * Target("a100-40").device_bytes
    assert honest.total_bytes == fits.total_bytes
    assert remat.total_bytes < 0.9 * honest.total_bytes


def test_compiler_options_reach_this_program_only_and_disabled_passes_add_up():
    options = compiling._options(
        Target("h200"), False, {"xla_disable_hlo_passes": "dce", "xla_gpu_autotune_level": 1}, False
    )
    assert options == {
        "xla_disable_hlo_passes": "dce,rematerialization",
        "xla_gpu_autotune_level": 1,
        **kernels_of("h200"),
    }
    found = compiling._options(Target("h200"), False, {}, True)
    assert found == {"xla_gpu_autotune_level": 0, **kernels_of("h200")}
    assert compiling._options(Target("cpu"), True, {}, False) == {}
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compile_for("cpu", lambda x: x, [MATRIX], options={"xla_no_such_option": 1})


def test_shardings_are_carried_over_and_figures_are_per_device():
    mesh = mesh_of(8, ("data", "model"), (4, 2))
    sharded = jax.ShapeDtypeStruct(
        MATRIX.shape, MATRIX.dtype, sharding=NamedSharding(mesh, PartitionSpec("data", "model"))
    )
    compiled = compile_for("8xh100", lambda w, x: w + x @ x, [sharded, MATRIX], donate=(0,))
    assert compiled.memory.argument_bytes == BYTES // 8 + BYTES
    assert compiled.memory.output_bytes == compiled.memory.alias_bytes == BYTES // 8
    hosts = compile_for("2x4xh100", lambda w, x: w + x @ x, [sharded, MATRIX], donate=(0,))
    assert hosts.memory == compiled.memory


def test_out_shardings_may_be_given():
    row = NamedSharding(mesh_of(4), PartitionSpec("x"))
    compiled = compile_for("4xl4", lambda x: (x * 2, x.sum()), [MATRIX], out_shardings=(row, None))
    assert BYTES // 4 <= compiled.memory.output_bytes < BYTES // 4 + 1024


def test_a_mesh_of_another_size_names_the_target_that_fits():
    sharding = NamedSharding(mesh_of(4), PartitionSpec("x"))
    aval = jax.ShapeDtypeStruct(MATRIX.shape, MATRIX.dtype, sharding=sharding)
    message = r"a mesh of 4 devices \{'x': 4\}, and 8xh100 has 8\..* such as \"4xh100\""
    with pytest.raises(TargetError, match=message):
        compile_for("8xh100", lambda x: x, [aval])


def programs_with_their_own_mesh():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    row = NamedSharding(mesh, PartitionSpec("x"))
    put = jax.device_put(jnp.ones(SIDE), row)
    summed = jax.shard_map(
        lambda x: x @ x.T + jax.lax.psum(x.sum(), "x"),
        mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"),
    )  # fmt: skip

    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(summed(c)), None), x, None, length=3)[0].sum()

    return {
        "shard_map": summed,
        "shard_map in a differentiated scan": jax.grad(loop),
        "constraint": lambda x: jax.lax.with_sharding_constraint(x @ x, row),
        "inner jit": lambda x: jax.jit(jnp.tanh, out_shardings=row)(x) @ x,
        "constant": lambda x: x @ x + put,
        "branches": lambda x: jax.lax.cond(x.sum() > 0, summed, lambda x: x, x),
    }


@pytest.mark.parametrize("name", list(programs_with_their_own_mesh()))
def test_programs_that_name_devices_of_this_process_compile_for_others(name):
    compiled = compile_for("h200", programs_with_their_own_mesh()[name], [MATRIX])
    assert compiled.memory.argument_bytes == BYTES
    assert BYTES <= compiled.memory.total_bytes - BYTES < 24 * BYTES


def test_a_mesh_inside_the_program_must_fit_too():
    summed = programs_with_their_own_mesh()["shard_map"]
    with pytest.raises(TargetError, match="laid out on a mesh of 1 devices"):
        compile_for("8xh100", summed, [MATRIX])


def test_offloaded_residuals_are_counted_on_the_host():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(ws, x):
        def layer(x, w):
            x = checkpoint_name(x, "x")
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0].sum()

    ws = jax.ShapeDtypeStruct((6, SIDE, SIDE), jnp.float32)
    assert compile_for("h200", jax.grad(loss), [ws, MATRIX]).memory.host_temp_bytes == 6 * BYTES


@pytest.mark.gpu
def test_deviceless_figures_are_close_to_the_real_ones():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    fun = jax.grad(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).astype(jnp.float32).sum())
    here = compile_for(None, fun, [x, x])
    name = f"64x{here.target.model}"
    absent = compile_for(name, fun, [x, x])
    assert here.runs_here and not absent.runs_here
    assert absent.memory.argument_bytes == here.memory.argument_bytes
    assert abs(absent.memory.total_bytes - here.memory.total_bytes) < 0.5 * 2**30


CACHED = """
import sys, jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jaxmem.targets import compile_for
x = jax.ShapeDtypeStruct((256, 256), "float32")
for _ in range(2):
    print(compile_for("h100", lambda x: jnp.tanh(x @ x), [x]).memory.total_bytes)
"""


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="stands for a machine without a GPU")
def test_a_persistent_cache_of_the_users_does_not_disturb(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CACHED, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second
    assert list(tmp_path.iterdir()), "the cache was used"
