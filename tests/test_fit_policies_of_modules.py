"""``fit(policy=...)`` with Flax: module paths of Linen, in loops too, and NNX objects."""

from __future__ import annotations

import jax
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import policies
from tests.problems import assert_same

ROWS, WIDTH = 512, 64
MANY = "64MiB"
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.gelu(nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(h), None


class Net(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x):
        if self.scan:
            stack = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            return stack(name="Stack_0")(x, None)[0]
        for _ in range(2):
            x, _ = Block()(x, None)
        return x


def linen(scan: bool):
    net = Net(scan)
    params = net.init(jax.random.key(0), X)["params"]

    def step(params, x):
        def loss(params):
            return (net.apply({"params": params}, x) ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    return step, (params, X)


@pytest.mark.parametrize(("scan", "glob"), [(False, "Block_*/up"), (True, "Stack_*/up")])
def test_a_module_of_linen_is_found_in_loops_too(scan, glob):
    step, args = linen(scan)
    policy = policies.save(module=glob, primitive="dot_general")
    fitted = jaxmem.fit(step, budget=MANY, policy=policy, progress=False)
    products = [d for d in fitted.plan(*args).decisions if d.primitive == "dot_general"]
    found = {(d.shape[-1], d.action) for d in products}
    assert (2 * WIDTH, "keep") in found
    assert (2 * WIDTH, "recompute") not in found
    assert (WIDTH, "keep") not in found
    assert_same(jax.jit(step)(*args), fitted(*args))
    with pytest.raises(jaxmem.PolicyError, match=r"no module is 'Blok_\*/up'. Did you mean"):
        jaxmem.plan(step, *args, policy=policies.save(module="Blok_*/up"), progress=False)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(checkpoint_name(nnx.gelu(self.up(x)), "act"))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])

    def __call__(self, x):
        for one in self.layers:
            x = one(x)
        return x


def test_nnx_objects_with_a_policy():
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def fresh():
        model = Stack(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), X

    fitted = jaxmem.fit(step, budget=MANY, policy=policies.save("act"), progress=False)
    decided = fitted.plan(*fresh()).decisions
    assert {d.checkpoint_name for d in decided if d.action == "keep"} == {"act"}
    ours, plain = fresh(), fresh()
    assert_same(nnx.jit(step)(*plain), fitted(*ours))
    assert_same(nnx.state(plain[0]), nnx.state(ours[0]))
