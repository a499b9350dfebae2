"""Plans with offload and hosted arguments, followed from end to end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import policies
from jaxmem.hlo.wire import WireError
from jaxmem.planner import lines
from jaxmem.runtime import exposed
from jaxmem.runtime import step as step_module
from jaxmem.runtime.tries import MOST_COMPILES
from tests.problems import assert_same

WIDTH, ROWS = 128, 1024


def loss(params, x):
    """Of a chain of products."""
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def step(state, x):
    """Momentum on a chain of six products."""
    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params, x)
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


def test_the_compiled_program_says_what_it_waits_for(planned: jaxmem.Plan):
    plan = followed(planned).plan(*arguments())
    target = jaxmem.Target("h200")
    # All of it is far shorter than one copy.
    copied = 6 * WIDTH * WIDTH * 4 / min(target.d2h_bytes_per_second, target.h2d_bytes_per_second)
    assert plan.compiled_exposed_seconds is not None
    assert copied <= plan.compiled_exposed_seconds
    waits = "the compiled program waits"
    assert waits in " ".join(plan.explain().sentences)
    plain = jaxmem.plan(step, *arguments(), budget="20MiB", target="h200", progress=False)
    assert plain.compiled_exposed_seconds is None
    assert waits not in " ".join(plain.explain().sentences)


def test_a_compiled_program_that_cannot_be_read_is_said(planned: jaxmem.Plan, monkeypatch):
    def unreadable(executable):
        raise WireError("of another jaxlib")

    monkeypatch.setattr(exposed, "read_module", unreadable)
    plan = followed(planned).plan(*arguments())
    assert plan.compiled_exposed_seconds is None
    said = "how long the compiled program waits for copies is not known: WireError: of another"
    assert any(note.startswith(said) for note in plan.notes)


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


def test_state_that_was_not_placed_is_said_where_it_is_over_the_budget(planned, monkeypatch):
    """It stays on a GPU beside the first step: 9.4 GiB in a budget of 5.7 on four H200."""
    monkeypatch.setattr(step_module, "_is_on_gpu", lambda leaf: isinstance(leaf, jax.Array))
    state, x = arguments()
    compiled = followed(planned).plan(state, x).compiled_bytes
    moments = 6 * 4 * WIDTH**2
    tight = followed(planned, budget=compiled + moments - 1)
    with pytest.warns(UserWarning, match=r"step: 384.0KiB .* state = step.place\(state, batch\)"):
        state, _ = tight(state, x)
    tight(state, x)  # Now it is there.
    followed(planned, budget=compiled + moments)(arguments()[0], x)
    placed = followed(planned, budget=compiled + moments - 1)
    placed(placed.place(arguments()[0], x)[0], x)


def test_parameters_may_live_there_too(planned: jaxmem.Plan):
    """They are fetched for the forward pass, and again behind it."""
    leaves = tuple(f"state[{part}][{n}]" for part in range(2) for n in range(6))
    fitted = followed(dataclasses.replace(planned, hosted=leaves))
    expected = jax.jit(step)(*arguments())
    state, x = fitted.place(*arguments())
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)} == {"pinned_host"}
    found = fitted(state, x)
    assert_same(expected, found)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found[0])} == {"pinned_host"}


def test_state_on_the_device_is_taken_to_the_host(planned: jaxmem.Plan):
    fitted = followed(planned)
    expected = jax.jit(step)(*arguments())
    first = fitted(*arguments())
    assert_same(expected, first)
    fitted(first[0], arguments()[1])
    assert len(fitted._outcomes) == 1


@pytest.mark.parametrize("allowed", (0, "16KiB"))
def test_a_plan_that_needs_more_of_the_host_than_allowed_is_refused(planned, allowed):
    away = dataclasses.replace(planned, host_bytes=2**20)
    with pytest.raises(jaxmem.PlanMismatchError, match=r"keeps 1.0MiB in host memory, and host_bu"):
        followed(away, host_budget=allowed).plan(*arguments())
    assert followed(away, host_budget="1MiB").plan(*arguments()).kept == planned.kept


@pytest.mark.parametrize(
    "budget", ["8G", "0GiB", True, -1, float("nan"), [1], np.zeros(3)], ids=str
)
def test_what_is_no_amount_of_host_memory(budget):
    with pytest.raises(jaxmem.BudgetError, match=r"host_budget=.* is no amount of host memory"):
        jaxmem.fit(step, host_budget=budget)


@pytest.mark.parametrize("budget", [0, 0.0, np.int64(0), np.int64(2**30), "50%", None])
def test_amounts_of_host_memory(budget):
    jaxmem.fit(step, host_budget=budget)


def test_an_argument_that_is_not_there_is_named(planned: jaxmem.Plan):
    wrong = dataclasses.replace(planned, hosted=("state[7]",))
    with pytest.raises(jaxmem.PlanMismatchError, match=r"keeps argument state\[7\] in host memory"):
        followed(wrong).plan(*arguments())


def test_state_that_is_not_given_back_cannot_live_there(planned: jaxmem.Plan):
    for donated, path in (((), "state[1][0]"), (0, "x")):
        plan = dataclasses.replace(planned, hosted=(path,))
        fitted = jaxmem.fit(
            step, donate_argnums=donated, plan=plan, budget="8MiB", target="h200", progress=False
        )
        with pytest.raises(jaxmem.PlanMismatchError, match="donate_argnums as when the plan"):
            fitted.plan(*arguments())


def test_a_cpu_refuses_a_plan_with_host_memory(planned: jaxmem.Plan):
    here = dataclasses.replace(planned, target="cpu")
    with pytest.raises(jaxmem.JaxmemError, match="its device memory is host memory"):
        followed(here, target="cpu").plan(*arguments())


# --- what the planner puts there -----------------------------------------------------------------

LARGE = 1024


def large():
    """Shapes of a state of 48 MiB, 24 of them moments, and a batch of 8."""
    leaf = jax.ShapeDtypeStruct((LARGE, LARGE), jnp.float32)
    return ([leaf] * 6, [leaf] * 6), jax.ShapeDtypeStruct((2 * LARGE, LARGE), jnp.float32)


def plan_large(budget: int | str, **options) -> jaxmem.Plan:
    return jaxmem.plan(
        step, *large(), budget=budget, target="h200", donate_argnums=0, progress=False, **options
    )


@pytest.fixture(scope="module", autouse=True)
def few_cuts():
    """The exact solver gives up soon: nothing here is about how close to the optimum plans are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lines, "_MOST_CUTS", 4)
        yield


@pytest.fixture(scope="module")
def smallest_bytes() -> int:
    """What an error names where not even host memory is enough."""
    with pytest.raises(jaxmem.BudgetInfeasibleError) as caught:
        plan_large("20MiB")
    return caught.value.smallest_bytes


@pytest.mark.wide
@pytest.mark.parametrize(("budget", "host"), [("20MiB", None), ("85MiB", None), ("99MiB", "1MiB")])
def test_the_host_takes_no_more_compiles_than_a_plan_may(budget, host, compiles):
    """Arguments alone too large, nothing that fits, and a host without room for a leaf."""
    try:
        plan = plan_large(budget, host_budget=host)
    except jaxmem.BudgetInfeasibleError:
        assert budget != "85MiB"
    else:
        assert len(compiles) <= len(plan.rounds)
    assert len(compiles) <= MOST_COMPILES


@pytest.mark.wide
def test_moments_leave_before_parameters(smallest_bytes: int):
    with pytest.raises(jaxmem.BudgetInfeasibleError) as caught:
        plan_large("80MiB", host_budget=0)
    without = caught.value.smallest_bytes
    assert smallest_bytes < 0.85 * without
    budget = without - 2**20
    plan = plan_large(budget)
    assert plan.compiled_bytes <= budget
    hosted, moments = set(plan.hosted), {f"state[1][{n}]" for n in range(6)}
    assert hosted <= moments or moments < hosted
    assert plan.host_bytes >= 2**22


@pytest.mark.wide
def test_where_moments_are_not_enough_parameters_follow(smallest_bytes: int):
    """The named smallest budget works, with the whole state on the host."""
    plan = plan_large(smallest_bytes)
    assert plan.compiled_bytes <= smallest_bytes
    assert len(plan.hosted) == 12
    assert plan.host_bytes >= 48 * 2**20
    assert plan.rounds[-1].limit_bytes <= smallest_bytes, "limits are of the device"
    assert plan_large(int(1.1 * smallest_bytes)).compiled_bytes <= 1.1 * smallest_bytes


def test_a_decision_says_how_many_wait_on_the_host():
    """Large products on a chain: some are recomputed, some wait, and the rest stay.

    With the link of the table nearly all of it is quicker to recompute.
    """
    shapes = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)

    def products(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = y + jax.nn.gelu(y @ w)
            return jnp.square(y).mean()

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    link = dict.fromkeys(("h2d_bytes_per_second", "d2h_bytes_per_second"), 100e9)
    quick = jaxmem.Target("h200", **link, duplex_bytes_per_second=86e9)
    options = {"target": quick, "donate_argnums": 0, "progress": False}
    full = jaxmem.analyze(products, shapes, x, target=quick, donate_argnums=0).compiled_bytes
    plan = jaxmem.plan(products, shapes, x, budget=full * 11 // 20, host_budget="8GiB", **options)
    away = [d for d in plan.decisions if d.offloaded]
    assert away and any(d.recomputed for d in plan.decisions)
    moved = sum(d.offloaded * d.nbytes // d.count for d in away)
    assert 0 < moved <= plan.host_bytes
    assert all(d.offloaded + d.recomputed <= d.count for d in plan.decisions)
    assert all(d.action == "offload" for d in away if not d.recomputed)
    assert any("host memory" in r.why for r in plan.explain("").reasons)
    assert "offload" in str(plan)
    assert jaxmem.Plan.from_json(plan.to_json()) == plan


def unrolled_scan(ws, x):
    """A scan of two layers at once."""

    def loss(ws):
        def layer(y, w):
            return y + jnp.tanh(checkpoint_name(y, "in") @ w), None

        return jnp.square(jax.lax.scan(layer, x, ws, unroll=2)[0]).mean()

    return ws - jax.grad(loss)(ws)


def test_nothing_is_offloaded_inside_a_scan_that_xla_cannot_compile_so():
    """XLA fails with an internal error there: the planner does without, and a policy is refused."""
    args = jax.ShapeDtypeStruct((8, 256, 256), jnp.float32), jax.ShapeDtypeStruct((4096, 256), "f4")
    options = {"target": "h200", "donate_argnums": 0, "progress": False}
    with pytest.raises(jaxmem.BudgetInfeasibleError) as caught:
        jaxmem.plan(unrolled_scan, *args, budget="12MiB", **options)
    budget = caught.value.smallest_bytes
    plan = jaxmem.plan(unrolled_scan, *args, budget=budget, host_budget="8GiB", **options)
    assert plan.compiled_bytes <= budget
    away = policies.nothing.override(policies.offload("in"))
    with pytest.raises(jaxmem.JaxmemError, match="inside a scan with unroll=2"):
        jaxmem.plan(unrolled_scan, *args, budget="64MiB", policy=away, **options)


def test_what_a_loop_over_steps_gives_back_stays_on_the_device():
    """XLA:GPU fails with an internal error where the loop's result goes straight to the host."""

    def steps(state, x):
        return jax.lax.scan(lambda state, _: step(state, x), state, None, length=2)

    state = 2 * (2 * [jax.ShapeDtypeStruct((512, 512), jnp.float32)],)
    options = {"target": "h200", "donate_argnums": 0, "progress": False}
    with pytest.raises(jaxmem.BudgetInfeasibleError) as told:
        jaxmem.plan(steps, state, jnp.ones((ROWS, 512)), budget="4MiB", **options)
    smallest = told.value.smallest_bytes
    plan = jaxmem.plan(steps, state, jnp.ones((ROWS, 512)), budget=smallest, **options)
    assert not plan.hosted and plan.compiled_bytes <= smallest


def test_a_plan_says_when_hosted_leaves_are_updated(planned: jaxmem.Plan):
    """In the backward pass or after it: two programs, and each is followed as it was planned."""
    texts = set()
    for last in (False, True):
        run = followed(dataclasses.replace(planned, updates_last=last))
        assert run.plan(*arguments()).updates_last is last
        texts.add(run.lower(*arguments()).as_text())
    assert len(texts) == 2
    said = str(dataclasses.replace(planned, updates_last=True).explain())
    assert "they are updated after all else: in the backward pass did not fit" in said
