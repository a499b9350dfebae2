"""State that goes through the microbatches in order: NNX objects, and results that come back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxmem
from tests.problems import assert_same
from tests.program.microbatched import WIDTH, X, Y, parts


class Net(nnx.Module):
    """A net with batch statistics, dropout and a count of its calls."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        # No bias: its gradient in front of a batch norm is nothing but rounding.
        self.first = nnx.Linear(WIDTH, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def net_loss(model, x, y):
    return ((model(x) - y["targets"]) ** 2).mean()


def by_hand(model, count):
    """Loss and gradients of a Python loop over the microbatches, the model going through it."""
    grad = nnx.jit(nnx.value_and_grad(net_loss))
    several = [grad(model, x, y) for x, y in parts(count, X, Y)]
    return jax.tree.map(lambda *g: sum(g) / count, *several)


def eagerly(step):
    return step


@pytest.mark.parametrize(
    "transform", [eagerly, nnx.jit, functools.partial(jaxmem.fit, budget="4MiB", progress=False)]
)
def test_nnx_objects_go_through_the_microbatches_in_order(transform):
    model, reference = Net(), Net()

    def step(model, x, y):
        return jaxmem.accumulate(nnx.value_and_grad(net_loss), 3)(model, x, y)

    found = transform(step)(model, X, Y)
    assert_same(by_hand(reference, 3), found)
    assert_same(nnx.state(reference), nnx.state(model))
    assert model.calls[...] == 3
    assert not np.allclose(model.norm.mean[...], 0)


def test_nnx_objects_inside_trees_and_behind_the_first_argument():
    model, reference = Net(), Net()

    def loss(scale, held, x, y):
        return net_loss(held["model"], x, y) * scale

    grad, scale = nnx.grad(loss), jnp.float32(1)
    found = jaxmem.accumulate(grad, 2)(scale, {"model": model, "other": 3}, X, Y)
    expected = [grad(scale, {"model": reference}, x, y) for x, y in parts(2, X, Y)]
    assert_same(sum(expected) / 2, found)
    assert_same(nnx.state(reference), nnx.state(model))


def test_linen_batch_statistics_become_those_of_the_next_microbatch():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(8, use_bias=False)(x))
            return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))

    net, key = Normed(), jax.random.key(1)
    variables = jax.jit(net.init)({"params": key, "dropout": key}, X)
    params, stats = variables["params"], variables["batch_stats"]

    def loss(params, batch_stats, dropout, x, y):
        out, new = net.apply(
            {"params": params, "batch_stats": batch_stats},
            x,
            mutable=["batch_stats"],
            rngs={"dropout": dropout},
        )
        return ((out - y["targets"]) ** 2).mean(), new["batch_stats"]

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected, now = [], stats
    for i, (x, y) in enumerate(parts(4, X, Y)):
        (value, now), grads = grad(params, now, jax.random.fold_in(key, i), x, y)
        expected.append((value, grads))
    accumulated = jaxmem.accumulate(
        grad, 4, key_argnums=2, reduce=(("mean", "batch_stats"), "mean")
    )
    (value, stats_after), grads = jax.jit(accumulated)(params, stats, key, X, Y)
    assert_same(jax.tree.map(lambda *v: sum(v) / 4, *expected), (value, grads))
    assert_same(now, stats_after)
    whole = grad(params, stats, key, X, Y)[0][1]
    mean = "BatchNorm_0", "mean"
    assert not np.allclose(whole[mean[0]][mean[1]], now[mean[0]][mean[1]])


def test_a_result_becomes_an_argument_by_its_number():
    def loss(w, average, x):
        average = 0.9 * average + 0.1 * x.mean(0)
        return ((x - average) * w).mean(), average

    grad, start = jax.value_and_grad(loss, has_aux=True), jnp.zeros(WIDTH)
    for reduce in ((("mean", 1), "mean"), (("mean", "average"), "mean")):
        (_, found), _ = jaxmem.accumulate(grad, 3, reduce=reduce)(jnp.float32(1), start, X)
        average = start
        for (x,) in parts(3, X):
            average = 0.9 * average + 0.1 * x.mean(0)
        assert_same(average, found)


def test_an_nnx_object_that_changes_its_structure():
    def loss(model, x, y):
        model.extra = nnx.Variable(x.sum())
        return net_loss(model, x, y)

    with pytest.raises(jaxmem.MicrobatchError, match=r"changes the structure .* \(args\[0\]\)"):
        jaxmem.accumulate(nnx.grad(loss), 2)(Net(), X, Y)
