"""Gradient accumulation against the same function on the whole batch, and against plain loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.program.microbatches import counts, standing_for
from tests.problems import assert_same
from tests.program.microbatched import ROWS, WIDTH, W, X, Y, errors, mean_loss, parts

# --- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_means_are_those_of_the_whole_batch(count: int):
    whole = jax.jit(jax.value_and_grad(mean_loss))(W, X, Y)
    accumulated = jaxmem.accumulate(jax.value_and_grad(mean_loss), count)
    assert_same(whole, jax.jit(accumulated)(W, X, Y))
    assert_same(whole, accumulated(W, X, y=Y))
    assert accumulated.__name__ == mean_loss.__name__


def test_gradients_alone_and_of_several_arguments():
    for argnums in (0, (0,), (0, 1)):
        grad = jax.grad(lambda p, q, x, y: mean_loss(p, x * q, y), argnums=argnums)
        found = jaxmem.accumulate(grad, 4, argnums=(2, 3))(W, jnp.ones(WIDTH), X, Y)
        assert_same(grad(W, jnp.ones(WIDTH), X, Y), found)


def test_sums_where_asked():
    def total(params, x, y):
        e = errors(params, x, y)
        kept = x[:, 0] > 0
        return jnp.where(kept[:, None], e, 0).sum(), kept.sum()

    grad = jax.value_and_grad(total, has_aux=True)
    found = jaxmem.accumulate(grad, 3, reduce="sum")(W, X, Y)
    assert_same(grad(W, X, Y), found)
    assert found[0][1].dtype == jnp.int32
    mixed = jaxmem.accumulate(grad, 3, reduce=(("mean", "sum"), "mean"))(W, X, Y)
    assert_same(jax.tree.map(lambda g: g / 3, found[1]), mixed[1])
    assert int(mixed[0][1]) == int((X[:, 0] > 0).sum())


def test_rows_come_back_in_the_order_of_the_batch():
    def loss(params, x, y):
        e = errors(params, x, y)
        aux = {"row": e.sum(1), "columns": e.T, "norm": jnp.abs(e).mean(), "none": None}
        return e.mean(), aux

    grad = jax.value_and_grad(loss, has_aux=True)
    for count in (2, 4):
        found = jaxmem.accumulate(grad, count)(W, X, Y)
        assert_same(grad(W, X, Y), found)
        assert found[0][1]["columns"].shape == (3, ROWS)


def test_what_optax_does_where_it_does_it():
    """The same rows in the same microbatches, added up in the same order."""
    kinds = optax.microbatching.AccumulationType

    def loss(params, x, y):
        return mean_loss(params, x, y), errors(params, x, y).sum(1)

    grad = jax.value_and_grad(loss, has_aux=True)
    theirs = optax.microbatch(
        grad,
        (1, 2),
        ROWS // 4,
        accumulator=((kinds.MEAN, kinds.CONCAT), dict.fromkeys(W, kinds.MEAN)),
    )
    assert_same(jax.jit(theirs)(W, X, Y), jax.jit(jaxmem.accumulate(grad, 4))(W, X, Y))


def test_a_gradient_as_long_as_a_microbatch_is_not_a_row_each():
    w = jnp.ones((3, WIDTH))
    grad = jax.grad(lambda w, x: ((x @ w.T) ** 2).mean())
    assert_same(grad(w, X), jaxmem.accumulate(grad, 4)(w, X))


def test_the_last_value():
    def loss(params, x, y):
        return mean_loss(params, x, y), {"first": x[0, 0], "flag": x[0, 0] > 0}

    grad = jax.value_and_grad(loss, has_aux=True)
    (_, aux), _ = jaxmem.accumulate(grad, 4, reduce=(("mean", "last"), "mean"))(W, X, Y)
    assert (float(aux["first"]), bool(aux["flag"])) == (float(X[3, 0]), bool(X[3, 0] > 0))


def test_other_arguments_reach_every_microbatch():
    def loss(params, x, scale, *, twice, y, mode):
        assert mode == "train"
        return mean_loss(params, x * scale, y) * (2 if twice else 1)

    grad = jax.grad(loss)
    given = {"twice": True, "y": Y, "mode": "train"}
    accumulated = jaxmem.accumulate(grad, 4, argnums=("x", "y"))
    assert_same(grad(W, X, jnp.float32(2), **given), accumulated(W, X, jnp.float32(2), **given))
    assert_same(grad(W, x=X, scale=2.0, **given), accumulated(W, x=X, scale=2.0, **given))


def test_one_microbatch_calls_the_function_as_it_is():
    seen = []

    def record(*args, **kwargs):
        seen.append((args, kwargs))
        return "as it is"

    assert jaxmem.accumulate(record, 1)(W, X, y=Y) == "as it is"
    ((args, kwargs),) = seen
    assert args[1] is X
    assert kwargs["y"] is Y


def test_memory_is_that_of_one_microbatch():
    ws, x = [jnp.eye(64)] * 8, jnp.ones((2048, 64))

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def temporaries(grad):
        return jax.jit(grad).lower(ws, x).compile().memory_analysis().temp_size_in_bytes

    whole = temporaries(jax.grad(loss))
    split = temporaries(jaxmem.accumulate(jax.grad(loss), 8))
    # An eighth of the activations and one more sum of the gradients; no copy of the batch.
    assert whole / 8 < split < whole / 8 + x.nbytes / 2 + 8 * ws[0].nbytes


# --- what sums are kept in -----------------------------------------------------------------------


def test_sums_of_bfloat16_are_kept_in_float32_and_cast_back():
    """256 plus ones stays 256 in bfloat16."""
    x = jnp.asarray([256.0, *[1.0] * 255], jnp.bfloat16).reshape(256, 1)
    grad = jax.grad(lambda w, x: (x @ w).sum())
    w = jnp.ones(1, jnp.bfloat16)
    found = jaxmem.accumulate(grad, 256, reduce="sum")(w, x)
    assert (float(found[0]), found.dtype) == (float(jnp.bfloat16(511)), jnp.bfloat16)
    low = jaxmem.accumulate(grad, 256, reduce="sum", dtype=jnp.bfloat16)(w, x)
    assert (float(low[0]), low.dtype) == (256.0, jnp.bfloat16)


def test_wider_sums_are_wider():
    grad = jax.grad(lambda w, x: (x @ w).sum())
    jaxpr = str(jax.make_jaxpr(jaxmem.accumulate(grad, 2, dtype=jnp.float16))(W["w"][:, 0], X))
    assert "f16[5]" in jaxpr
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(X), jnp.float64)
        found = jaxmem.accumulate(grad, 4, reduce="sum")(jnp.ones(WIDTH, jnp.float64), x)
        assert_same(grad(jnp.ones(WIDTH, jnp.float64), x), found)


# --- random keys ---------------------------------------------------------------------------------


def noisy(params, key, x, y):
    noise = jax.random.normal(jax.tree.leaves(key)[0], x.shape)
    return mean_loss(params, x + noise, y), noise


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)])
def test_keys_are_folded_in_with_the_number_of_the_microbatch(key):
    grad = jax.value_and_grad(noisy, has_aux=True)
    found = jaxmem.accumulate(grad, 3, key_argnums=1)(W, {"dropout": key}, X, Y)
    several = [
        grad(W, {"dropout": jax.random.fold_in(key, i)}, x, y)
        for i, (x, y) in enumerate(parts(3, X, Y))
    ]
    assert_same(jax.tree.map(lambda *g: sum(g) / 3, *[g for _, g in several]), found[1])
    noise = [np.asarray(aux) for (_, aux), _ in several]
    assert_same(noise[2], found[0][1][2::3])
    assert not np.allclose(noise[0], noise[1])


def test_several_keys_in_one_array():
    def loss(w, keys, x):
        return (x * w).mean() + jax.vmap(jax.random.uniform)(keys).sum()

    keys = jax.random.split(jax.random.key(0), 5)
    found = jaxmem.accumulate(jax.value_and_grad(loss), 2, key_argnums="keys")(1.0, keys, X)
    folded = [jax.vmap(jax.random.fold_in, (0, None))(keys, i) for i in range(2)]
    expected = sum(loss(1.0, k, x) for k, (x,) in zip(folded, parts(2, X), strict=True)) / 2
    assert_same(expected, found[0])


def test_a_key_for_each_row_is_split():
    def loss(w, keys, x):
        return (jax.vmap(jax.random.uniform)(keys) * x[:, 0] * w).mean()

    keys = jax.random.split(jax.random.key(0), ROWS)
    grad = jax.grad(loss)
    assert_same(grad(1.0, keys, X), jaxmem.accumulate(grad, 3)(1.0, keys, X))


# --- bad input -----------------------------------------------------------------------------------

MODULE = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
GRAD = jax.value_and_grad(mean_loss)
AUX = jax.value_and_grad(lambda p, x, y: (mean_loss(p, x, y), (x > 0).sum()), has_aux=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxmem.accumulate(GRAD, 0), "microbatches is 0: it takes a number from 1"),
        (lambda: jaxmem.accumulate(GRAD, 2.5), "microbatches is 2.5"),
        (lambda: jaxmem.accumulate(GRAD, True), "microbatches is True"),
        (lambda: jaxmem.accumulate(GRAD, "4"), "microbatches is '4'"),
        (lambda: jaxmem.accumulate(3, 4), "needs a function such as jax.value_and_grad"),
        (lambda: jaxmem.accumulate(GRAD, 4, argnums=1.5), "argnums is 1.5: it takes the number"),
        (lambda: jaxmem.accumulate(GRAD, 4, key_argnums=[True]), "key_argnums is"),
        (lambda: jaxmem.accumulate(GRAD, 4, dtype=jnp.int32), "dtype is .* floating"),
        (lambda: jaxmem.accumulate(GRAD, 4, dtype="nothing"), "dtype is 'nothing'"),
    ],
)
def test_bad_options(make, message: str):
    with pytest.raises(jaxmem.MicrobatchError, match=message):
        make()


@pytest.mark.parametrize(
    ("accumulated", "args", "message"),
    [
        (
            jaxmem.accumulate(GRAD, 5),
            (W, X, Y),
            r"x of mean_loss has 12 rows, .* into 5 equal .*=4 or 6",
        ),
        (
            jaxmem.accumulate(GRAD, 24),
            (W, X, Y),
            "into 24 equal microbatches. Use microbatches=12,",
        ),
        (jaxmem.accumulate(GRAD, 1), (W, X[:0], Y["targets"][:0]), "x of mean_loss has 0 rows"),
        (jaxmem.accumulate(GRAD, 2), (W,), "no batch argument to split: its arguments are params"),
        (jaxmem.accumulate(GRAD, 2), (W, True, None), "no batch argument"),
        (
            jaxmem.accumulate(GRAD, 2),
            (W, X, {"targets": X[:4]}),
            r"x has 12 rows and y\['targets'\] has 4",
        ),
        (
            jaxmem.accumulate(GRAD, 2),
            (W, X, jnp.ones(())),
            "y of mean_loss is a scalar float32: no",
        ),
        (jaxmem.accumulate(GRAD, 2, argnums=(1, 2)), (W, X, 3), "y of mean_loss is 3: no leading"),
        (jaxmem.accumulate(GRAD, 2), (W, jax.random.key(0), X), "random key: .*key_argnums=1"),
        (
            jaxmem.accumulate(GRAD, 2, argnums=2),
            (W, jax.random.key(0), X),
            "same numbers in every microbatch. Use key_argnums=1",
        ),
        (jaxmem.accumulate(GRAD, 2, argnums=7), (W, X, Y), "no argument 7 in this call .* argnums"),
        (jaxmem.accumulate(GRAD, 2, key_argnums="z"), (W, X, Y), "no argument 'z' in this call"),
        (
            jaxmem.accumulate(GRAD, 2, argnums=1, key_argnums=1),
            (W, X, Y),
            "both split and given new",
        ),
        (jaxmem.accumulate(GRAD, 2, argnums=(0, 1, 2)), (MODULE, X, Y), "both split and an NNX"),
        (jaxmem.accumulate(GRAD, 2, reduce="most"), (W, X, Y), "reduce holds 'most': it takes"),
        (jaxmem.accumulate(GRAD, 2, reduce=("mean", 9)), (W, X, Y), "reduce holds 9"),
        (jaxmem.accumulate(GRAD, 2, reduce=["mean"]), (W, X, Y), "does not have the structure of"),
        (jaxmem.accumulate(GRAD, 2, reduce=(0, "mean")), (W, X, Y), "becomes argument params"),
        (jaxmem.accumulate(AUX, 2), (W, X, Y), r"result\[0\]\[1\] is int32\[\], which has no mean"),
        (
            jaxmem.accumulate(lambda p, x: x @ x.T, 2),
            (W, X),
            r"result is \[12, 12\] for the whole batch and \[6, 6\] for one of 2",
        ),
        (
            jaxmem.accumulate(lambda p, x: [x] * x.shape[0], 2),
            (W, X),
            "results of one tree structure",
        ),
    ],
)
def test_bad_calls(accumulated, args, message: str):
    with pytest.raises(jaxmem.MicrobatchError, match=message):
        accumulated(*args)


def test_auto_outside_of_a_fitted_step():
    accumulated = jaxmem.accumulate(GRAD, jaxmem.AUTO)
    for call in (accumulated, jax.jit(accumulated)):
        with pytest.raises(jaxmem.AutoOutsideFitError, match="outside of a fitted step"):
            call(W, X, Y)
    assert repr(jaxmem.AUTO) == "jaxmem.AUTO"


# --- what AUTO may be ----------------------------------------------------------------------------


def test_counts_are_common_divisors():
    assert counts([12, 18]) == (1, 2, 3, 6)
    many = counts([5040])
    assert len(many) < 16
    assert all(5040 % n == 0 for n in many)
    assert (many[0], many[-1]) == (1, 5040)


def test_a_jitted_function_follows_the_count_of_each_trace():
    accumulated = jax.jit(jaxmem.accumulate(GRAD, jaxmem.AUTO))
    for count in (1, 2, 1, 3):
        with standing_for(count) as choice:
            jaxpr = str(jax.make_jaxpr(accumulated)(W, X, Y))
        assert choice.sizes == [ROWS]
        assert ("scan" in jaxpr) == (count > 1)
        assert f"length={count}" in jaxpr or count == 1
