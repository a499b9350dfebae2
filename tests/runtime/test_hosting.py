"""Plans with offload and hosted arguments, followed from end to end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from tests.problems import assert_same

WIDTH, ROWS = 128, 1024


def step(state, x):
    """Momentum on a chain of six products."""
    params, moments = state

    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.square(y).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    moments = [0.9 * m + g for m, g in zip(moments, gradients, strict=True)]
    return ([p - 0.1 * m for p, m in zip(params, moments, strict=True)], moments), value


def arguments():
    eye = jnp.eye(WIDTH) * 1.2
    state = [eye + 0 for _ in range(6)], [eye * 0 for _ in range(6)]
    return state, jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


@pytest.fixture(scope="module")
def planned() -> jaxmem.Plan:
    """A plan that recomputes, with what it keeps offloaded and the moments hosted."""
    plan = jaxmem.plan(
        step, *arguments(), budget="4.9MiB", target="h200", donate_argnums=0, progress=False
    )
    kept = next(k for k in plan.kept if not k.inside)
    assert kept.names
    moments = tuple(f"state[1][{n}]" for n in range(6))
    return dataclasses.replace(
        plan, kept=(dataclasses.replace(kept, offloaded=kept.names),), hosted=moments
    )


def followed(plan: jaxmem.Plan, **options):
    options = {"budget": "8MiB", "target": "h200", **options}
    return jaxmem.fit(step, donate_argnums=0, plan=plan, progress=False, **options)


def test_the_plan_says_what_is_on_the_host(planned: jaxmem.Plan):
    fitted = followed(planned)
    plan = fitted.plan(*arguments())
    assert plan.kept == planned.kept
    assert plan.hosted == planned.hosted
    assert [r.problem for r in plan.rounds] == [""]
    assert jaxmem.Plan.from_json(planned.to_json()) == planned


def test_placed_state_goes_round_without_planning_again(planned: jaxmem.Plan):
    fitted = followed(planned)
    expected, value = jax.jit(step)(*arguments())
    state, x = fitted.place(*arguments())
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
    assert kinds[6:] == ["pinned_host"] * 6
    assert "pinned_host" not in kinds[:6]
    state, found = fitted(state, x)
    assert_same((expected, value), (state, found))
    assert [m.sharding.memory_kind for m in state[1]] == ["pinned_host"] * 6
    fitted(state, x)
    assert len(fitted._outcomes) == 1


def test_state_on_the_device_is_taken_to_the_host(planned: jaxmem.Plan):
    fitted = followed(planned)
    expected = jax.jit(step)(*arguments())
    first = fitted(*arguments())
    assert_same(expected, first)
    fitted(first[0], arguments()[1])
    assert len(fitted._outcomes) == 1


def test_an_argument_that_is_not_there_is_named(planned: jaxmem.Plan):
    wrong = dataclasses.replace(planned, hosted=("state[7]",))
    with pytest.raises(jaxmem.PlanMismatchError, match=r"keeps argument state\[7\] in host memory"):
        followed(wrong).plan(*arguments())


def test_a_cpu_refuses_a_plan_with_host_memory(planned: jaxmem.Plan):
    here = dataclasses.replace(planned, target="cpu")
    with pytest.raises(jaxmem.JaxmemError, match="its device memory is host memory"):
        followed(here, target="cpu").plan(*arguments())
