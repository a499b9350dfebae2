"""Plans are data: they survive a file, compare, and agree with themselves."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem
from jaxmem.planner.plan import Decision, Kept, Plan, Round, Segmented

X = jnp.zeros((1024, 128))
W = jnp.zeros((128, 128))


def step(w, x):
    def loss(w):
        y = x
        for _ in range(10):
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    return jax.grad(loss)(w)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return jaxmem.plan(step, W, X, budget="4.5MiB", progress=False)


def instances(cls):
    """Any instance of a dataclass of plain fields."""
    kinds = {
        "int": st.integers(),
        "float": st.floats(allow_nan=False),
        "str": st.text(),
        "bool": st.booleans(),
        "Action": st.sampled_from(("keep", "recompute")),
        "int | None": st.none() | st.integers(),
        "tuple[int, ...]": st.lists(st.integers()).map(tuple),
        "tuple[str, ...]": st.lists(st.text()).map(tuple),
        "tuple[tuple[str, str], ...]": st.lists(st.tuples(st.text(), st.text())).map(tuple),
    }
    for part in (Decision, Round, Kept, Segmented):
        if cls is Plan:
            kinds[f"tuple[{part.__name__}, ...]"] = st.lists(instances(part), max_size=3).map(tuple)
    fields = [f for f in dataclasses.fields(cls) if f.name != "schema_version"]
    return st.builds(cls, **{f.name: kinds[f.type] for f in fields})


@given(instances(Plan))
def test_any_plan_survives_its_text(any_plan: Plan):
    text = any_plan.to_json()
    assert Plan.from_json(text) == any_plan
    assert Plan.from_json(text).to_json() == text


def test_a_plan_survives_a_file(plan: Plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan != dataclasses.replace(plan, budget_bytes=plan.budget_bytes + 1)


def test_a_plan_is_plain_data(plan: Plan):
    assert json.loads(plan.to_json())["kept"][0]["names"] == list(plan.kept[0].names)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.budget_bytes = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_plan_agrees_with_itself(plan: Plan):
    last = [r for r in plan.rounds if r.fits and not r.problem]
    assert plan.compiled_bytes in {r.compiled_bytes for r in last}
    assert plan.compiled_bytes <= plan.budget_bytes < plan.keep_all_compiled_bytes
    assert plan.recompute_seconds == plan.predicted_seconds - plan.keep_all_seconds
    assert plan.argument_bytes == X.nbytes + W.nbytes
    assert (plan.output_bytes, plan.aliased_bytes, plan.host_bytes) == (W.nbytes, 0, 0)


def test_decisions_say_what_is_kept(plan: Plan):
    kept = {name for k in plan.kept for name in k.names}
    assert plan.decisions
    for decision in plan.decisions:
        assert decision.action == ("recompute" if decision.recomputed else "keep")
        assert 0 <= decision.recomputed <= decision.count
        assert (decision.seconds > 0) == (decision.recomputed > 0)
        assert decision.source.startswith("test_plan.py:")
    assert sum(d.count - d.recomputed for d in plan.decisions) <= len(kept)
    assert plan.recomputed() == tuple(d for d in plan.decisions if d.recomputed)


@pytest.mark.parametrize(
    "damage", ["predicted_bytes", "decisions", "kept", "segments", "budget_bytes"]
)
def test_a_plan_with_something_missing_is_damaged(plan: Plan, damage: str):
    data = json.loads(plan.to_json())
    del data[damage]
    with pytest.raises(jaxmem.PlanMismatchError, match="plan file is damaged"):
        Plan.from_json(json.dumps(data))
