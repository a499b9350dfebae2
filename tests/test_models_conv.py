"""ResNet and 3D U-Net: textbook nets, whose remat policies change nothing but memory."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from benchmarks.workloads.conv_sizes import RESNET_SIZES, UNET3D_SIZES

EXAMPLES = Path(__file__).parent.parent / "examples"
EPS = float(jnp.finfo(jnp.float32).eps)
FULL_REMAT = jax.checkpoint_policies.nothing_saveable

# Compiling is what takes time with nets as small as these.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module", autouse=True)
def examples_on_path():
    """Modules are found as they are when an example runs as a script."""
    before = list(sys.path)
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def resnet():
    return importlib.import_module("models.resnet")


@pytest.fixture(scope="module")
def unet3d():
    return importlib.import_module("models.unet3d")


@pytest.fixture(scope="module", params=["resnet", "unet3d"])
def benchmark_module(request):
    return importlib.import_module(f"benchmarks.workloads.{request.param}")


def tiny_resnet(resnet, **changes):
    return resnet.ResNetConfig(**{"depths": (1, 1), "width": 8, "classes": 10, **changes})


def tiny_unet3d(unet3d, **changes):
    return unet3d.UNet3DConfig(
        **{"channels": (8, 16), "groups": 4, "dtype": jnp.float32, **changes}
    )


def images(size=32, batch=2):
    return jax.random.normal(jax.random.key(0), (batch, size, size, 3))


def volumes(batch=2):
    return jax.random.normal(jax.random.key(0), (batch, 16, 8, 4, 1))


def parameters(make):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param)))


@pytest.mark.parametrize(
    ("depths", "count"),
    [("RESNET_50", 25_557_032), ("RESNET_152", 60_192_808)],
)
def test_resnets_have_the_textbook_parameter_counts(resnet, depths, count):
    config = resnet.ResNetConfig(depths=getattr(resnet, depths))
    assert parameters(lambda: resnet.ResNet(config, rngs=nnx.Rngs(0))) == count


def test_unet_has_the_textbook_parameter_count(unet3d):
    channels, inputs, classes = (16, 32, 64, 128, 256), 2, 3
    config = unet3d.UNet3DConfig(channels=channels, inputs=inputs, classes=classes)
    pairs = list(itertools.pairwise(channels))
    encoder = sum(27 * (a + b) * b for a, b in [(inputs, channels[0]), *pairs])
    # Up: 2x2x2, then 3x3x3 from the concatenation of twice the channels, then 3x3x3.
    decoder = sum(8 * b * a + 27 * (2 * a + a) * a for a, b in pairs)
    norms = 4 * (sum(channels) + sum(channels[:-1]))
    head = channels[0] * classes + classes
    count = parameters(lambda: unet3d.UNet3D(config, rngs=nnx.Rngs(0)))
    assert count == encoder + decoder + norms + head


@pytest.mark.parametrize("remat_policy", [None, FULL_REMAT])
def test_resnet_halves_images_at_each_stage_and_returns_logits(resnet, remat_policy):
    config = tiny_resnet(resnet, depths=(1, 1, 1), remat_policy=remat_policy)
    model = nnx.eval_shape(lambda: resnet.ResNet(config, rngs=nnx.Rngs(0)))
    shapes = []
    for block in model.blocks:
        inputs = jnp.zeros((2, 8, 8, block.conv1.in_features))
        shapes.append(nnx.eval_shape(lambda block, x: block(x), block, inputs).shape)
    assert shapes == [(2, 8, 8, 32), (2, 4, 4, 64), (2, 4, 4, 128)]
    logits = nnx.eval_shape(lambda model, x: model(x), model, images())
    assert (logits.shape, logits.dtype) == ((2, 10), jnp.float32)


@pytest.mark.parametrize("remat_policy", [None, FULL_REMAT])
def test_unet_labels_every_voxel_in_the_dtype_asked_for(unet3d, remat_policy):
    config = tiny_unet3d(unet3d, dtype=jnp.bfloat16, classes=5, remat_policy=remat_policy)
    model = nnx.eval_shape(lambda: unet3d.UNet3D(config, rngs=nnx.Rngs(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    logits = nnx.eval_shape(lambda model, x: model(x), model, volumes())
    assert (logits.shape, logits.dtype) == ((2, 16, 8, 4, 5), jnp.bfloat16)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_of_slices_is_the_one_of_volumes(unet3d, stride):
    config = tiny_unet3d(unet3d, dtype=jnp.float32)
    conv = initialised(lambda: unet3d.Conv(config, 5, 7, stride, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (2, 8, 6, 4, 5))
    wanted = jax.lax.conv_general_dilated(
        x,
        conv.kernel[...],
        (stride,) * 3,
        ((1, 1),) * 3,
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )
    np.testing.assert_allclose(conv(x), wanted, atol=1e-5)


def test_an_upsampling_is_the_transposed_convolution(unet3d):
    config = tiny_unet3d(unet3d, dtype=jnp.float32)
    upsample = initialised(lambda: unet3d.Upsample(config, 5, 3, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (2, 4, 3, 2, 5))
    flipped = upsample.kernel[...][::-1, ::-1, ::-1]
    wanted = jax.lax.conv_transpose(x, flipped, (2, 2, 2), "VALID")
    np.testing.assert_allclose(upsample(x), wanted, atol=1e-5)


def test_a_sum_of_two_convolutions_is_the_convolution_of_the_concatenation(unet3d):
    up = initialised(lambda: unet3d.Up(tiny_unet3d(unet3d), 8, rngs=nnx.Rngs(0)))
    inputs = jax.random.normal(jax.random.key(0), (2, 1, 8, 4, 4, 8))

    def concatenated(up, inputs):
        kernel = jnp.concatenate([up.conv1.kernel[...], up.conv1_skip.kernel[...]], axis=3)
        both, numbers = jnp.concatenate(inputs, axis=-1), ("NDHWC", "DHWIO", "NDHWC")
        y = jax.lax.conv_general_dilated(both, kernel, (1, 1, 1), "SAME", dimension_numbers=numbers)
        return nnx.relu(up.norm2(up.conv2(nnx.relu(up.norm1(y)))))

    summed = apply(lambda up, inputs: up(*inputs), up, inputs)
    np.testing.assert_allclose(summed, apply(concatenated, up, inputs), rtol=0, atol=256 * EPS)


def problem(name, resnet, unet3d, remat_policy=None):
    """What makes a tiny model, everything in float32, and its input."""
    if name == "resnet":
        config = tiny_resnet(resnet, remat_policy=remat_policy)
        return lambda: resnet.ResNet(config, rngs=nnx.Rngs(0)), images()
    config = tiny_unet3d(unet3d, remat_policy=remat_policy)
    return lambda: unet3d.UNet3D(config, rngs=nnx.Rngs(0)), volumes()


def initialised(make):
    graph = nnx.graphdef(nnx.eval_shape(make))
    return nnx.merge(graph, quick_jit(lambda: nnx.state(make()))())


def apply(call, model, x):
    """What ``call(model, x)`` returns, compiled; ``model`` changes as it would without that."""
    graph, state = nnx.split(model)

    @quick_jit
    def run(state, x):
        inside = nnx.merge(graph, state, copy=True)
        return call(inside, x), nnx.state(inside)

    found, changed = run(state, x)
    nnx.update(model, changed)
    return found


def program(make, x):
    graph, state = nnx.split(nnx.eval_shape(make))
    return str(jax.make_jaxpr(lambda s, x: nnx.merge(graph, s, copy=True)(x))(state, x))


def statistics(model):
    return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.BatchStat))]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("resnet", {"block_in": 2, "conv1": 2, "conv2": 2, "conv3": 2}),
        # Two blocks of the encoder, and one of the decoder, which has two inputs.
        ("unet3d", {"block_in": 2 + 2, "conv1": 3, "conv2": 3}),
    ],
)
def test_useful_values_have_names_for_policies(resnet, unet3d, name, counts):
    text = program(*problem(name, resnet, unet3d))
    assert {key: text.count(f"name[name={key}]") for key in counts} == counts


def loss_and_gradients(model, x):
    return apply(nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean()), model, x)


@pytest.mark.parametrize("name, blocks", [("resnet", 2), ("unet3d", 3)])
def test_recomputing_changes_no_loss_gradient_or_statistic(resnet, unet3d, name, blocks):
    make, x = problem(name, resnet, unet3d)
    make_recomputing, _ = problem(name, resnet, unet3d, FULL_REMAT)
    assert program(make, x).count("policy=") == 0
    assert program(make_recomputing, x).count("policy=") == blocks
    plain, recomputing = initialised(make), initialised(make_recomputing)
    before = statistics(recomputing)
    loss, grads = loss_and_gradients(plain, x)
    loss_again, grads_again = loss_and_gradients(recomputing, x)
    np.testing.assert_allclose(loss_again, loss, rtol=64 * EPS)
    for leaf, again in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_again), strict=True):
        atol = 4096 * EPS * np.abs(leaf).max()
        np.testing.assert_allclose(again, leaf, rtol=0, atol=atol)
    for leaf, again, old in zip(statistics(plain), statistics(recomputing), before, strict=True):
        assert np.abs(again - old).max() > 1e-3
        np.testing.assert_allclose(again, leaf, rtol=64 * EPS, atol=64 * EPS)


def test_statistics_move_once_in_training_and_never_in_evaluation(resnet, unet3d):
    make, x = problem("resnet", resnet, unet3d, FULL_REMAT)
    model = initialised(make)

    def first_convolution(model, x):
        y = nnx.relu(model.stem_norm(model.stem(x), use_running_average=False))
        y = nnx.max_pool(y, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        return model.blocks[0].conv1(y).mean(axis=(0, 1, 2))

    for _ in range(2):
        loss_and_gradients(model, x)
    # Momentum 0.9, from zero, twice with the same batch.
    found = model.blocks[0].norm1.mean[...]
    expected = (1 - 0.9**2) * apply(first_convolution, model, x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=256 * EPS)
    model.eval()
    before = statistics(model)
    apply(lambda model, x: model(x), model, x)
    for leaf, old in zip(statistics(model), before, strict=True):
        np.testing.assert_array_equal(leaf, old)


def losses(step, tiny, steps):
    state, batch, found = quick_jit(tiny.state)(), quick_jit(tiny.batch)(), []
    for _ in range(steps):
        state, loss = step(state, batch)
        found.append(float(loss))
    return found


def step_bytes(memory):
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes


@pytest.mark.wide
@pytest.mark.parametrize("name", ["resnet", pytest.param("unet3d", marks=pytest.mark.slow)])
def test_benchmark_steps_learn_the_same_inside_a_budget(name):
    module = importlib.import_module(f"benchmarks.workloads.{name}")
    tiny = module.workload(module.SIZES["tiny"])
    as_written = quick_jit(tiny.step, donate_argnums=0)
    abstract = jax.eval_shape(tiny.state), jax.eval_shape(tiny.batch)
    needs = step_bytes(as_written.lower(*abstract).compile().memory_analysis())
    expected = losses(as_written, tiny, 6)
    assert expected[-1] < 0.97 * expected[0]
    fitted = jaxmem.fit(tiny.step, budget=int(0.8 * needs), donate_argnums=0, progress=False)
    # A quarter of what bfloat16 rounds by, where the step computes in it.
    rtol = 0.25 * float(jnp.finfo(jnp.bfloat16).eps) if tiny.unit == "volumes" else 1e-4
    np.testing.assert_allclose(losses(fitted, tiny, 6), expected, rtol=rtol)
    plan = fitted.plan(*abstract)
    assert plan.compiled_bytes <= plan.budget_bytes < plan.keep_all_compiled_bytes


def test_benchmark_steps_take_a_policy_and_have_the_names_of_hand_written_ones(benchmark_module):
    sizes = benchmark_module.SIZES["tiny"]
    plain, policy = (benchmark_module.workload(sizes, p) for p in (None, FULL_REMAT))
    abstract = jax.eval_shape(plain.state), jax.eval_shape(plain.batch)
    texts = [str(jax.make_jaxpr(w.step)(*abstract)) for w in (plain, policy)]
    assert "policy=" not in texts[0]
    assert "policy=" in texts[1]
    for name in (*plain.saved, *plain.offloaded):
        assert f"name[name={name}]" in texts[0]


def test_a_full_benchmark_step_is_described_without_allocating(benchmark_module):
    depths = {"depths": (3, 4, 6, 3)} if "resnet" in benchmark_module.__name__ else {}
    sizes = dataclasses.replace(benchmark_module.SIZES["full"], **depths)
    before = sum(a.nbytes for a in jax.live_arrays())
    full = benchmark_module.workload(sizes)
    state, loss = jax.eval_shape(full.step, jax.eval_shape(full.state), jax.eval_shape(full.batch))
    assert sum(a.nbytes for a in jax.live_arrays()) - before < 2**20
    assert loss.shape == ()
    assert sum(leaf.size for leaf in jax.tree.leaves(state["params"])) > 10**7
    assert full.items == sizes.batch


def test_full_tensors_have_fewer_elements_than_cudnn_can_index():
    unet, resnet = UNET3D_SIZES["full"], RESNET_SIZES["full"]
    assert np.prod(unet.volume, dtype=int) * unet.batch * unet.channels[0] < 2**31
    assert resnet.batch * (resnet.image // 4) ** 2 * 4 * resnet.width < 2**31
