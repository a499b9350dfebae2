"""verify="full": two runs agree up to rounding, also where the step magnifies rounding."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.errors import VerificationError
from jaxmem.runtime.verify import compare, nudged


def test_leaves_that_agree_pass_and_others_are_named():
    a = jnp.linspace(-1.0, 1.0, 9)
    compare([a], [a * (1 + 1e-6)], ["['w']"], "step")
    with pytest.raises(VerificationError, match=r"step: result \['w'\] differs .* by 1\.0e-01"):
        compare([a], [a + 0.1], ["['w']"], "step")


def test_what_is_not_a_float_must_be_equal():
    with pytest.raises(VerificationError, match="must be equal"):
        compare([jnp.arange(3)], [jnp.arange(3) + 1], ["[0]"], "step")


def test_one_that_is_not_finite_is_a_difference():
    with pytest.raises(VerificationError, match="inf"):
        compare([jnp.ones(3)], [jnp.array([1.0, jnp.nan, 1.0])], ["[0]"], "step")


def test_a_leaf_may_differ_as_much_as_the_step_differs_from_itself():
    noise = jnp.array([1.0, -1.0])
    compare([noise], [-noise], ["[0]"], "step", lambda: [noise * jnp.array([-1.0, 1.0])])
    with pytest.raises(VerificationError, match="differs"):
        compare([noise], [-noise], ["[0]"], "step", lambda: [noise * (1 + 1e-7)])


def test_nudged_changes_only_the_last_bit_of_floats():
    x = jnp.linspace(1.0, 2.0, 100)
    moved = nudged(x, 0)
    assert 0 < float(jnp.abs(moved - x).max()) <= 4 * float(jnp.finfo(x.dtype).eps)
    assert nudged(jnp.arange(3), 0).tolist() == [0, 1, 2]


def test_a_gradient_that_is_zero_but_for_rounding_is_no_false_alarm():
    """A key bias does not change attention: Adam makes a full update of its rounding."""
    optimizer = optax.adam(1e-2, eps=1e-12)

    def loss_fn(layers, x):
        for w in layers:
            keys = x @ w["k"] + w["b"]
            x = x + jnp.tanh(jax.nn.softmax((x @ w["q"]) @ keys.T) @ x @ w["v"])
        return (x**2).mean()

    def step(layers, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(layers, x)
        updates, state = optimizer.update(grads, state, layers)
        return optax.apply_updates(layers, updates), state, loss

    def weight(seed, *shape):
        return 0.1 * jax.random.normal(jax.random.key(seed), shape)

    layers = [
        {
            "q": weight(n, 32, 32),
            "k": weight(n + 10, 32, 32),
            "b": weight(n + 20, 32),
            "v": weight(n + 30, 32, 32),
        }
        for n in range(6)
    ]
    args = layers, optimizer.init(layers), weight(99, 256, 32)
    whole = jaxmem.analyze(step, *args).compiled_bytes
    fitted = jaxmem.fit(step, budget=whole * 6 // 10, verify="full", progress=False)
    assert jnp.isfinite(fitted(*args)[2])
    assert fitted.plan(*args).recomputed()
