"""One policy in every place that takes one: the same results, and residuals that follow it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import policies, remat
from jaxmem.policies import Facts
from tests.policies.nets import ASKS_ALL, OFFLOADS, block, block_args, remat3, residuals, types

BOTH = pytest.mark.parametrize("enabled", [False, True], ids=["remat2", "remat3"])
POLICIES = [
    policies.nothing,
    policies.recompute("act"),
    policies.save(module="mlp") | policies.save("logits"),
    (policies.everything & ~policies.save(module="attn")).override(policies.save("scores")),
]


# These programs run once: compiling them is what takes time.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def same(ours, plain):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


value_and_grads = functools.partial(jax.value_and_grad, argnums=(0, 1))


@pytest.fixture(scope="module")
def plain():
    return quick(value_and_grads(block))(*block_args(3))


@BOTH
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_remat_is_the_same_function(policy, enabled, plain):
    with remat3(enabled):
        same(quick(value_and_grads(remat(block, policy)))(*block_args(3)), plain)


@BOTH
def test_remat_under_vmap_scan_and_second_derivatives(enabled):
    def f(w, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w))

    w, xs = jax.random.normal(jax.random.key(0), (4, 4)), jnp.arange(24.0).reshape(3, 2, 4) / 24
    with remat3(enabled):
        g = remat(f, policies.save(primitive="tanh"))

        def total(fun, w):
            return jax.lax.scan(lambda c, x: (c + fun(w, x), None), 0.0, xs)[0]

        def transformed(fun):
            return (
                jax.vmap(jax.grad(fun), (None, 0))(w, xs),
                jax.grad(functools.partial(total, fun))(w),
                jax.jvp(fun, (w, xs[0]), (w, xs[0])),
                jax.jacrev(jax.grad(lambda x: fun(w, x)))(xs[0]),
            )

        same(*quick(lambda: (transformed(g), transformed(f)))())


@BOTH
def test_remat_keeps_trees_static_arguments_names_and_closures(enabled):
    scale = jnp.float32(3.0)

    def f(tree, mode, x, *, shift):
        """Docs."""
        assert mode == "sin"
        y = getattr(jnp, mode)(tree["a"] * scale) + shift
        return {"y": checkpoint_name(y, "y"), "x": (x, None, 2)}

    with remat3(enabled):
        ours = remat(f, policies.save("y"), static_argnums=1)
        assert (ours.__name__, ours.__doc__) == ("f", "Docs.")
        args = ({"a": jnp.arange(3.0)}, "sin", jnp.int32(4))
        out, expected = ours(*args, shift=1.0), f(*args, shift=1.0)
        assert jax.tree.structure(out) == jax.tree.structure(expected)
        same(out["y"], expected["y"])
        negative = remat(f, policies.save("y"), static_argnums=(-2,))
        same(negative(*args, shift=1.0)["y"], expected["y"])

        def closed(s, wrap):
            return wrap(lambda x: checkpoint_name(jnp.sin(x * s), "y").sum())(jnp.arange(3.0))

        grads = [
            jax.grad(closed)(2.0, wrap)
            for wrap in (lambda h: remat(h, policies.save("y")), lambda h: h)
        ]
        same(*grads)


@BOTH
def test_one_policy_inside_another(enabled):
    def inner(x, w):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "inner") @ w)

    def outer(wrap_inner, x, w):
        return checkpoint_name(wrap_inner(inner)(x, w), "outer").sum() + jnp.cos(x).sum()

    x, w = jnp.ones((2, 4)), jnp.eye(4) / 2

    def both(x, w):
        within = functools.partial(remat, policy=policies.save("inner"))
        return remat(functools.partial(outer, within), policies.save("outer"))(x, w)

    with remat3(enabled):
        kept = residuals(both, x, w)
        same(jax.grad(both)(x, w), jax.grad(functools.partial(outer, lambda h: h))(x, w))
    # What the inner one saves is recomputed by the outer one; its result is not read again.
    assert types(kept) == ["f32[2,4]", "f32[4,4]"]


@BOTH
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_remat_inside_shard_map_and_outside(kind, enabled):
    def f(w, x):
        def shard(w, x):
            h = checkpoint_name(jnp.tanh(x @ w), "h")
            return jax.lax.psum(jnp.sin(h).sum(), "x")

        return jax.shard_map(shard, in_specs=(P(), P("x")), out_specs=P())(w, x) + jnp.sin(x).sum()

    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(kind,))), remat3(enabled):
        w, x = jax.device_put(jnp.eye(4) / 2, P()), jax.device_put(jnp.ones((2, 4)), P("x"))
        saving = remat(f, policies.save("h"))
        kept, none = (residuals(remat(f, p), w, x) for p in (policies.save("h"), policies.nothing))
        assert len(kept) == len(none) + 1
        same(*quick(lambda *a: (jax.grad(saving)(*a), jax.grad(f)(*a)))(w, x))


@BOTH
@pytest.mark.parametrize(
    "around", [lambda f, p: remat(f, p), lambda f, p: jax.checkpoint(f, policy=p)], ids="rc"
)
def test_what_an_inner_remat_keeps_is_not_what_an_outer_rule_names(around, enabled):
    def inner(x, w):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    def outer(x, w):
        x = checkpoint_name(jnp.cos(x), "outer")
        return remat(inner, policies.save(primitive="tanh"))(x, w).sum()

    with remat3(enabled):
        kept = residuals(around(outer, policies.save("*")), jnp.ones((2, 4)), jnp.eye(4))
    assert types(kept) == ["f32[2,4]", "f32[2,4]", "f32[4,4]"]
    assert sum("argument" in line for line in kept) == 2


def test_refs_inside_are_left_alone():
    def f(x):
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = x
        return jnp.sin(checkpoint_name(ref[...], "y") * x).sum()

    jaxpr = jax.make_jaxpr(remat(f, policies.recompute("y")))(jnp.arange(3.0))
    jax.extend.core.check_jaxpr(jaxpr.jaxpr)
    same(remat(f, policies.recompute("y"))(jnp.arange(3.0)), f(jnp.arange(3.0)))


def test_names_in_derivative_rules_are_found():
    """As in attention kernels: the name is in the rule, not in the function."""

    @jax.custom_vjp
    def kernel(x):
        return jnp.sin(x)

    def forward(x):
        return jnp.sin(x), checkpoint_name(jnp.cos(x), "kernel_residual")

    kernel.defvjp(forward, lambda kept, d: (kept * d,))

    def f(x):
        return kernel(jnp.exp(x)).sum()

    x = jnp.arange(3.0)
    ours = remat(f, policies.save("kernel_residual"))
    assert any("kernel_residual" in line for line in residuals(ours, x))
    same(jax.grad(ours)(x), jax.grad(f)(x))
    policies.check(policies.save("kernel_residual"), f, x)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = checkpoint_name(nn.gelu(nn.Dense(16, name="up")(x)), "act")
        return x + nn.Dense(x.shape[-1], name="down")(h)


class Net(nn.Module):
    mlp: type[nn.Module] = Mlp

    @nn.compact
    def __call__(self, x):
        for n in range(2):
            x = self.mlp(name=f"block_{n}")(x)
        return x


def linen_loss(mlp):
    return lambda params, x: (Net(mlp).apply(params, x) ** 2).sum()


@pytest.fixture(scope="module")
def linen_plain():
    x = jax.random.normal(jax.random.key(1), (8, 4))
    args = quick(Net().init)(jax.random.key(0), x), x
    return quick(jax.grad(linen_loss(Mlp)))(*args), args


@BOTH
def test_linen_remat(enabled, linen_plain):
    expected, args = linen_plain
    kept = {}
    with remat3(enabled):
        for policy in (policies.save("act"), policies.dots, policies.nothing):
            loss = linen_loss(nn.remat(Mlp, policy=policy))
            kept[policy] = types(residuals(loss, *args)).count("f32[8,16]")
        same(quick(jax.grad(linen_loss(nn.remat(Mlp, policy=policies.dots))))(*args), expected)
    assert kept[policies.save("act")] == kept[policies.dots] == kept[policies.nothing] + 2


@BOTH
def test_linen_modules_have_paths(enabled, linen_plain):
    loss, args = linen_loss(Mlp), linen_plain[1]
    with remat3(enabled):
        kept = types(residuals(remat(loss, policies.save(module="block_1/up")), *args))
        none = types(residuals(remat(loss, policies.nothing), *args))
    assert kept.count("f32[8,16]") > none.count("f32[8,16]") == 0


@BOTH
def test_linen_remat_scan(enabled):
    def net(policy):
        stack = nn.remat_scan(Mlp, lengths=(2, 3), policy=policy)()
        return stack, lambda p, x: (stack.apply(p, x) ** 2).sum()

    x = jax.random.normal(jax.random.key(1), (8, 4))
    with remat3(enabled):
        stack, plain = net(None)
        params = quick(stack.init)(jax.random.key(0), x)
        _, saving = net(policies.save("act"))
        kept, none = (types(residuals(f, params, x)) for f in (saving, net(policies.nothing)[1]))
        same(*quick(lambda *a: (jax.grad(saving)(*a), jax.grad(plain)(*a)))(params, x))
    assert kept.count("f32[2,3,8,16]") == 1
    assert none.count("f32[2,3,8,16]") == 0


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        x = checkpoint_name(jnp.tanh(self.linear(x)), "act")
        return jnp.sin(self.dropout(self.norm(x)))


def run(layer, x):
    return layer(x)


def trained(call):
    """Loss, gradients and the state after one call, compiled as one program."""

    @quick
    def train(x):
        layer = Layer(nnx.Rngs(0))
        loss, grads = nnx.value_and_grad(lambda m: (call(m, x) ** 2).sum())(layer)
        return loss, nnx.state(grads), nnx.state(layer)

    return train(jnp.sin(jnp.arange(32.0)).reshape(8, 4))


@pytest.fixture(scope="module")
def trained_plainly():
    return trained(run)


@BOTH
@pytest.mark.parametrize(
    "wrap",
    [lambda policy: nnx.remat(run, policy=policy), lambda policy: remat(run, policy)],
    ids=["nnx.remat", "jaxmem.remat"],
)
def test_nnx(wrap, enabled, trained_plainly):
    layer, x = nnx.eval_shape(lambda: Layer(nnx.Rngs(0))), jnp.ones((8, 4))
    graph, state = nnx.split(layer)

    def kept(policy):
        return residuals(lambda s, x: wrap(policy)(nnx.merge(graph, s), x), state, x)

    with remat3(enabled):
        same(trained(wrap(policies.save("act"))), trained_plainly)
        assert len(kept(policies.save("act"))) == len(kept(policies.nothing)) + 1


def test_what_nnx_counts_is_part_of_the_comparison(trained_plainly):
    before = nnx.state(Layer(nnx.Rngs(0)))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, trained_plainly[2])
    assert sum(jax.tree.leaves(changed)) >= 3  # mean, variance, count of random numbers


def test_remat_inside_fit():
    """What follows a policy of its own inside a planned step stays as it is."""

    def loss(w, x):
        h = remat(lambda h: jnp.sin(checkpoint_name(jnp.tanh(h @ w), "act")), policies.save("act"))
        for _ in range(3):
            x = h(x)
        return (x**2).mean()

    def step(w, x):
        return jax.tree.map(lambda a, d: a - 0.1 * d, w, jax.grad(loss)(w, x))

    w, x = jnp.eye(16), jnp.ones((64, 16))
    same(jaxmem.fit(step, budget="4MiB", progress=False)(w, x), step(w, x))


def test_facts_of_a_program_are_those_of_a_trace(linen_plain):
    from jaxmem.policies.facts import facts_of_op
    from jaxmem.policies.values import describe
    from jaxmem.program.calling import Caller
    from jaxmem.program.loops import nest
    from jaxmem.program.source import checkpoint_names

    loss, args = linen_loss(Mlp), linen_plain[1]
    caller = Caller(loss)
    program = caller.trace(caller.take(args, {})).program
    names = checkpoint_names(nest(program.block))
    found = [
        facts_of_op(op, value, [names[value]] if value in names else [])
        for op in program.block.ops
        for value in op.outputs
        if op.name != "name"
    ]
    assert sorted(map(str, found)) == sorted(map(str, describe(jax.make_jaxpr(loss)(*args)).facts))
    up = Facts(
        module="Net/block_0/up",
        primitive="dot_general",
        dtype="float32",
        shape=(8, 16),
        nbytes=512,
        flops=2 * 8 * 16 * 4,
        moved_bytes=4 * (8 * 4 + 4 * 16 + 8 * 16),
        batch_dims=0,
    )
    assert up in found
    assert [f.module for f in found if f.names == ("act",)] == ["Net/block_0", "Net/block_1"]


def test_what_jax_remat3_can_do_is_found_out():
    from jaxmem import _compat

    assert _compat.REMAT3_OFFLOADS == OFFLOADS
    assert ("conv_general_dilated" in _compat.REMAT3_ASKS) == ASKS_ALL
