"""The number of microbatches that the planner chooses for ``jaxmem.AUTO``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.runtime import microbatches
from jaxmem.runtime.tries import MOST_COMPILES
from tests.laws import total_bytes
from tests.problems import assert_same

LAYERS, WIDTH, ROWS = 6, 64, 2048
WS = list(jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 8)
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def loss(ws, x):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return (x**2).mean()


def update(ws, value_and_grads):
    value, grads = value_and_grads
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def step(ws, x):
    return update(ws, jaxmem.accumulate(jax.value_and_grad(loss), jaxmem.AUTO)(ws, x))


def whole(ws, x):
    return update(ws, jax.value_and_grad(loss)(ws, x))


@pytest.fixture(scope="module")
def keep_all_bytes() -> int:
    return jaxmem.plan(whole, WS, X, progress=False).compiled_bytes


@pytest.fixture(scope="module")
def third(keep_all_bytes):
    """The step in a third of what it takes as written."""
    fitted = jaxmem.fit(step, budget=keep_all_bytes // 3, progress=False)
    return fitted, fitted.plan(WS, X)


def test_one_where_the_step_as_written_fits(keep_all_bytes):
    fitted = jaxmem.fit(step, budget=keep_all_bytes, progress=False)
    plan = fitted.plan(WS, X)
    assert (plan.microbatches, plan.solver, len(plan.rounds)) == (1, "keep-all", 1)
    assert plan.compiled_bytes == keep_all_bytes
    assert plan.fingerprint == jaxmem.plan(whole, WS, X, progress=False).fingerprint
    assert_same(jax.jit(whole)(WS, X), fitted(WS, X))


def test_more_where_it_does_not(third, keep_all_bytes):
    fitted, plan = third
    assert plan.microbatches > 1
    assert ROWS % plan.microbatches == 0
    assert plan.compiled_bytes <= plan.budget_bytes == keep_all_bytes // 3
    assert plan.keep_all_compiled_bytes == keep_all_bytes
    assert plan.predicted_seconds > plan.keep_all_seconds
    assert len(plan.rounds) <= MOST_COMPILES
    assert_same(jax.jit(whole)(WS, X), fitted(WS, X))
    assert f"{plan.microbatches} microbatches, " in str(plan)


def test_the_program_is_that_of_the_number_written_down(third):
    plan = third[1]

    def written(ws, x):
        grad = jax.value_and_grad(loss)
        return update(ws, jaxmem.accumulate(grad, plan.microbatches)(ws, x))

    explicit = jaxmem.plan(written, WS, X, budget=plan.budget_bytes, progress=False)
    assert (explicit.fingerprint, explicit.kept) == (plan.fingerprint, plan.kept)
    assert explicit.microbatches == 1, "nothing was left to choose"


def test_the_same_plan_every_time(third):
    again = jaxmem.plan(step, WS, X, budget=third[1].budget_bytes, progress=False)
    assert again.to_json() == third[1].to_json()


def test_a_plan_is_followed_with_its_number(third, tmp_path, monkeypatch):
    plan = third[1]
    plan.save(tmp_path / "plan.json")
    loaded = jaxmem.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    monkeypatch.delattr(microbatches, "fit")
    again = jaxmem.fit(step, budget=plan.budget_bytes, plan=loaded, progress=False)
    assert_same(third[0](WS, X), again(WS, X), multiple=0)
    assert again.plan(WS, X).microbatches == plan.microbatches
    for count in (1, 2 * plan.microbatches):
        other = dataclasses.replace(plan, microbatches=count)
        with pytest.raises(jaxmem.PlanMismatchError, match="another program or other shapes"):
            jaxmem.fit(step, budget="1GiB", plan=other, progress=False).plan(WS, X)
    with pytest.raises(
        jaxmem.PlanMismatchError, match=r"splits the batch of loss into .* 2046 rows"
    ):
        jaxmem.fit(step, budget="1GiB", plan=plan, progress=False).plan(WS, X[:-2])


def test_a_jitted_step_and_a_jitted_function_inside_of_one(third):
    """JAX remembers what it traced with another number."""
    inner = jax.jit(jaxmem.accumulate(jax.value_and_grad(loss), jaxmem.AUTO))
    for fun in (jax.jit(step), lambda ws, x: update(ws, inner(ws, x))):
        fitted = jaxmem.fit(fun, budget=third[1].budget_bytes, progress=False)
        for _ in range(2):
            plan = fitted.plan(WS, X)
            assert plan.microbatches == third[1].microbatches
            fitted = jaxmem.fit(fun, budget=plan.budget_bytes, progress=False)
    with pytest.raises(jaxmem.AutoOutsideFitError, match="outside of a fitted step"):
        inner(WS, X)


def test_every_other_way_into_a_fitted_step(third):
    fitted, plan = third
    assert fitted.lower(WS, X).compile().memory_analysis() is not None
    assert fitted.report(WS, X).compiled_bytes == plan.compiled_bytes
    assert jaxmem.analyze(step, WS, X).compiled_bytes == plan.keep_all_compiled_bytes
    with jax.disable_jit():
        assert_same(whole(WS, X), fitted(WS, X))


def test_full_verification(third):
    fitted = jaxmem.fit(step, budget=third[1].budget_bytes, verify="full", progress=False)
    assert_same(jax.jit(whole)(WS, X), fitted(WS, X))


def test_a_budget_that_nothing_fits_names_one_that_works(keep_all_bytes):
    ws, x = WS[:2], X[:24]
    with pytest.raises(jaxmem.BudgetInfeasibleError, match="microbatches; of 1, 2, 3, 4") as caught:
        jaxmem.plan(step, ws, x, budget="40KiB", progress=False)
    with pytest.raises(jaxmem.BudgetInfeasibleError) as again:
        jaxmem.plan(step, ws, x, budget=caught.value.smallest_bytes - 1, progress=False)
    assert again.value.smallest_bytes == caught.value.smallest_bytes
    plan = jaxmem.plan(step, ws, x, budget=caught.value.smallest_bytes, progress=False)
    assert plan.compiled_bytes <= caught.value.smallest_bytes
    assert len(plan.rounds) <= MOST_COMPILES


@pytest.mark.parametrize(("percent", "aim"), [(55, 0.985), (48, 1.3), (30, 1.3)], ids=str)
def test_all_numbers_together_compile_no_more_than_a_plan_may(percent, aim, compiles, monkeypatch):
    """Also where no first guess fits, because predictions are far off, and where nothing does."""
    monkeypatch.setattr(microbatches, "_AIM", aim)
    ws, x = WS[:4], X.reshape(2, ROWS // 2, WIDTH)
    keep_all = total_bytes(jax.jit(whole).lower(ws, x).compile())
    budget = keep_all * percent // 100
    try:
        plan = jaxmem.plan(step, ws, x, budget=budget, progress=False)
    except jaxmem.BudgetInfeasibleError as error:
        assert percent == 30
        assert budget < error.smallest_bytes < keep_all // 2
    else:
        assert plan.compiled_bytes <= budget
        assert plan.compiled_bytes in [r.compiled_bytes for r in plan.rounds if not r.problem]
        assert len(compiles) <= len(plan.rounds) <= MOST_COMPILES
    assert 2 <= len(compiles) <= MOST_COMPILES


def test_two_uses_share_a_number():
    """Twelve and eighteen rows are split into 1, 2, 3 or 6."""
    seen = []

    def losses(ws, x):
        seen.append(x.shape[0])
        return loss(ws, x)

    def both(ws, x, y):
        grad = jaxmem.accumulate(jax.grad(losses), jaxmem.AUTO)
        return jax.tree.map(jnp.add, grad(ws, x), grad(ws, y))

    big = 64
    x, y = X[: 12 * big], X[: 18 * big]
    keep_all = jaxmem.analyze(both, WS, x, y).compiled_bytes
    plan = jaxmem.plan(both, WS, x, y, budget=int(0.6 * keep_all), progress=False)
    assert plan.microbatches > 1
    assert (12 * big) % plan.microbatches == (18 * big) % plan.microbatches == 0
    assert 12 * big // plan.microbatches in seen


def test_nnx_objects_with_a_number_that_is_chosen():
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(64, rngs=rngs)
            self.drop = nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = x + nnx.gelu(layer(x))
            return self.drop(self.norm(x))

    def train(model, optimizer, x, microbatches=jaxmem.AUTO):
        grad = nnx.value_and_grad(lambda model, x: ((model(x) - jnp.sin(x)) ** 2).mean())
        value, grads = jaxmem.accumulate(grad, microbatches)(model, x)
        optimizer.update(model, grads)
        return value

    def objects():
        model = Net()
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    ours, reference = objects(), objects()
    x = X[:512]
    fitted = jaxmem.fit(train, budget="1MiB", donate_argnums=(0, 1), progress=False)
    plan = fitted.plan(*ours, x)
    assert plan.microbatches > 1
    jitted = nnx.jit(train, static_argnames="microbatches")
    for _ in range(2):
        assert_same(jitted(*reference, x, microbatches=plan.microbatches), fitted(*ours, x))
    assert_same(nnx.state(reference), nnx.state(ours))


def test_recomputation_inside_of_microbatches():
    """The body of the loop holds the forward and the backward pass, and is planned like a step."""

    def four(ws, x):
        return update(ws, jaxmem.accumulate(jax.value_and_grad(loss), 4)(ws, x))

    keep_all = jaxmem.plan(four, WS, X, progress=False)
    fixed = keep_all.argument_bytes + keep_all.output_bytes
    budget = fixed + (keep_all.compiled_bytes - fixed) * 3 // 4
    fitted = jaxmem.fit(four, budget=budget, progress=False)
    plan = fitted.plan(WS, X)
    assert plan.compiled_bytes <= budget
    assert plan.recomputed()
    assert_same(jax.jit(four)(WS, X), fitted(WS, X))


def test_the_number_for_an_absent_gpu():
    """No array is needed, and more microbatches never are the quicker choice where one fits."""
    w = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 4
    x = jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16)
    keep_all = jaxmem.plan(whole, w, x, target="h200", progress=False).compiled_bytes
    for share, expected in ((1.0, 1), (0.3, None)):
        budget = int(keep_all * share)
        plan = jaxmem.plan(step, w, x, budget=budget, target="h200", progress=False)
        assert plan.compiled_bytes <= budget
        assert plan.microbatches == expected if expected else plan.microbatches > 1
