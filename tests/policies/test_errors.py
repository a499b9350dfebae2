"""What a policy cannot do where it is used raises, and says what there was and what can."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxmem import PolicyError, policies, remat
from tests.policies.nets import ASKS_ALL, LOSS_ARGS, OFFLOADS, block, block_args, loss, remat3

BOTH = pytest.mark.parametrize("enabled", [False, True], ids=["remat2", "remat3"])


def both_raise(policy, fun, args, message):
    with pytest.raises(PolicyError, match=message):
        remat(fun, policy)(*args)
    with pytest.raises(PolicyError, match=message):
        policies.check(policy, fun, *args)


@BOTH
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            policies.save("acts"),
            r"save\('acts'\) matches nothing in block: no checkpoint name is 'acts'. "
            r"Did you mean 'act'.*\? There are 'act', 'logits', 'scores'\.",
        ),
        (policies.save("act", "scorse"), r"no checkpoint name is 'scorse'. Did you mean 'scores'"),
        (policies.offload("Act*"), r"no checkpoint name is 'Act\*'"),
        (policies.dots | policies.recompute("lgits"), r"recompute\('lgits'\) matches nothing"),
        (policies.dots.override(policies.save("lgits")), r"Did you mean 'logits'"),
        (
            policies.save("act", dtype="bfloat16"),
            r"no value matches all of them. Nearest: 'act' float32\[4,8\] in layers/mlp",
        ),
        (
            policies.save(primitive="zzz_my_kernel"),
            r"no primitive is 'zzz_my_kernel'.* There are .*'dot_general'",
        ),
    ],
    ids=str,
)
def test_a_rule_that_matches_nothing(policy, message, enabled):
    with remat3(enabled):
        both_raise(policy, block, block_args(), message)


def test_modules_that_match_nothing():
    args = block_args()
    with pytest.raises(PolicyError, match=r"no module is 'atn'. Did you mean .*'layers/attn'"):
        remat(block, policies.save(module="atn"))(*args)
    with pytest.raises(PolicyError, match=r"no value matches all of them. Nearest: 'act'"):
        remat(block, policies.save("act", module="head"))(*args)
    with pytest.raises(PolicyError, match=r"has no module at all: Linen writes them"):
        remat(loss, policies.save(module="mlp"))(*LOSS_ARGS)
    with pytest.raises(PolicyError, match=r"no checkpoint name at all: jax.ad_checkpoint"):
        remat(jnp.sin, policies.save("x"))(1.0)


def test_sizes_may_match_nothing():
    jax.eval_shape(remat(block, policies.save("act", min_bytes="1GiB")), *block_args())
    jax.eval_shape(remat(block, policies.save(primitive="conv_general_dilated")), *block_args())


def inputs_and_output(x, w):
    x = checkpoint_name(x, "input")
    return checkpoint_name(jnp.sin(jnp.tanh(x @ w)), "output")


@BOTH
def test_an_offload_without_effect(enabled):
    args = (jnp.ones((2, 4)), jnp.ones((4, 4)))
    no_effect = r"the offload of 'output' float32\[2,4\] has no effect in inputs_and_output: no der"
    with remat3(enabled):
        with pytest.raises(PolicyError, match=no_effect):
            remat(inputs_and_output, policies.offload("output"))(*args)
        remat(inputs_and_output, policies.offload("input"))(*args)
        if OFFLOADS or not enabled:
            with pytest.raises(PolicyError, match=no_effect):
                policies.check(policies.offload("output"), inputs_and_output, *args)
            policies.check(policies.offload("input"), inputs_and_output, *args)
        with pytest.raises(PolicyError, match=r"offloads nothing in inputs_and_output: .* tanh"):
            remat(inputs_and_output, policies.offload(primitive="exp"))(*args)
        with pytest.raises(PolicyError, match=r"offload\('input'\) offloads nothing"):
            remat(inputs_and_output, policies.offload("input") | policies.save("*"))(*args)


@pytest.mark.skipif(OFFLOADS, reason="newer jax can offload with jax_remat3")
def test_jax_remat3_that_cannot_offload():
    args = (jnp.ones((2, 4)), jnp.ones((4, 4)))
    offload = policies.offload("input")
    with remat3(True):
        with pytest.raises(PolicyError, match=r"jax_remat3 of jax .* cannot offload"):
            policies.check(offload, inputs_and_output, *args)
        with pytest.raises(PolicyError, match=r"jax_remat3 of jax .* cannot offload"):
            jax.vjp(jax.checkpoint(inputs_and_output, policy=offload), *args)


@pytest.mark.skipif(ASKS_ALL, reason="newer jax tells types with jax_remat3")
def test_jax_remat3_that_tells_no_type_of_a_name():
    args = (jnp.ones((2, 4)), jnp.ones((4, 4)))
    policy = policies.save("input", dtype="float32")
    with remat3(True), pytest.raises(PolicyError, match=r"name of a value and nothing else"):
        jax.vjp(jax.checkpoint(inputs_and_output, policy=policy), *args)


@BOTH
def test_what_jax_checkpoint_cannot_do(enabled):
    args = block_args()
    with remat3(enabled):
        by_module = policies.save(module="mlp")
        for use in (
            lambda: jax.vjp(jax.checkpoint(block, policy=by_module), *args),
            lambda: policies.check(by_module, block, *args),
        ):
            with pytest.raises(PolicyError, match=r"module path, which jax.checkpoint does not"):
                use()
        with pytest.raises(PolicyError, match=r"wants 'act' .* recomputed, and .* it is saved"):
            policies.check(policies.recompute("act"), block, *args)
        together = policies.save("logits", primitive="dot_general")
        with pytest.raises(PolicyError, match=r"wants 'logits' .* saved, and .* it is recomputed"):
            policies.check(together, block, *args)


def test_what_jax_remat3_does_not_ask_about():
    args = block_args()
    with remat3(True):
        for policy in (policies.everything, policies.save(primitive="tanh"), ~policies.dots):
            with pytest.raises(PolicyError, match=r"jax_remat3 asks a policy about checkpoint na"):
                jax.vjp(jax.checkpoint(block, policy=policy), *args)
        with pytest.raises(PolicyError, match=r"keeps tanh .* jax_remat3 recomputes it without"):
            policies.check(policies.save(primitive="tanh"), block, *args)
        policies.check(policies.dots | policies.save("act"), block, *args)


def test_convolutions_with_jax_remat3():
    def conv(x, w):
        return jnp.sin(jax.lax.conv(x, w, (1, 1), "SAME")).sum()

    args = (jnp.ones((1, 2, 8, 8)), jnp.ones((3, 2, 3, 3)))
    with remat3(True):
        if ASKS_ALL:
            policies.check(policies.dots, conv, *args)
        else:
            with pytest.raises(PolicyError, match=r"keeps conv_general_dilated .* without asking"):
                policies.check(policies.dots, conv, *args)


@pytest.mark.parametrize(
    "policy", [policies.planned, policies.planned.override(policies.save("y"))]
)
def test_planned_is_for_fit_only(policy):
    def f(x):
        return checkpoint_name(jnp.sin(x), "y") * x

    for use in (
        lambda: remat(f, policy),
        lambda: policies.check(policy, f, 1.0),
        lambda: jax.grad(jax.checkpoint(f, policy=policy))(1.0),
    ):
        with pytest.raises(PolicyError, match=r"leaves values to the planner, which only jaxmem.f"):
            use()


@pytest.mark.parametrize(
    ("fun", "policy", "message"),
    [
        (nn.Dense, policies.dots, r"not the class Dense.* nn.remat\(Dense, policy=policy\)"),
        (3, policies.dots, r"takes a function, not 3"),
        (jnp.sin, jax.checkpoint_policies.dots_saveable, r"takes a policy of jaxmem.policies"),
        (jnp.sin, None, r"takes a policy of jaxmem.policies, not None"),
    ],
)
def test_what_remat_does_not_take(fun, policy, message):
    with pytest.raises(PolicyError, match=message):
        remat(fun, policy)


def test_check_passes_what_works():
    for policy in (policies.dots, policies.save("a*"), policies.nothing, policies.everything):
        policies.check(policy, block, *block_args())
    policies.check(policies.save("act"), block, *jax.eval_shape(block_args))
