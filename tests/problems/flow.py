"""Steps with more than one straight forward pass: loops, branches, several gradients, gathers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from .problem import (
    ADAM,
    MOMENTUM,
    cross_entropy,
    integers,
    layer_norm,
    normal,
    plain,
    random_numbers,
    train_step,
    weight,
)
from .rules import CLASSES, WIDTH, labelled, mlp, mlp_weights


def make_accumulation():
    """Gradients of four microbatches accumulated in a scan, a scanned net inside."""
    rng = random_numbers(0)
    layers = {"up": weight(rng, 8, WIDTH, 2 * WIDTH), "down": weight(rng, 8, 2 * WIDTH, WIDTH)}
    params = {"layers": layers, "head": weight(rng, WIDTH, CLASSES)}

    def loss(params, x, labels):
        def body(x, weights):
            return x + jax.nn.gelu(layer_norm(x) @ weights["up"]) @ weights["down"], None

        x, _ = jax.lax.scan(body, x, params["layers"])
        return cross_entropy(layer_norm(x) @ params["head"], labels)

    def step(params, opt_state, x, labels):
        def microbatch(carry, batch):
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, carry, (value, grads)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(microbatch, zeros, (x, labels))
        value, grads = jax.tree.map(lambda a: a / len(x), total)
        updates, opt_state = ADAM.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    batch = normal(rng, 4, 1024, WIDTH), integers(rng, CLASSES, 4, 1024)
    return step, (params, ADAM.init(params), *batch)


def make_branches():
    """Layers that iterate by ``while_loop`` to a gate, and choose their path by ``cond``."""
    rng = random_numbers(0)
    params = mlp_weights(rng)

    def halvings(x):
        """How often the largest value must be halved to be below 1: no gradient, data dependent."""

        def running(state):
            largest, _ = state
            return largest > 1

        def halve(state):
            largest, count = state
            return largest / 2, count + 1

        start = jax.lax.stop_gradient(jnp.abs(x).max()), jnp.int32(0)
        return jax.lax.while_loop(running, halve, start)[1]

    def loss(params, x, labels, deep):
        for i, block in enumerate(params["blocks"]):
            scale = 0.5 ** halvings(x).astype(x.dtype)

            def wide(x, block=block, scale=scale):
                return x + jnp.tanh(layer_norm(x) @ block["up"] * scale) @ block["down"]

            x = jax.lax.cond(deep > i, wide, lambda x: x, x)
        return cross_entropy(layer_norm(x) @ params["head"], labels)

    args = (params, ADAM.init(params), *labelled(rng), jnp.int32(6))
    return train_step(loss, ADAM), args


def make_map():
    """A forward pass over groups of the batch by ``lax.map``."""
    rng = random_numbers(0)
    params = mlp_weights(rng)

    def loss(params, x, labels):
        logits = jax.lax.map(functools.partial(mlp, params), x)
        return cross_entropy(logits, labels)

    x, labels = normal(rng, 8, 256, WIDTH), integers(rng, CLASSES, 8, 256)
    return train_step(loss, ADAM), (params, ADAM.init(params), x, labels)


def make_per_example():
    """One gradient for every example by ``vmap(grad)``, clipped by its norm, averaged."""
    rng = random_numbers(0)
    params = mlp_weights(rng, 3, width=32)

    def loss(params, x, label):
        return cross_entropy(mlp(params, x[None]), label[None])

    def step(params, opt_state, x, labels):
        each = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))
        values, grads = each(params, x, labels)
        norms = jnp.sqrt(sum(jnp.square(g).sum((1, 2)) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1, 1 / norms)
        grads = jax.tree.map(lambda g: jnp.tensordot(scale, g, 1) / len(x), grads)
        updates, opt_state = MOMENTUM.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, values.mean()

    x, labels = normal(rng, 384, 32), integers(rng, CLASSES, 384)
    return step, (params, MOMENTUM.init(params), x, labels)


def make_adversarial():
    """A generator and a critic, each with its own gradient; the second sees the first's update."""
    rng = random_numbers(0)
    state = {
        "generator": mlp_weights(rng, 6, outputs=WIDTH),
        "critic": mlp_weights(rng, 6, outputs=1),
    }
    moments = {name: ADAM.init(params) for name, params in state.items()}

    def critic_loss(critic, generator, noise, real):
        fake = jax.lax.stop_gradient(mlp(generator, noise))
        margin = jax.nn.softplus(mlp(critic, fake)) + jax.nn.softplus(-mlp(critic, real))
        return margin.mean()

    def generator_loss(generator, critic, noise):
        return jax.nn.softplus(-mlp(critic, mlp(generator, noise))).mean()

    def update(params, moments, grads):
        updates, moments = ADAM.update(grads, moments)
        return optax.apply_updates(params, updates), moments

    def step(state, moments, noise, real):
        generator, critic = state["generator"], state["critic"]
        first, grads = jax.value_and_grad(critic_loss)(critic, generator, noise, real)
        critic, critic_moments = update(critic, moments["critic"], grads)
        second, grads = jax.value_and_grad(generator_loss)(generator, critic, noise)
        generator, generator_moments = update(generator, moments["generator"], grads)
        state = {"generator": generator, "critic": critic}
        moments = {"generator": generator_moments, "critic": critic_moments}
        return state, moments, {"critic": first, "generator": second}

    return step, (state, moments, normal(rng, 2048, WIDTH), normal(rng, 2048, WIDTH))


def make_graph():
    """Message passing on a graph: gathers, scatter-adds, a sort and a top-k."""
    rng = random_numbers(0)
    nodes, edges, top = 1024, 4096, 32
    params = {"embedding": normal(rng, 96, WIDTH), **mlp_weights(rng, 4)}
    graph = integers(rng, nodes, 2, edges)

    def loss(params, kinds, graph, labels):
        x = params["embedding"][kinds]
        source, target = graph
        for block in params["blocks"]:
            message = jnp.tanh(layer_norm(x[source] - x[target]) @ block["up"]) @ block["down"]
            x = layer_norm(x + jnp.zeros_like(x).at[target].add(message))
        ordered = jnp.sort(x, axis=0)[:: nodes // top]
        best = jax.lax.top_k(x.T, top)[0].T
        logits = jnp.concatenate([x, ordered, best]) @ params["head"]
        return cross_entropy(logits, labels)

    kinds, labels = integers(rng, 96, nodes), integers(rng, CLASSES, nodes + 2 * top)
    return train_step(loss, ADAM), (params, ADAM.init(params), kinds, graph, labels)


def make_whitening():
    """Layers that whiten their features by the eigenvectors of their covariance (``eigh``)."""
    rng = random_numbers(0)
    params = mlp_weights(rng, 4)

    def whiten(x):
        covariance = x.T @ x / len(x) + jnp.diag(jnp.linspace(1, 3, x.shape[1], dtype=x.dtype))
        values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(covariance))
        return x @ (vectors * jax.lax.rsqrt(values)) @ vectors.T

    def loss(params, x, labels):
        for block in params["blocks"]:
            x = x + jax.nn.silu(whiten(layer_norm(x)) @ block["up"]) @ block["down"]
        return cross_entropy(layer_norm(x) @ params["head"], labels)

    return train_step(loss, ADAM), (params, ADAM.init(params), *labelled(rng))


PROBLEMS = [
    plain("accumulation", make_accumulation, "scan", "nested_scan", "accumulation"),
    plain("branches", make_branches, "while", "cond"),
    plain("map", make_map, "scan", "map"),
    plain("per_example", make_per_example, "vmap"),
    plain("adversarial", make_adversarial, "two_gradients"),
    plain("graph", make_graph, "gather", "scatter", "sort"),
    plain("whitening", make_whitening, "linalg"),
]
