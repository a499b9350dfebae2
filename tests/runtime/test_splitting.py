"""Where the compiler would exchange what is made of a batch, it is told to split that alike."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import jaxmem
from jaxmem import planning
from jaxmem.planner.plan import Plan
from jaxmem.program.pinning import has_pins
from jaxmem.runtime import splitting
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.partitioned import exchanged_bytes
from jaxmem.targets import Target
from jaxmem.targets.topology import tracing_for
from tests import embedded_nets as net

EIGHT = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
NOTE = "split as batches are"


def fit(rule="zero3", **options):
    return jaxmem.fit(
        net.step,
        mesh=EIGHT,
        shard=rule,
        target="8xh100",
        donate_argnums=0,
        progress=False,
        **options,
    )


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    """As it is planned, and a plan that leaves it all to the compiler."""
    told = fit().plan(net.shapes(), net.TOKENS)
    return told, replace(told, pinned=False)


def compiled(fitted) -> tuple[str, int]:
    outcome = fitted._planned((net.shapes(), net.TOKENS), {})[1]
    assert has_pins(outcome.block) == outcome.plan.pinned
    return outcome.compiled.hlo_text(), outcome.compiled.memory.total_bytes


def test_devices_send_less_than_half_and_the_plan_says_so(plans):
    told, left = plans
    assert told.pinned
    assert any(NOTE in note for note in told.notes)
    (text, nbytes), (alone, before) = compiled(fit(plan=told)), compiled(fit(plan=left))
    assert exchanged_bytes(text, 8) < 0.5 * exchanged_bytes(alone, 8)
    assert nbytes < 1.15 * before


def test_a_plan_that_is_followed_says_it_and_nothing_is_found_out_again(plans, monkeypatch):
    def unexpected(*args, **kwargs):
        raise AssertionError("compiled to find out")

    monkeypatch.setattr(splitting, "compile_for", unexpected)
    again = Plan.from_json(plans[0].to_json())
    followed = fit(plan=again).plan(net.shapes(), net.TOKENS)
    assert followed.compiled_bytes == plans[0].compiled_bytes
    assert followed.pinned


def test_a_plan_that_says_it_of_a_step_on_one_device_is_refused():
    written = jaxmem.fit(net.step, target="h100", donate_argnums=0, progress=False)
    plan = replace(written.plan(net.shapes(), net.TOKENS), pinned=True)
    again = jaxmem.fit(net.step, plan=plan, target="h100", donate_argnums=0, progress=False)
    with pytest.raises(jaxmem.errors.PlanMismatchError, match="products give as batches are"):
        again.plan(net.shapes(), net.TOKENS)


def test_what_fails_while_it_is_found_out_leaves_nothing_pinned(monkeypatch):
    real, made = splitting.compile_for, []

    def failing(*args, **kwargs):
        made.append(None)
        if len(made) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(splitting, "compile_for", failing)
    fitted = fit()
    with pytest.raises(KeyboardInterrupt):
        fitted.plan(net.shapes(), net.TOKENS)
    assert not fitted.plan(net.shapes(), net.TOKENS).pinned


def test_a_process_that_decided_otherwise_can_follow_the_plan_of_the_first(plans, monkeypatch):
    """What it decided itself stays with the values of its trace."""
    left = plans[1]
    expected = compiled(fit(plan=left))[1]

    def agreed_on(program, settings, budget_bytes, host_bytes, given, decide):
        assert decide(budget_bytes, host_bytes, None).plan.pinned
        return decide(budget_bytes, host_bytes, left)

    monkeypatch.setattr(planning.agreed, "is_shared", lambda program: True)
    monkeypatch.setattr(planning.agreed, "fit", agreed_on)
    fitted = fit()
    assert compiled(fitted)[1] == expected != plans[0].compiled_bytes
    assert not fitted.plan(net.shapes(), net.TOKENS).pinned


def momentum(state, tokens):
    value, grads = jax.value_and_grad(net.loss)(state["params"], tokens)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
    return {"params": jax.tree.map(lambda w, m: w - 0.1 * m, state["params"], mu), "mu": mu}, value


def test_a_step_in_pieces_is_split_alike_whatever_was_planned_of_it_before(monkeypatch):
    """With larger weights: leaves of less than a MiB on each device do not wait on the host."""
    for name, dims in (("up", (9, 256, 1024)), ("down", (9, 1024, 256))):
        monkeypatch.setitem(net.SHAPES, name, dims)
    args = ({"params": net.shapes(), "mu": net.shapes()}, net.TOKENS)
    options = {"mesh": EIGHT, "target": "8xh100", "donate_argnums": 0, "progress": False}
    alone, after = (jaxmem.fit(momentum, shard="zero3", host="*mu*", **options) for _ in range(2))
    call = after._take(args, {})
    with after._tracing(call), tracing_for(Target("8xh100")):
        # As host=jaxmem.AUTO does: first the step as one program.
        assert Compiler(after._trace(call).program, Target("8xh100")).pinned
    plan = alone.plan(*args)
    assert plan.pinned and plan.streamed is not None
    followed = jaxmem.fit(momentum, shard="zero3", plan=plan, **options)
    assert after.plan(*args) == plan
    assert followed.plan(*args).compiled_bytes == plan.compiled_bytes


def test_within_a_budget_what_runs_again_is_split_alike(plans):
    budget = int(0.8 * plans[0].compiled_bytes)
    fitted = fit(budget=budget)
    plan = fitted.plan(net.shapes(), net.TOKENS)
    assert plan.pinned
    assert any(d.recomputed for d in plan.decisions)
    text, nbytes = compiled(fitted)
    assert nbytes <= budget
    # Nothing that is made of the batch is gathered: parameters and gradients are exchanged, and
    # the words that were read.
    rows = net.ROWS * net.SEQUENCE * net.WIDTH * 4
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(net.shapes()))
    assert exchanged_bytes(text, 8) < 4 * parameters + 3 * rows


def test_the_report_of_the_step_as_written_is_of_what_the_compiler_makes_of_it_alone(plans):
    found = jaxmem.shard(net.shapes(), EIGHT, "zero3")
    args = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        net.shapes(),
        found.shardings,
    )
    batch = jax.NamedSharding(EIGHT, jax.P("data"))
    rows = jax.ShapeDtypeStruct(net.TOKENS.shape, net.TOKENS.dtype, sharding=batch)
    report = jaxmem.analyze(net.step, args, rows, target="8xh100", donate_argnums=0)
    assert report.compiled_bytes == compiled(fit(plan=plans[1]))[1]


def test_a_step_that_gains_nothing_is_left_to_the_compiler():
    plan = fit({"*": None}).plan(net.shapes(), net.TOKENS)
    assert not plan.pinned
    assert not any(NOTE in note for note in plan.notes)
