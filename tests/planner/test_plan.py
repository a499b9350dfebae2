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
from jaxmem.errors import Holder
from jaxmem.planner.decisions import IN_FLIGHT, Decision, Kept, Larger, Round, Segmented, Streamed
from jaxmem.planner.plan import Plan
from tests.fitted_steps import tanh_chain

X = jnp.zeros((1024, 128))
W = jnp.zeros((128, 128))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return jaxmem.plan(jax.grad(tanh_chain), W, X, budget="4.5MiB", progress=False)


COUNTS = st.integers(0, 2**63 - 1)


def instances(cls):
    """Any instance of a dataclass of plain fields that does not contradict itself."""
    if cls is Decision:
        return plain_instances(cls).map(consistent)
    if cls is Kept:
        return plain_instances(cls).map(lambda k: dataclasses.replace(k, offloaded=k.names[:1]))
    return plain_instances(cls)


def consistent(decision: Decision) -> Decision:
    count = decision.count % 4 + 1
    again = decision.recomputed % (count + 1)
    away = decision.offloaded % (count - again + 1)
    return dataclasses.replace(
        decision,
        count=count,
        recomputed=again,
        again=tuple(range(again)),
        action="recompute" if again else "offload" if away else "keep",
        offloaded=away,
        modules=(decision.module,) * count,
    )


def plain_instances(cls):
    kinds = {
        "int": COUNTS,
        "float": st.floats(min_value=0, allow_nan=False),
        "str": st.text(),
        "bool": st.booleans(),
        "Action": st.sampled_from(("keep", "recompute")),
        "int | None": st.none() | COUNTS,
        "float | None": st.none() | st.floats(min_value=0, allow_nan=False),
        "tuple[int, ...]": st.lists(st.integers(1, 9), min_size=1).map(tuple),
        "InFlight": st.tuples(st.integers(0, 4), st.integers(0, 4)),
        "tuple[str, ...]": st.lists(st.text()).map(tuple),
        "tuple[tuple[str, str], ...]": st.lists(st.tuples(st.text(), st.text())).map(tuple),
        "tuple[tuple[str, int], ...]": st.lists(st.tuples(st.text(), st.integers(1, 9))).map(tuple),
    }
    for part in (Decision, Round, Kept, Segmented, Holder):
        if cls is Plan:
            unique = (lambda p: p.path) if part in (Kept, Segmented) else None
            some = st.lists(instances(part), max_size=3, unique_by=unique).map(tuple)
            kinds[f"tuple[{part.__name__}, ...]"] = some
    if cls is Plan:
        kinds["Streamed | None"] = st.none() | st.builds(Streamed, *[COUNTS] * 6)
        kinds["Larger | None"] = st.none() | st.builds(
            Larger, st.integers(1, 2**40), st.floats(0, 9)
        )
    fields = [f for f in dataclasses.fields(cls) if f.name != "schema_version"]
    given_fields = {f.name: kinds[f.type] for f in fields}
    if cls is Plan:
        given_fields["microbatches"] = st.integers(1, 64)
        # Of what is not hosted it is not said when it is updated.
        given_fields["hosted"] = st.lists(st.text(), min_size=1).map(tuple)
        given_fields["slack_seconds"] = st.floats(0, 9)
        return st.builds(cls, **given_fields).map(untimed_in_pieces).map(in_order_as_written)
    return st.builds(cls, **given_fields)


def untimed_in_pieces(plan: Plan) -> Plan:
    """Of copies of one program nothing is said where a step runs in pieces."""
    if plan.streamed is None:
        return plan
    return dataclasses.replace(plan, slack_seconds=0.0, in_flight=IN_FLIGHT)


def in_order_as_written(plan: Plan) -> Plan:
    """Of a program that is unchanged nothing could be tied."""
    if plan.kept or plan.segments:
        return plan
    return dataclasses.replace(plan, in_order=True)


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
        plan.budget_bytes = 0


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
        assert decision.source.startswith("fitted_steps.py:")
    assert sum(d.count - d.recomputed for d in plan.decisions) <= len(kept)
    assert plan.recomputed() == tuple(d for d in plan.decisions if d.recomputed)


# --- damaged files -----------------------------------------------------------------------------


def places(data, where=()):
    """The way to everything in a plan file."""
    yield where
    lists = enumerate(data) if isinstance(data, list) else ()
    for key, value in data.items() if isinstance(data, dict) else lists:
        yield from places(value, (*where, key))


def put(data, where, value):
    """A copy of a plan file with something else in one place; `...` takes it away."""
    if not where:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    changed = put(copy[where[0]], where[1:], value)
    if changed is ...:
        del copy[where[0]]
    else:
        copy[where[0]] = changed
    return copy


@pytest.fixture(scope="module")
def full(plan: Plan) -> dict:
    """A plan file with something in every list, as JSON data."""
    decision = dataclasses.replace(
        plan.decisions[0],
        action="recompute",
        count=10,
        recomputed=6,
        again=tuple(range(6)),
        modules=("m",) * 10,
    )
    changed = dataclasses.replace(
        plan,
        hosted=("w",),
        segments=(Segmented("a", 8, (2, 2)),),
        notes=("note",),
        kept=(dataclasses.replace(plan.kept[0], offloaded=plan.kept[0].names[:1]),),
        decisions=(decision,),
        holders=plan.holders[:1],
        rounds=plan.rounds[:1],
    )
    assert Plan.from_json(changed.to_json()) == changed
    return json.loads(changed.to_json())


WRONG = (None, True, -1, 1.5, "text", [], {}, [[]], {"a": 1}, 2**70, float("nan"), -0.5, ["x"])


@given(st.data())
def test_a_wrong_type_anywhere_is_refused_by_its_name(full: dict, data):
    """Whatever is put anywhere: it is a plan that says the same, or a plan mismatch."""
    where = data.draw(st.sampled_from(list(places(full))))
    value = data.draw(st.sampled_from((*WRONG, ...)))
    damaged = put(full, where, {} if not where and value is ... else value)
    text = json.dumps(damaged)
    try:
        found = Plan.from_json(text)
    except jaxmem.PlanMismatchError as error:
        named = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in where).lstrip(".")
        message = str(error)
        assert "Plan again" in message
        whole = not where or where == ("schema_version",)
        assert whole or named.partition("[")[0].partition(".")[0] in message
        return
    assert json.loads(found.to_json()) == json.loads(text), "nothing is changed silently"


@given(st.data())
def test_a_truncated_or_overwritten_file_is_refused(full: dict, data):
    text = json.dumps(full, indent=1)
    last = text.rindex('"')  # without the brace after it the text is as good as whole
    at = data.draw(st.integers(0, last))
    cut = text[:at] + data.draw(st.sampled_from(("", "\0", "}", "[" * 100_000)))
    with pytest.raises(jaxmem.PlanMismatchError, match="Plan again"):
        Plan.from_json(cut)


def test_each_type_is_refused_in_each_field(full: dict):
    """Not left to chance: in every field at least five of the wrong values."""
    for where in places(full):
        refused = 0
        for value in WRONG:
            if where:
                try:
                    Plan.from_json(json.dumps(put(full, where, value)))
                except jaxmem.PlanMismatchError:
                    refused += 1
        assert not where or refused >= 5, where


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("budget_bytes",), -1, "budget_bytes is -1, not a whole number, 0 or more"),
        (("budget_bytes",), "20GiB", "budget_bytes is '20GiB', not a whole number"),
        (("budget_bytes",), True, "budget_bytes is True, not a whole number"),
        (("budget_bytes",), 2.0, r"budget_bytes is 2\.0, not a whole number"),
        (("predicted_seconds",), -0.1, r"predicted_seconds is -0\.1, not a number, 0 or more"),
        (("predicted_seconds",), float("nan"), "predicted_seconds is nan, not a number"),
        (("decisions",), {}, "decisions is an object, not a list"),
        (("decisions", 0), "v2", r"decisions\[0\] is 'v2', not an object"),
        (("decisions", 0, "action"), "drop", r"decisions\[0\]\.action is 'drop', not one of"),
        (("decisions", 0, "action"), "keep", r"\.action is 'keep', not what recomputing 6 values"),
        (("decisions", 0, "recomputed"), 11, r"\.recomputed is 11, not at most its count 10"),
        (("decisions", 0, "again"), [0, 99], r"\.again is \(0, 99\), not 6 different numbers"),
        (("decisions", 0, "modules"), ["m"], r"\.modules is .*, not a list of 10"),
        (("decisions", 0, "seconds"), ..., r"decisions\[0\]\.seconds is missing"),
        (("decisions", 0, "offloaded"), 9, r"decisions\[0\]\.offloaded is 9, not from 0 to"),
        (("kept", 0, "offloaded"), ["nobody"], r"kept\[0\]\.offloaded is .*, not among its names"),
        (("segments", 0, "counts"), [0], r"segments\[0\]\.counts is \(0,\), not numbers of 1"),
        (("microbatches",), 0, "microbatches is 0, not 1 or more"),
        (("larger",), {"more_bytes": 0, "saved_seconds": 1.0}, r"larger\.more_bytes is 0, not 1"),
        (("schema_version",), 5, "schema version 5, this jaxmem reads 15"),
    ],
)
def test_what_a_damaged_file_says(full: dict, where, value, message: str):
    with pytest.raises(jaxmem.PlanMismatchError, match=message):
        Plan.from_json(json.dumps(put(full, where, value)))


def test_two_of_what_there_is_once(full: dict):
    for name, message in (("kept", r"kept\[1\]\.turn"), ("segments", r"segments\[1\]\.path")):
        with pytest.raises(jaxmem.PlanMismatchError, match=message):
            Plan.from_json(json.dumps({**full, name: full[name] * 2}))
    with pytest.raises(jaxmem.PlanMismatchError, match="notes_ is not a field of a plan"):
        Plan.from_json(json.dumps({**full, "notes_": []}))
    with pytest.raises(jaxmem.PlanMismatchError, match="updates_last is True, not false where"):
        Plan.from_json(json.dumps({**full, "hosted": [], "updates_last": True}))


def test_files_that_are_no_plan_files(tmp_path):
    (tmp_path / "latin.json").write_bytes(b"{\xff\xfe}")
    (tmp_path / "empty.json").write_text("")
    for name in ("latin.json", "empty.json", ""):
        with pytest.raises(jaxmem.PlanMismatchError, match="not a jaxmem plan") as caught:
            Plan.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "Plan again" in str(caught.value)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nothing.json")
