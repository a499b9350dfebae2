"""The laws of the algebra, on random policies and values; repr and JSON; bad input."""

from __future__ import annotations

import json
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem import PolicyError, policies
from jaxmem.policies import Action, Facts, Policy
from tests.policies.drawn import any_policy, facts, overridden, rule_lists, single_rules

LEAST, MOST = policies.nothing, policies.everything


def agree(left: Policy, right: Policy, value: Facts) -> None:
    assert left.decide(value) == right.decide(value)


@given(any_policy, any_policy, facts)
def test_or_is_the_larger_and_the_smaller_not_the_other_end(a, b, value):
    assert (a | b).decide(value) == max(a.decide(value), b.decide(value))
    assert (a & b).decide(value) == min(a.decide(value), b.decide(value))
    assert (~a).decide(value) == ~a.decide(value)


@pytest.mark.wide
@given(any_policy, any_policy, any_policy, facts)
def test_lattice_laws(a, b, c, value):
    agree(a | (b & c), (a | b) & (a | c), value)
    agree(a & (b | c), (a & b) | (a & c), value)
    agree(a | (a & b), a, value)
    agree(a & (a | b), a, value)


@given(any_policy, any_policy, any_policy)
def test_laws_that_hold_between_the_objects(a, b, c):
    for left, right in (
        ((a | b) | c, a | (b | c)),
        ((a & b) & c, a & (b & c)),
        (a | b, b | a),
        (a & b, b & a),
        (a | a, a),
        (a & a, a),
        (a | LEAST, a),
        (a & MOST, a),
        (a | MOST, MOST),
        (a & LEAST, LEAST),
        (~(~a), a),
        (~(a | b), ~a & ~b),
        (~(a & b), ~a | ~b),
    ):
        assert left == right
        assert hash(left) == hash(right)


@given(any_policy, any_policy, facts)
def test_kleene_law(a, b, value):
    """Less than the law of the excluded middle: offload is its own opposite."""
    assert (a & ~a).decide(value) <= (b | ~b).decide(value)


def test_the_excluded_middle_does_not_hold():
    offloaded = policies.offload("x")
    assert (offloaded | ~offloaded).decide(Facts(names=("x",))) == Action.OFFLOAD


@given(any_policy, rule_lists, facts)
def test_the_last_rule_that_selects_decides(base, rules, value):
    expected = base.decide(value)
    for rule in rules:
        if rule.selector.matches(value):
            expected = rule.action
    assert overridden(base, rules).decide(value) == expected


@given(any_policy, rule_lists, rule_lists)
def test_overrides_are_one_list(base, first, second):
    one_by_one = overridden(overridden(base, first), second)
    assert one_by_one == overridden(base, [*first, *second])
    assert overridden(one_by_one, second) == one_by_one


@given(any_policy, single_rules(), single_rules())
def test_one_call_is_the_same_as_several(base, a, b):
    if a.selector != b.selector:
        assert base.override(a, b) == base.override(a).override(b)
    assert base.override(a, a) == base.override(a) == base.override(a).override(a)


@given(any_policy, rule_lists, facts)
def test_not_goes_through_overrides(base, rules, value):
    assert ~overridden(base, rules) == overridden(~base, [~rule for rule in rules])
    agree(~overridden(base, rules), overridden(~base, [~rule for rule in rules]), value)


@given(any_policy)
def test_repr_is_the_code_and_json_the_data(policy):
    assert eval(repr(policy), vars(policies)) == policy
    again = Policy.from_json(policy.to_json())
    assert again == policy
    assert hash(again) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy


@given(any_policy, any_policy)
def test_different_policies_are_written_differently(a, b):
    assert (a == b) == (repr(a) == repr(b)) == (a.to_json() == b.to_json())


@given(single_rules(), facts)
def test_recompute_is_not_save(rule, value):
    names, given_fields = rule.selector.names, rule.selector.given()
    given_fields.pop("names", None)
    save = policies.save(*names, **given_fields)
    assert policies.recompute(*names, **given_fields) == ~save
    matched = rule.selector.matches(value)
    assert save.decide(value) == (Action.SAVE if matched else Action.RECOMPUTE)


@pytest.mark.parametrize(
    ("policy", "value", "matches"),
    [
        (policies.save("attn*"), Facts(names=("attn_out",)), True),
        (policies.save("attn*"), Facts(names=("Attn",)), False),
        (policies.save("a", "b"), Facts(names=("c", "b")), True),
        (policies.save(module="Block_*/mlp"), Facts(module="Net/Block_0/mlp/Dense_0"), True),
        (policies.save(module="Block_*/mlp"), Facts(module="Net/Block_0/attn/mlp"), False),
        (policies.save(module="Net"), Facts(), False),
        (policies.save(dtype=jnp.bfloat16), Facts(dtype="bfloat16"), True),
        (policies.save(dtype=["float32", "float64"]), Facts(dtype="bfloat16"), False),
        (policies.save(min_bytes="1KiB"), Facts(nbytes=1024), True),
        (policies.save(min_bytes="1KiB"), Facts(nbytes=1023), False),
        (policies.save(max_bytes="1KiB"), Facts(nbytes=1024), True),
        (policies.save(min_flops_per_byte=2), Facts(flops=8, moved_bytes=4), True),
        (policies.save(min_flops_per_byte=2), Facts(flops=7, moved_bytes=4), False),
        (policies.save(max_flops_per_byte=2), Facts(), True),
        (policies.save("a", dtype="int32"), Facts(names=("a",), dtype="int8"), False),
        (policies.save(batch_dims=0), Facts(primitive="tanh"), False),
    ],
)
def test_what_a_selector_matches(policy, value, matches):
    assert policy.decide(value) == (Action.SAVE if matches else Action.RECOMPUTE)


def test_the_written_form():
    mixed = (policies.save("b") | policies.offload("a")) & ~policies.offload(dtype=jnp.float32)
    assert repr(mixed) == "(offload('a') | save('b')) & ~offload(dtype='float32')"
    exceptions = (policies.dots | policies.save("a")).override(policies.recompute("b"))
    assert repr(exceptions) == "(dots | save('a')).override(recompute('b'))"
    assert repr(~policies.dots.override(policies.save("a"))) == "(~dots).override(recompute('a'))"
    assert repr(policies.planned.override(policies.save("a"))) == "planned.override(save('a'))"


def test_planned_leaves_the_rest_to_the_planner():
    policy = policies.planned.override(policies.save("a"), policies.offload("b"))
    decided = [policy.decide(Facts(names=(name,))) for name in ("a", "b", "c")]
    assert decided == [Action.SAVE, Action.OFFLOAD, None]
    assert policy.uses_planner
    assert Policy.from_json(policy.to_json()) == policy
    assert eval(repr(policy), vars(policies)) == policy


@pytest.mark.parametrize(
    "make",
    [
        lambda: policies.planned | policies.dots,
        lambda: policies.dots & policies.planned,
        lambda: ~policies.planned,
        lambda: ~policies.planned.override(policies.save("a")),
        lambda: policies.planned.override(policies.save("a")) | policies.dots,
    ],
)
def test_planned_cannot_be_combined(make):
    with pytest.raises(PolicyError, match=r"only says that the planner decides"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (policies.save, r"save\(\) says nothing about which values"),
        (lambda: policies.save(""), r"save\(''\): a checkpoint name is text that is not empty"),
        (lambda: policies.save(3), r"save\(3\): a checkpoint name is text"),
        (lambda: policies.save(module=3), r"save\(3\): module is text"),
        (lambda: policies.save(names="x"), r"save\(\) has no field 'names'"),
        (
            lambda: policies.offload("x", min_byte=3),
            r"offload\(\) has no field 'min_byte': did you mean 'min_bytes'",
        ),
        (
            lambda: policies.save(min_bytes="2MiB", max_bytes="1MiB"),
            r"min_bytes=2097152, max_bytes=1048576\) contradicts itself",
        ),
        (
            lambda: policies.save(min_flops_per_byte=2, max_flops_per_byte=1),
            r"min_flops_per_byte=2.0, max_flops_per_byte=1.0\) contradicts itself",
        ),
        (lambda: policies.save(min_bytes="1MBB"), r"min_bytes: '1MBB' is not a size"),
        (lambda: policies.save(max_bytes=0), r"max_bytes: 0 is a zero size"),
        (lambda: policies.save(min_flops_per_byte="x"), r"min_flops_per_byte='x' is not a number"),
        (lambda: policies.save(min_flops_per_byte=-1), r"is not a number of FLOPs per byte, 0 or"),
        (lambda: policies.save(batch_dims=-1), r"batch_dims=-1 is not a number of dimensions"),
        (lambda: policies.save(dtype="bf16"), r"dtype='bf16' is not a dtype: .* 'bfloat16'\?"),
        (lambda: policies.save(dtype="bfloat61"), r"is not a dtype: did you mean 'bfloat16'"),
        (
            lambda: policies.save(primitive="dot_genral"),
            r"primitive='dot_genral' is not a primitive of jax .*'dot_general'",
        ),
        (lambda: policies.dots.override(), r"override\(\) has no rules"),
        (
            lambda: policies.dots.override(policies.dots | policies.save("a")),
            r"only a single save\(...\), recompute\(...\) or offload\(...\) can override",
        ),
        (lambda: policies.dots.override(policies.nothing), r"override\(nothing\): only a single"),
        (
            lambda: policies.dots.override(policies.save("a"), policies.recompute("a")),
            r"override\(save\('a'\), recompute\('a'\)\) contradicts itself",
        ),
        (
            lambda: policies.save("a") | jax.checkpoint_policies.dots_saveable,
            r"is not a policy of jaxmem, so \| cannot combine it",
        ),
        (
            lambda: jax.checkpoint_policies.dots_saveable & policies.save("a"),
            r"is not a policy of jaxmem, so & cannot combine it",
        ),
    ],
)
def test_bad_rules(make, message):
    with pytest.raises(PolicyError, match=message):
        make()


def test_a_primitive_of_a_library_that_is_not_imported_yet_is_no_mistake():
    assert policies.save(primitive="zzz_my_kernel").decide(Facts(primitive="zzz_my_kernel"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", r"not a jaxmem policy"),
        ("[]", r"policy has schema version None, this jaxmem reads 1"),
        ('{"schema_version": 2}', r"policy has schema version 2"),
        ({}, r"policy is damaged"),
        (None, r"policy is damaged: None"),
        ({"any": []}, r"policy is damaged"),
        ({"any": [{"save": {"names": ["a"]}}]}, r"policy is damaged"),
        ({"everything": "offload"}, r"policy is damaged"),
        ({"save": ["a"], "otherwise": "recompute"}, r"does not select values"),
        ({"save": {"names": ["a"]}, "otherwise": "offload"}, r"save otherwise 'offload'"),
        ({"save": {"name": ["a"]}, "otherwise": "recompute"}, r"has no field 'name'"),
        ({"save": {"names": ["a"]}, "otherwise": "save", "x": 1}, r"policy is damaged"),
    ],
)
def test_bad_json(data, message):
    text = data if isinstance(data, str) else json.dumps({"schema_version": 1, "policy": data})
    with pytest.raises(PolicyError, match=message):
        Policy.from_json(text)


@given(st.sampled_from(Action), st.sampled_from(Action))
def test_the_chain(a, b):
    assert ~~a == a
    assert (a <= b) == (~b <= ~a)
    assert ~Action.OFFLOAD == Action.OFFLOAD


def test_only_its_own_classes_make_a_policy():
    with pytest.raises(TypeError, match="abstract"):
        policies.Policy()
    assert policies.planned.bound(lambda selector: False) == policies.everything.action
