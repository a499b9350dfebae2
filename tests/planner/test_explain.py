"""Explanations say what the plan says, about what was asked."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import jaxmem
from jaxmem.errors import PlanQueryError
from tests.fitted_steps import DEEP_ARGS, tanh_chain
from tests.show.samples import GIB, decision, explained_plan, plan


@pytest.mark.parametrize(
    ("query", "keys", "matched"),
    [
        ("h3.mlp", ["g001"], [(3,)]),
        ("h3/mlp", ["g001"], [(3,)]),
        ("h3", ["g002", "g001"], [(3,), (3,)]),
        ("h[12].*", ["g002", "g001"], [(1, 2), (1, 2)]),
        ("scores", ["g003"], [(0,)]),
        ("sco*", ["g003"], [(0,)]),
        ("train.py:30", ["g002"], [(0, 1, 2, 3)]),
        ("train.py", ["g002", "g003", "g001", "g004"], None),
        ("exp", ["g004"], [(0,)]),
        ("block.mlp", ["g004"], [(0,)]),
        ("", ["g002", "g003", "g001", "g004"], None),
    ],
)
def test_what_a_query_matches(query: str, keys: list[str], matched):
    reasons = explained_plan().explain(query).reasons
    assert [r.decision.key for r in reasons] == keys
    assert matched is None or [r.matched for r in reasons] == matched


def test_the_numbers_are_those_of_the_plan():
    some = explained_plan()
    for reason in some.explain().reasons:
        d = reason.decision
        assert d in some.decisions
        assert reason.nbytes == d.nbytes
        assert reason.recomputed == d.recomputed
        assert reason.seconds_per_gib == pytest.approx(d.again_seconds / d.nbytes * GIB)
        assert (reason.kept_from_bytes is None) == (d.recomputed == 0)
    one = some.explain("h2.attn").reasons[0]
    assert (one.nbytes, one.recomputed) == (2 * GIB, 1)
    assert some.explain("h3.attn").reasons[0].recomputed == 0


def test_what_is_dearer_comes_back_first():
    """attn is 2 ms per GiB and 6 GiB of it are recomputed, scores 0.5 ms and 4 GiB."""
    budgets = {r.decision.key: r.kept_from_bytes for r in explained_plan().explain().reasons}
    assert budgets == {"g002": 26 * GIB, "g003": 30 * GIB, "g001": None, "g004": None}


def why(changed: jaxmem.Plan, key: str) -> str:
    (reason,) = [r for r in changed.explain().reasons if r.decision.key == key]
    return reason.why


def test_reasons():
    some = explained_plan()
    assert why(some, "g001") == (
        "kept: making it again costs 4.00ms per GiB, more than dot_general at train.py:30 "
        "(2.00ms per GiB), the dearest that is recomputed"
    )
    assert why(some, "g002").startswith("recomputed in 3 of 4: the budget has room for 1")
    assert why(some, "g003") == (
        "recomputed: making it again costs 500us per GiB, no more than anything that is kept "
        "(dot_general at train.py:41, 4.00ms per GiB)"
    )
    assert why(some, "g004").startswith("in host memory from the forward to the backward pass")


def test_reasons_for_what_is_cheap_and_kept():
    first, *rest = explained_plan().decisions
    cheap = dataclasses.replace(first, again_seconds=1e-6)
    fed = explained_plan(decisions=(cheap, *rest))
    assert why(fed, "g001").startswith("kept: 2 operations that run again read it")
    alone = explained_plan(decisions=(dataclasses.replace(cheap, feeds=0), *rest))
    assert why(alone, "g001").startswith("kept, although making it again costs 500ns per GiB, no ")
    assert "no room for its bytes" in why(alone, "g003")


def test_scalars_do_not_set_the_price():
    scalar = decision(9, action="recompute", count=1, recomputed=1, nbytes=4, again_seconds=1.0)
    some = explained_plan(decisions=(*explained_plan().decisions, scalar))
    assert "(2.00ms per GiB), the dearest" in why(some, "g001")


def test_the_plan_as_a_whole():
    sentences = explained_plan().explain().sentences
    assert sentences[0] == "it uses 19.0GiB of the budget of 20.0GiB (95%)"
    assert sentences[1].startswith("greedy: the quickest of what was proposed")
    assert sentences[2] == "1.0GiB more would save 3.00ms a step"
    assert sentences[3].startswith("from a budget of 30.00GiB on nothing would be recomputed")
    assert sentences[4] == "in host memory between steps: state.mu"
    assert explained_plan().marginal_seconds_per_byte * GIB == pytest.approx(3e-3)
    as_written = plan(solver="keep-all", decisions=(), notes=())
    assert as_written.marginal_seconds_per_byte == 0
    assert as_written.explain().sentences[1:] == (
        "keep-all: the step fits as written, so nothing is recomputed",
    )


def test_a_plan_that_follows_a_policy_says_so():
    assert explained_plan(policy="{}").explain().sentences[1].startswith("it follows a policy")


def test_what_a_policy_decides_has_no_price(planned_deep):
    policies, deep = jaxmem.policies, planned_deep.__wrapped__
    policy = policies.planned.override(policies.save(primitive="reduce_sum"))
    found = jaxmem.plan(deep, *DEEP_ARGS, policy=policy, budget="4.5MiB", progress=False)
    assert found.policy
    assert found.recomputed()
    assert found.larger is None


def test_an_argument_in_host_memory():
    found = explained_plan().explain("state.mu")
    assert found.sentences == ("argument state.mu lives in host memory between steps",)
    assert found.reasons == ()


@pytest.mark.parametrize(
    ("query", "nearest"),
    [
        ("h3.mpl", "'h3/mlp'"),
        ("score", "'scores'"),
        ("train.py:31", "'train.py:30'"),
        ("dot_genral", "'dot_general'"),
        ("zzz", "There is, for instance, 'h0/mlp'"),
    ],
)
def test_a_query_that_matches_nothing_names_the_nearest(query: str, nearest: str):
    with pytest.raises(PlanQueryError, match=r"nothing that lives .* matches") as caught:
        explained_plan().explain(query)
    assert repr(query) in str(caught.value)
    assert nearest in str(caught.value)
    assert isinstance(caught.value, jaxmem.JaxmemError)


def test_a_real_plan(planned_deep):
    """The costs of all decisions are what the plan predicts more than the step as written."""
    found = planned_deep.plan(*DEEP_ARGS)
    explained = found.explain("fitted_steps.py")
    assert explained.reasons
    again = sum(d.seconds for d in found.decisions)
    assert again == pytest.approx(found.recompute_seconds, rel=1e-6)
    assert found.larger is not None
    assert 0 < found.larger.more_bytes <= found.keep_all_compiled_bytes - found.budget_bytes
    assert 0 < found.larger.saved_seconds <= found.recompute_seconds
    assert sum(h.nbytes for h in found.holders) <= 1.1 * found.predicted_bytes
    lines, first = inspect.getsourcelines(tanh_chain)
    line = first + next(i for i, text in enumerate(lines) if "jnp.tanh" in text)
    assert found.holders[0].name == f"tanh at fitted_steps.py:{line}"


def test_what_a_larger_budget_buys_is_what_a_plan_for_it_finds(planned_deep):
    found = planned_deep.plan(*DEEP_ARGS)
    budget = found.budget_bytes + found.larger.more_bytes
    wider = jaxmem.plan(planned_deep.__wrapped__, *DEEP_ARGS, budget=budget, progress=False)
    saved = found.predicted_seconds - wider.predicted_seconds
    assert saved == pytest.approx(found.larger.saved_seconds, rel=0.02)


def test_no_budget_is_named_where_keeping_everything_is_slower():
    """Loops copy what they keep: a plan may be quicker than the step as written, which fits."""
    some = explained_plan()
    quicker = dataclasses.replace(
        some,
        budget_bytes=2 * some.keep_all_compiled_bytes,
        keep_all_seconds=2 * some.predicted_seconds,
    )
    explained = quicker.explain()
    assert all(reason.kept_from_bytes is None for reason in explained.reasons)
    assert "loops copy what they keep" in why(quicker, "g002")
    assert not any("nothing would be recomputed" in line for line in explained.sentences)
    assert any("nothing would be recomputed" in line for line in some.explain().sentences)
