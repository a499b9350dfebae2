"""GPT and BERT as the benchmarks train them: sizes, losses, checkpoint policies, budgets."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from benchmarks.workloads import bert, gpt

NETS = {"gpt": gpt, "bert": bert}
EPS = float(jnp.finfo(jnp.float32).eps)
POLICIES = jax.checkpoint_policies


@pytest.fixture(params=NETS)
def net(request):
    return NETS[request.param]


def tiny(net, **options):
    return net.workload(net.SIZES["tiny"], attention="xla", **options)


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


SMALL = {"vocab_size": 61, "layers": 2, "heads": 2, "d_model": 16, "sequence": 12}
DRAW = np.random.default_rng(0)
TOKENS, SEGMENTS = DRAW.integers(0, 61, (2, 12)), DRAW.integers(0, 2, (2, 12))
MASKED = DRAW.integers(0, 12, (2, 4))
EVERYWHERE = np.tile(np.arange(12), (2, 1))


def small_bert(**changes):
    return bert.Bert(bert.BertConfig(**{**SMALL, "dtype": jnp.float32, **changes}))


def small_gpt(**changes):
    return gpt.GPT(gpt.GPTConfig(**SMALL, **changes), rngs=nnx.Rngs(0))


@functools.cache
def variables_of(kind, **changes):
    """The variables of a small net; a checkpoint policy does not change them."""
    if kind == "bert":
        model = small_bert(**changes)
        return jax.jit(model.init)(jax.random.key(0), TOKENS, SEGMENTS, MASKED)
    return jax.jit(lambda: nnx.state(small_gpt(**changes)))()


def loss_of(kind, **changes):
    """A loss of the variables of a small net."""
    if kind == "bert":
        model = small_bert(**changes)
        return lambda variables: (model.apply(variables, TOKENS, SEGMENTS, MASKED) ** 2).mean()
    graph, _ = nnx.split(nnx.eval_shape(lambda: small_gpt(**changes)))
    return lambda variables: (nnx.merge(graph, variables)(TOKENS) ** 2).mean()


def gradient_of(kind, **changes):
    """The loss and its gradient with respect to what is trained, of the variables."""
    loss = loss_of(kind, **changes)

    def of_params(params, rest):
        # Counters of random numbers may only change in the trace that made them.
        return loss(nnx.merge_state(params, jax.tree.map(lambda leaf: leaf, rest)))

    def of_variables(variables):
        return jax.value_and_grad(of_params)(*nnx.split_state(variables, nnx.Param, ...))

    return jax.value_and_grad(loss) if kind == "bert" else of_variables


def test_bert_large_has_the_parameters_of_its_paper():
    """335,141,888 are published with the pooler, which predicting masked tokens does without."""
    model = bert.Bert(bert.BertConfig())
    tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    masked = jax.ShapeDtypeStruct((1, 76), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens, masked)["params"]
    square, norm = 1024**2 + 1024, 2 * 1024
    up, down = 1024 * 4096 + 4096, 4096 * 1024 + 1024
    assert count(params["block7"]) == 4 * square + up + down + 2 * norm
    body = count({name: leaf for name, leaf in params.items() if "block" in name})
    embeddings = sum(count(params[name]) for name in ("tokens", "positions", "segments", "norm"))
    assert body + embeddings + square == 335_141_888
    head = count([params[name] for name in ("transform", "transform_norm", "bias")])
    assert head == square + norm + 30522
    assert count(params) == body + embeddings + head == 335_174_458


@pytest.mark.parametrize(
    ("kind", "size"), [("gpt", "1.3b"), ("gpt", "tiny"), ("bert", "large"), ("bert", "tiny")]
)
def test_sizes_say_how_many_parameters_the_nets_have(kind, size):
    net = NETS[kind]
    sizes = net.SIZES[size]
    work = net.workload(sizes, attention="xla")
    state = jax.eval_shape(work.state)
    assert count(state["params"]) == sizes.parameters
    assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {jnp.dtype(jnp.float32)}
    assert count(state["opt"]) == 2 * sizes.parameters + 1
    assert work.items == sizes.batch * sizes.sequence


def test_billions_are_what_the_names_say():
    parameters = {name: sizes.parameters for name, sizes in gpt.SIZES.items()}
    assert parameters["350m"] == pytest.approx(0.35e9, rel=0.03)
    assert parameters["1.3b"] == pytest.approx(1.3e9, rel=0.03)
    assert parameters["7b"] == pytest.approx(6.7e9, rel=0.03)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_bert_computes_logits_of_masked_positions_in_the_dtype_asked_for(scan_layers):
    model = small_bert(dtype=jnp.bfloat16, scan_layers=scan_layers)
    logits, variables = jax.eval_shape(
        lambda: model.init_with_output(jax.random.key(0), TOKENS, SEGMENTS, MASKED)
    )
    assert (logits.shape, logits.dtype) == ((2, 4, 61), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


def test_every_token_of_bert_sees_every_other():
    variables = variables_of("bert")
    forward = jax.jit(lambda *texts: small_bert().apply(variables, *texts, EVERYWHERE))
    before, seventh = forward(TOKENS, SEGMENTS), np.arange(12) == 7
    other_tokens = np.where(seventh, (TOKENS + 1) % 61, TOKENS)
    other_segments = np.where(seventh, 1 - SEGMENTS, SEGMENTS)
    for changed in ((other_tokens, SEGMENTS), (TOKENS, other_segments)):
        assert np.abs(forward(*changed) - before).max(axis=(0, 2)).min() > 1e-6


def test_bert_gathers_positions_and_scanned_blocks_are_the_same_function():
    params = variables_of("bert")["params"]
    stacked = {name: leaf for name, leaf in params.items() if "block" not in name}
    blocks = params["block0"], params["block1"]
    stacked["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    scanned = small_bert(scan_layers=True).apply
    found = jax.jit(scanned)({"params": stacked}, TOKENS, SEGMENTS, MASKED)
    unrolled = jax.jit(small_bert().apply)({"params": params}, TOKENS, SEGMENTS, EVERYWHERE)
    expected = np.take_along_axis(np.asarray(unrolled), MASKED[..., None], axis=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=32 * EPS)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_useful_values_of_bert_have_names_for_policies(scan_layers):
    text = str(
        jax.make_jaxpr(loss_of("bert", scan_layers=scan_layers))(
            variables_of("bert", scan_layers=scan_layers)
        )
    )
    for name in ("block_in", "qkv", "attention", "block_mid", "mlp_up"):
        assert text.count(f"name[name={name}]") == (1 if scan_layers else 2), name
    assert text.count("name[name=logits]") == 1


def matrix_products(jaxpr):
    """How many equations of a jaxpr multiply matrices; bodies that are equal count each time."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == "dot_general"
        for value in jax.tree.leaves(tuple(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            found += matrix_products(inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.wide
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("kind", NETS)
def test_a_checkpoint_policy_recomputes_and_changes_nothing(kind, scan_layers):
    # What is recomputed draws its numbers again, and they must be the same.
    options = {"scan_layers": scan_layers, **({"dropout": 0.5} if kind == "gpt" else {})}
    variables = variables_of(kind, **options)
    plain = gradient_of(kind, **options)
    names = gradient_of(
        kind, **options, remat_policy=POLICIES.save_only_these_names("qkv", "mlp_up")
    )
    nothing = gradient_of(kind, **options, remat_policy=POLICIES.nothing_saveable)
    products = [
        matrix_products(jax.make_jaxpr(gradient)(variables).jaxpr)
        for gradient in (plain, names, nothing)
    ]
    assert products[0] < products[1] < products[2]

    expected, found = jax.jit(plain)(variables), jax.jit(nothing)(variables)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=32 * EPS)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    for ours, theirs in zip(*map(jax.tree.leaves, (found[1], expected[1])), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=64 * EPS * scale)


@pytest.mark.parametrize("kind", NETS)
def test_attention_is_the_implementation_asked_for(kind):
    with pytest.raises(ValueError, match="Unsupported implementation option: of my own"):
        jax.eval_shape(loss_of(kind, attention="of my own"), variables_of(kind))


def test_workloads_use_flash_attention_unless_told_otherwise(net):
    assert inspect.signature(net.workload).parameters["attention"].default == "cudnn"


def test_masked_tokens_are_hidden_and_are_the_labels():
    sizes = replace(bert.SIZES["large"], batch=3)
    batch = jax.jit(lambda: bert.masked_batch(sizes))()
    masked = np.asarray(batch["masked"])
    assert batch["tokens"].shape == batch["segments"].shape == (3, 512)
    assert masked.shape == batch["labels"].shape == (3, 76)
    assert np.diff(masked, axis=1).min() > 0
    hidden = np.zeros((3, 512), bool)
    np.put_along_axis(hidden, masked, True, axis=1)
    assert (np.asarray(batch["tokens"])[hidden] == sizes.mask_token).all()
    assert (np.asarray(batch["tokens"])[~hidden] == sizes.mask_token).mean() < 0.01
    assert len(np.unique(batch["labels"])) > 200
    assert np.asarray(batch["segments"]).sum(axis=1).tolist() == [256] * 3


def test_handwritten_policies_name_values_of_the_step(net):
    work = tiny(net)
    text = str(jax.make_jaxpr(work.step)(jax.eval_shape(work.state), jax.eval_shape(work.batch)))
    layers = net.SIZES["tiny"].layers
    for name in (*work.saved, *work.offloaded):
        assert text.count(f"name[name={name}]") == layers, name


def losses_of(step, state, batch, count):
    state, losses = jax.tree.map(jnp.copy, state), []
    for _ in range(count):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


@functools.cache
def trained(kind):
    """A tiny workload, its first state and batch, its step as written, twelve losses of that."""
    work = tiny(NETS[kind])
    state, batch = jax.jit(work.state)(), jax.jit(work.batch)()
    step = jax.jit(work.step, donate_argnums=0).lower(state, batch).compile()
    return work, state, batch, step, losses_of(step, state, batch, 12)


@pytest.mark.parametrize("kind", NETS)
def test_a_tiny_workload_learns_its_batch(kind):
    *_, losses = trained(kind)
    assert losses[0] == pytest.approx(np.log(NETS[kind].SIZES["tiny"].vocab_size), rel=0.05)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=pytest.mark.slow if n else pytest.mark.wide)
        for n, k in enumerate(NETS)
    ],
)
def test_a_tiny_workload_has_the_same_losses_inside_a_budget(kind):
    work, state, batch, as_written, losses = trained(kind)
    needs = as_written.memory_analysis()
    budget = needs.argument_size_in_bytes + int(0.55 * needs.temp_size_in_bytes)
    step = jaxmem.fit(work.step, budget=budget, donate_argnums=0, progress=False)
    plan = step.plan(state, batch)
    assert plan.recomputed()
    assert plan.compiled_bytes <= budget
    assert plan.aliased_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert plan.output_bytes < 1.01 * plan.aliased_bytes
    np.testing.assert_allclose(losses_of(step, state, batch, 3), losses[:3], rtol=256 * EPS)
