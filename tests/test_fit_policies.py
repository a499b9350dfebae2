"""``fit(policy=...)``: the plan does what the policy says within the budget, or says why not."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import policies
from jaxmem.policies import Policy
from jaxmem.runtime import verify
from tests.problems import assert_same

LAYERS, ROWS, WIDTH = 4, 512, 64
MANY = "64MiB"


def inputs(scale: float = 1.0) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH)) * scale


def weights() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys]


def layer(x, w):
    """A layer whose three values are named; the last one is element-wise."""
    x = checkpoint_name(x, "in")
    with jax.named_scope("mlp"):
        y = checkpoint_name(x @ w, "pre")
        return checkpoint_name(jax.nn.gelu(y) * y, "act")


def unrolled(ws, x):
    for n, w in enumerate(ws):
        with jax.named_scope(f"block_{n}"):
            x = layer(x, w)
    return (x**2).mean()


def scanned(ws, x):
    def body(x, w):
        return layer(x, w), None

    with jax.named_scope("blocks"):
        x, _ = jax.lax.scan(body, x, ws)
    return (x**2).mean()


def descent(loss):
    def step(ws, x):
        value, gradients = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value

    return step


STEPS = {
    "unrolled": (descent(unrolled), (weights(), inputs())),
    "scanned": (descent(scanned), (jnp.stack(weights()), inputs())),
}


@functools.cache
def plan(name: str, policy: Policy | None, budget: int | str = MANY, **options) -> jaxmem.Plan:
    return fresh_plan(name, policy, budget, **options)


def fresh_plan(name: str, policy: Policy | None, budget: int | str = MANY, **options):
    step, args = STEPS[name]
    return jaxmem.plan(step, *args, budget=budget, policy=policy, progress=False, **options)


def large(found: jaxmem.Plan) -> dict[str, set[str]]:
    """What happens to the large values, by checkpoint name or primitive."""
    actions: dict[str, set[str]] = {}
    for d in found.decisions:
        if d.shape == (ROWS, WIDTH):
            actions.setdefault(d.checkpoint_name or d.primitive, set()).add(d.action)
    return actions


def kept(found: jaxmem.Plan) -> set[str]:
    return {what for what, actions in large(found).items() if "keep" in actions}


# --- policies that decide about everything ------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (policies.nothing, set()),
        (policies.dots, {"pre"}),
        (policies.save("act"), {"act"}),
        (policies.save(module="mlp", min_bytes="128KiB", primitive="dot_general"), {"pre"}),
        (policies.save(primitive="tanh"), {"tanh"}),
        (policies.save("act") | policies.dots, {"act", "pre"}),
    ],
    ids=repr,
)
def test_the_plan_keeps_what_the_policy_saves_and_nothing_else(name, policy, expected):
    found = plan(name, policy)
    # What a loop carries is there whatever is decided; it is not made inside.
    assert kept(found) - {"in"} == expected
    assert all(len(actions) == 1 for actions in large(found).values())
    assert found.solver == f"policy: {policy!r}"
    assert Policy.from_json(found.policy) == policy
    assert found.compiled_bytes <= found.budget_bytes
    assert "keep-all" in [r.name for r in found.rounds if r.problem]


@pytest.mark.parametrize("name", STEPS)
def test_everything_is_the_step_as_written(name):
    found = plan(name, policies.everything)
    assert (found.kept, found.recomputed()) == ((), ())
    assert found.solver == "policy: everything"
    assert found.compiled_bytes == plan(name, None).compiled_bytes


def test_less_saved_in_a_loop_is_less_memory():
    nothing, dots, everything = (
        plan("scanned", p).compiled_bytes
        for p in (policies.nothing, policies.dots, policies.everything)
    )
    each = LAYERS * ROWS * WIDTH * 4
    assert nothing <= dots - 0.9 * each
    assert dots <= everything - 0.9 * each


def test_less_saved_of_one_long_pass_is_no_more_memory_than_the_step_as_written():
    """It is made again as a whole: recomputing all of it needs more than keeping its products."""
    nothing, dots, everything = (
        plan("unrolled", p).compiled_bytes
        for p in (policies.nothing, policies.dots, policies.everything)
    )
    assert nothing <= everything
    assert dots <= everything - 0.9 * LAYERS * ROWS * WIDTH * 4


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    "policy", [policies.nothing, policies.save("act"), policies.everything], ids=repr
)
def test_the_step_computes_the_same(name, policy):
    step, (ws, _) = STEPS[name]
    x = inputs(0.7)
    fitted = jaxmem.fit(step, budget=MANY, policy=policy, verify="full", progress=False)
    assert_same(jax.jit(step)(ws, x), fitted(ws, x))


def masked(x, w):
    """Only the mask is read late: a byte where what it is made of has four."""
    y = x @ w
    return jnp.where(checkpoint_name(y > 0, "mask"), y, 0.1 * y)


def masks(scan: bool):
    def step(ws, x):
        def loss(x):
            if scan:
                return (jax.lax.scan(lambda x, w: (masked(x, w), None), x, ws)[0] ** 2).sum()
            for w in ws:
                x = masked(x, w)
            return (x**2).sum()

        return jax.grad(loss)(x)

    ws = [w for _ in range(2) for w in weights()]
    return step, (jnp.stack(ws) if scan else ws, jnp.tile(inputs(), (4, 1)))


@pytest.mark.parametrize("scan", [False, True])
def test_an_element_wise_value_with_a_name_is_really_kept(scan):
    step, args = masks(scan)
    nbytes = {
        policy: jaxmem.plan(step, *args, budget=MANY, policy=policy, progress=False).compiled_bytes
        for policy in (policies.save("mask"), policies.dots, policies.nothing)
    }
    whole = args[1].nbytes
    # Eight masks instead of eight products, or of what makes them again.
    assert nbytes[policies.save("mask")] < nbytes[policies.dots] - 4 * whole
    assert nbytes[policies.save("mask")] < nbytes[policies.nothing] - 4 * whole


def test_a_view_belongs_to_what_it_views():
    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(checkpoint_name((y @ w).reshape(-1), "flat").reshape(x.shape))
            return (y**2).mean()

        return jax.grad(loss)(ws)

    args = weights(), inputs()
    saved = jaxmem.plan(step, *args, policy=policies.save("flat"), progress=False)
    assert kept(saved) == {"dot_general"}
    dropped = policies.everything.override(policies.recompute("flat"))
    left = jaxmem.plan(step, *args, policy=dropped, progress=False)
    assert "dot_general" not in kept(left)


def test_a_rule_that_changes_nothing_is_reported():
    def step(w, x):
        def loss(w):
            return checkpoint_name(jnp.sin(x @ w) @ w, "sum").sum()

        return jax.grad(loss)(w)

    found = jaxmem.plan(step, weights()[0], inputs(), policy=policies.save("sum"), progress=False)
    assert any("save('sum') changes nothing" in note for note in found.notes)
    used = plan("unrolled", policies.save("pre"))
    assert not any("changes nothing" in note for note in used.notes)


# --- rules that bind the planner ----------------------------------------------------------------


def test_a_rule_holds_at_every_budget():
    policy = policies.planned.override(policies.save("pre"))
    whole = plan("scanned", policies.everything).compiled_bytes
    with pytest.raises(jaxmem.BudgetInfeasibleError, match="without its rules") as info:
        plan("scanned", policy, budget=whole // 4)
    least = info.value.smallest_bytes
    assert least < whole
    for budget in ((whole + least) // 2, least):
        found = plan("scanned", policy, budget=budget)
        assert large(found)["pre"] == {"keep"}
        assert found.compiled_bytes <= budget
        assert found.solver.endswith(f", policy: {policy!r}")
        assert found.recomputed()


def test_a_rule_holds_where_the_planner_solves_a_chain():
    policy = policies.planned.override(policies.save("act"))
    found = plan("unrolled", policy, budget="1.3MiB")
    assert large(found)["act"] == {"keep"}
    assert found.recomputed()


@pytest.mark.parametrize("name", STEPS)
def test_a_value_that_a_rule_recomputes_is_never_kept(name):
    policy = policies.planned.override(policies.recompute("pre"))
    found = plan(name, policy)
    assert large(found)["pre"] == {"recompute"}
    assert found.rounds[0].problem == "the policy recomputes or offloads"
    free = plan(name, policies.planned)
    assert large(free)["pre"] == {"keep"}
    assert dataclasses.replace(free, policy="") == plan(name, None)


def test_microbatches_are_chosen_for_a_policy():
    def step(ws, x):
        grad = jaxmem.accumulate(jax.value_and_grad(scanned), jaxmem.AUTO)
        return grad(ws, x)

    args = STEPS["scanned"][1]
    options = {"policy": policies.dots, "progress": False}
    one = jaxmem.plan(step, *args, budget=MANY, **options)
    assert one.microbatches == 1
    several = jaxmem.plan(step, *args, budget=int(one.compiled_bytes * 0.7), **options)
    assert several.microbatches > 1
    assert large_by_primitive(several) == {"dot_general"}


def large_by_primitive(found: jaxmem.Plan) -> set[str]:
    return {d.primitive for d in found.decisions if d.action == "keep" and len(d.shape) == 2} - {
        "name"
    }


# --- host memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_an_offload_uses_host_memory_and_the_plan_says_so(name):
    found = plan(name, policies.dots.override(policies.offload("pre")), target="h200")
    each = ROWS * WIDTH * 4
    assert LAYERS * each * 0.95 <= found.host_bytes <= LAYERS * each * 1.05
    assert large(found)["pre"] == {"offload"}
    assert any(k.offloaded for k in found.kept)
    step, args = STEPS[name]
    again = jaxmem.Plan.from_json(found.to_json())
    followed = jaxmem.fit(step, budget=MANY, target="h200", plan=again, progress=False).plan(*args)
    assert (followed.kept, followed.policy) == (found.kept, found.policy)
    assert followed.host_bytes == found.host_bytes


def test_what_a_loop_carries_can_be_offloaded():
    found = plan("scanned", policies.offload("in"), target="h200")
    plain = plan("scanned", policies.nothing, target="h200")
    assert found.host_bytes >= LAYERS * ROWS * WIDTH * 4
    assert found.compiled_bytes < plain.compiled_bytes
    assert large(found)["in"] == {"offload"}


def test_an_offload_beside_the_planner():
    policy = policies.planned.override(policies.offload("pre"))
    found = plan("scanned", policy, target="h200")
    assert large(found)["pre"] == {"offload"}
    assert found.host_bytes > 0


# --- errors -------------------------------------------------------------------------------------


def refused(policy, match, name="unrolled", error=jaxmem.PolicyError, **options):
    with pytest.raises(error, match=match):
        plan(name, policy, **options)


def test_what_matches_nothing_is_an_error_that_lists_what_there_is():
    refused(policies.save("atc"), r"save\('atc'\) matches nothing in step: .* 'act'")
    refused(policies.nothing.override(policies.save("atc")), "Did you mean 'act'")


def test_a_cpu_offloads_nothing():
    refused(policies.offload("pre"), r"fitted for a CPU, whose device memory is host memory")
    refused(policies.planned.override(policies.offload("pre")), r'such as target="h200"')


def test_an_offload_without_effect():
    def step(w, x):
        return jax.grad(lambda w: checkpoint_name(jnp.sin(x @ w) @ w, "sum").sum())(w)

    args = weights()[0], inputs()
    options = {"target": "h200", "progress": False}
    with pytest.raises(jaxmem.PolicyError, match=r"offload of 'sum' .* has no effect in step"):
        jaxmem.plan(step, *args, policy=policies.offload("sum"), **options)
    policy = policies.offload(min_bytes="1GiB")
    with pytest.raises(jaxmem.PolicyError, match="offloads nothing in step"):
        jaxmem.plan(step, *args, policy=policy, **options)


def test_rules_that_contradict_each_other():
    with pytest.raises(jaxmem.PolicyError, match="contradicts itself"):
        policies.planned.override(policies.save("act"), policies.recompute("act"))
    with pytest.raises(jaxmem.PolicyError, match=r"planned cannot be combined with \|"):
        jaxmem.fit(STEPS["unrolled"][0], policy=policies.planned | policies.dots)


def test_what_nothing_can_make_again():
    refused(policies.recompute("in"), "'in' .* cannot be computed again: it is an", name="scanned")


def test_a_name_that_cannot_be_decided():
    def inside(w, x):
        def loss(w):
            branches = (lambda y: checkpoint_name(jnp.sin(y), "act"), jnp.cos)
            return jax.lax.cond(x.sum() > 0, *branches, x @ w).sum()

        return jax.grad(loss)(w)

    args = weights()[0], inputs()
    with pytest.raises(jaxmem.PolicyError, match=r"inside an operation that is planned whole"):
        jaxmem.plan(inside, *args, policy=policies.save("act"), progress=False)
    with pytest.raises(jaxmem.PolicyError, match="no backward pass that could be planned"):
        jaxmem.plan(
            lambda w, x: unrolled([w], x), *args, policy=policies.save("act"), progress=False
        )


def test_a_policy_that_does_not_fit_names_what_it_needs_and_what_the_planner_would():
    needs = plan("scanned", policies.dots).compiled_bytes
    with pytest.raises(
        jaxmem.BudgetInfeasibleError, match=r"with dots: what it says needs"
    ) as info:
        plan("scanned", policies.dots, budget=needs - 1)
    error = info.value
    assert error.smallest_bytes == needs
    assert error.holders
    assert "leave more to the planner, which reaches" in str(error)
    assert plan("scanned", policies.dots, budget=needs).compiled_bytes == needs


def test_a_recomputation_that_the_compiler_undid(monkeypatch):
    monkeypatch.setattr(verify, "undone", lambda block, text: block.ops[:1])
    with pytest.raises(jaxmem.VerificationError, match=r"does not follow nothing on cpu: .*merged"):
        fresh_plan("scanned", policies.nothing)


def test_what_is_not_a_policy_of_jaxmem():
    step, _ = STEPS["scanned"]
    for policy in (jax.checkpoint_policies.dots_saveable, "dots"):
        with pytest.raises(jaxmem.ArgumentError, match=r"it takes a policy of jaxmem.policies"):
            jaxmem.fit(step, policy=policy)


def test_a_plan_or_a_policy_and_the_settings_of_a_fitted_step():
    step, args = STEPS["scanned"]
    with pytest.raises(jaxmem.ArgumentError, match="a plan has decided already"):
        jaxmem.fit(step, plan=plan("scanned", None), policy=policies.dots)
    fitted = jaxmem.fit(step, policy=policies.dots, progress=False)
    with pytest.raises(jaxmem.ArgumentError, match="its own policy"):
        jaxmem.plan(fitted, *args, policy=policies.nothing)


# --- plans are data -----------------------------------------------------------------------------


def test_the_same_policy_gives_the_same_plan_and_it_can_be_followed(tmp_path):
    first, second = (make("scanned", policies.save("act"), MANY) for make in (plan, fresh_plan))
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)
    assert first.to_json() == second.to_json()
    assert first != plan("scanned", policies.nothing)
    first.save(tmp_path / "plan.json")
    loaded = jaxmem.Plan.load(tmp_path / "plan.json")
    assert loaded == first
    step, args = STEPS["scanned"]
    fitted = jaxmem.fit(step, budget=MANY, plan=loaded, progress=False)
    followed = fitted.plan(*args)
    assert (followed.kept, followed.policy) == (first.kept, first.policy)
    assert followed.compiled_bytes == first.compiled_bytes
    assert [r.name for r in followed.rounds] == ["as planned"]
    assert_same(jax.jit(step)(*args), fitted(*args))
