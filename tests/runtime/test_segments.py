"""Plans whose loops run in segments are followed, checked, and put into words."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.planner.decisions import Kept, Segmented
from jaxmem.planner.plan import Plan
from jaxmem.planner.search import Search
from jaxmem.planner.segments import splittable
from jaxmem.runtime import describe
from tests.planner.lines import search
from tests.problems import assert_same

LAYERS = 16
W = jax.random.normal(jax.random.key(0), (LAYERS, 32, 32)) / 8
X = jax.random.normal(jax.random.key(1), (2048, 32))
CARRY = X.nbytes


def step(w, x):
    def loss(w):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        return (jax.lax.scan(layer, x, w)[0] ** 2).mean()

    return jax.value_and_grad(loss)(w)


@pytest.fixture(scope="module")
def found() -> Search:
    return search(step, W, X, host=True)


@pytest.fixture(scope="module")
def plan(found: Search) -> Plan:
    """A plan made without segments, and then cut into four."""
    plain = jaxmem.plan(step, W, X, budget="5.5MiB", progress=False)
    (path,) = splittable(found.nest)
    kept = [Kept(k.path, k.turn, () if k.path else k.names) for k in plain.kept]
    if not any(k.path for k in kept):
        raise AssertionError("the loop has no turn")
    outer = tuple(
        Kept("", c.turn[1], tuple(sorted(k.name for k in c.candidates)))
        for c in found.choices
        if not c.turn[0]
    )
    inner = tuple(k for k in kept if k.path)
    return replace(plain, kept=outer + inner, segments=(Segmented(path, LAYERS, (4,)),))


def test_a_plan_is_followed_after_a_file(plan: Plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    fitted = jaxmem.fit(step, budget="5.5MiB", plan=loaded, progress=False)
    assert_same(jax.jit(step)(W, X), fitted(W, X))
    followed = fitted.plan(W, X)
    assert followed.segments == plan.segments
    assert followed.compiled_bytes < plan.compiled_bytes - 4 * CARRY, "16 carries, and now 4 and 4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "99+100"}, "there is no pair of scans '99"),
        ({"counts": (5, 4)}, "16 iterations cannot be cut into segments"),
        ({"counts": (1,)}, "16 iterations cannot be cut into segments"),
        ({"counts": ()}, "no counts"),
        ({"length": 8}, "has 16 iterations"),
    ],
)
def test_a_plan_with_other_segments_is_refused(plan: Plan, change: dict, message: str):
    changed = replace(plan, segments=(replace(plan.segments[0], **change),))
    fitted = jaxmem.fit(step, budget="5.5MiB", plan=changed, progress=False)
    with pytest.raises(jaxmem.PlanMismatchError, match=message):
        fitted(W, X)


def test_what_runs_again_is_said(found: Search):
    (path,) = splittable(found.nest)
    everything = {c.turn: frozenset(k.name for k in c.candidates) for c in found.choices}
    whole = found.evaluate(everything)
    parted = found.evaluate(everything, segments={path: (4,)})
    nested = found.evaluate(everything, segments={path: (2, 4)})
    assert len({whole.key, parted.key, nested.key}) == 3
    assert nested.seconds > parted.seconds > whole.seconds
    assert parted.temp_bytes < whole.temp_bytes
    assert not [d for d in describe.decisions(found, whole) if d.seconds]
    again = [d for d in describe.decisions(found, parted) if d.primitive == "dot_general"]
    assert again
    assert all(d.recomputed == d.count and d.seconds for d in again)
    (words,) = describe.in_segments(found.nest, parted.segments)
    assert words.startswith("the loop of 16 iterations at test_segments.py:")
    assert "4 segments" in words
    assert "runs once more" in words
    (words,) = describe.in_segments(found.nest, nested.segments)
    assert "into 2 segments, each in 4 segments" in words
    assert "runs 2 times more" in words
    assert describe.in_segments(found.nest, {}) == []
