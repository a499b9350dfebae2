"""What is planned over a mesh of eight CPU devices; run by test_mesh.py as mesh_steps.py is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.runtime import compiler
from tests.mesh_steps import (
    LAYERS,
    TENSOR,
    WIDTH,
    X,
    first_state,
    fit,
    loss,
    mesh,
    run,
    step,
    three_steps,
)
from tests.problems import PROBLEMS, assert_same


def bytes_on_paper() -> None:
    """What is predicted for the step as written is what each device takes; its report is exact."""
    rows = np.zeros((4096, WIDTH), np.float32)
    one = PROBLEMS["transformer_scan"]
    function, args = one.make()
    cases = [(step, (first_state(), rows), 0, mesh(), rule) for rule in (None, "zero1", "zero3")]
    cases.append((step, (first_state(), rows), 0, mesh(data=2, model=4), [TENSOR, "zero3"]))
    cases.append((function, args, one.donate, mesh(), "zero3"))
    for function, args, donated, over, rule in cases:
        fitted = fit(function, mesh=over, shard=rule, donate_argnums=donated)
        plan, report = fitted.plan(*args), fitted.report(*args)
        assert 0.85 < plan.predicted_bytes / plan.compiled_bytes < 1.15, (rule, plan.rounds)
        assert not any("times what was counted" in note for note in plan.notes), plan.notes
        assert report.peak_bytes == plan.compiled_bytes
        assert report.argument_bytes == plan.argument_bytes == sum(report.by_argument().values())
        filled = sum(b.nbytes for b in report.at_peak())
        assert 0.95 < filled / report.peak_bytes < 1.05, (rule, filled, report.peak_bytes)


def _count(text: str, collective: str) -> int:
    return len(re.findall(rf" {collective}(?:-start)?\(", text))


def collectives_once() -> None:
    """Recomputation repeats none that what is cheaper to make again does without."""

    def wide(params, x):
        def loss(params):
            y = x
            for w in params:
                y = y + jnp.tanh(y @ w["up"]) @ w["down"]
            return (y**2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    shapes = {"up": (WIDTH, 16 * WIDTH), "down": (16 * WIDTH, WIDTH)}
    params = [{n: jnp.zeros(s) for n, s in shapes.items()} for _ in range(LAYERS)]
    options = {"mesh": mesh(model=8), "shard": TENSOR}
    rows = np.zeros((8192, WIDTH), np.float32)
    written = fit(wide, **options)
    budget = int(0.7 * written.plan(params, rows).compiled_bytes)
    fitted = fit(wide, budget=budget, **options)
    plan = fitted.plan(params, rows)
    assert any(d.recomputed for d in plan.decisions)
    texts = [f.lower(params, rows).compile().as_text() for f in (written, fitted)]
    assert 0 < _count(texts[1], "all-reduce") <= _count(texts[0], "all-reduce") + 1


def gathered_again() -> None:
    """A budget without room for all weights at once gathers them once more, and computes alike."""
    options = {"mesh": mesh(), "shard": "zero3"}
    written = fit(step, **options)
    budget = int(0.7 * written.plan(first_state(), X).compiled_bytes)
    plan = three_steps("zero3", mesh(), budget=budget)
    assert plan.compiled_bytes <= budget
    found = fit(step, budget=budget, **options).lower(first_state(), X).compile().as_text()
    before = written.lower(first_state(), X).compile().as_text()
    assert _count(found, "all-gather") > _count(before, "all-gather")
    assert _count(found, "all-reduce") <= _count(before, "all-reduce")


def one_scale() -> None:
    """Where devices have other parts than was counted, every prediction is scaled alike."""

    def counted(n):
        def accumulated(params, x):
            grads = jaxmem.accumulate(jax.grad(loss), n)(params, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

        return accumulated

    params, rows = first_state()["params"], np.zeros((4096, WIDTH), np.float32)
    options, agreed = {"mesh": mesh(), "shard": ()}, compiler.OTHER_PARTS
    compiler.OTHER_PARTS = 1.0
    try:
        written = fit(counted(1), **options)
        plan = written.plan(params, rows)
        assert plan.predicted_bytes == plan.compiled_bytes
        curve = jaxmem.frontier(written, params, rows, points=2)
        assert curve.points[-1].solver == "keep-all"
        assert curve.points[-1].peak_bytes == plan.predicted_bytes
        budget = int(0.9 * plan.compiled_bytes)
        chosen = fit(counted(jaxmem.AUTO), budget=budget, **options).plan(params, rows)
    finally:
        compiler.OTHER_PARTS = agreed
    assert chosen.rounds[0].predicted_bytes == plan.predicted_bytes
    assert chosen.compiled_bytes <= budget


def automatic() -> None:
    """The quickest of those that fit; what was compared is said, and nothing else is different."""
    plans = {
        rule or (): fit(step, mesh=mesh(), shard=rule or ()).plan(first_state(), X)
        for rule in ((), "zero1", "zero3")
    }
    quickest = min(plans.values(), key=lambda plan: plan.predicted_seconds)
    smallest = min(plan.compiled_bytes for plan in plans.values())
    for budget in (None, int(0.8 * smallest)):
        fitted = fit(step, mesh=mesh(), shard="auto", budget=budget)
        plan = fitted.plan(first_state(), X)
        assert 'shard="auto" took' in plan.notes[-1]
        assert fit(step, mesh=mesh(), shard="auto", budget=budget).plan(first_state(), X) == plan
        assert budget is None or plan.compiled_bytes <= budget
        if budget is None:
            assert plan.split == quickest.split
        state, expected = first_state(), first_state()
        for _ in range(2):
            state, value = fitted(state, X)
            expected, expected_loss = jax.jit(step)(expected, X)
            assert_same((expected, expected_loss), (state, value))
        assert len(fitted._outcomes) == 1
        follower = fit(step, mesh=mesh(), shard="auto", plan=plan)
        assert follower.plan(first_state(), X).split == plan.split
    try:
        fit(step, mesh=mesh(), shard="auto", budget=1000).plan(first_state(), X)
    except jaxmem.BudgetInfeasibleError as error:
        assert 'shard="auto" of step compared: whole on each device' in str(error)
        assert error.smallest_bytes < smallest
    else:
        raise AssertionError("1000 bytes were enough")
    grid = mesh(data=2, model=4)
    beside = fit(step, mesh=grid, shard=["auto", TENSOR]).plan(first_state(), X)
    assert any("model" in spec for _, spec in beside.split), beside.split
    for given in (["auto", "zero3"], ["auto", "auto"]):
        try:
            fit(step, mesh=mesh(), shard=given)
        except jaxmem.ArgumentError as error:
            assert "it takes patterns of paths" in str(error)
        else:
            raise AssertionError(given)


def split_as_compiled() -> None:
    """Values are split on paper as they are in the compiled program, where that has two ways.

    Shardy alone splits what layers hand on as the optimizer's state is split; XLA by the batch.
    """
    one = PROBLEMS["transformer_unrolled"]
    function, args = one.make()
    batch = jax.tree.leaves(args[-1])[0].shape[0]
    for rule in ("zero1", "zero3"):
        fitted = fit(function, mesh=mesh(), shard=rule, donate_argnums=one.donate)
        outcome = fitted._planned(args, {})[1]
        text = outcome.compiled.hlo_text()
        # Weights and gradients meet in collectives, and nothing that is made of the batch.
        exchanged = re.findall(r"= (.*?) (?:all-gather|all-to-all)(?:-start)?\(", text)
        assert not any(f"[{batch}," in shapes for shapes in exchanged), exchanged
        made = [v for op in outcome.block.ops for v in op.outputs if v.layout is not None]
        rows = [v for v in made if len(v.aval.shape) == 3 and v.aval.shape[0] == batch]
        whole = sum(v.nbytes for v in rows)
        assert whole > 2**20
        assert sum(v.nbytes for v in rows if v.layout.parts == (8, 1, 1)) > 0.95 * whole, rule


def absent_and_real() -> None:
    """A plan for a mesh without devices is followed over devices: the program names its mesh."""
    rows = np.zeros((4096, WIDTH), np.float32)

    def constrained(over):
        def step(params, x):
            def loss(params):
                y = x
                for w in params:
                    y = y + jnp.tanh(y @ w["up"]) @ w["down"]
                    y = jax.lax.with_sharding_constraint(y, NamedSharding(over, P("data")))
                return (y**2).mean()

            return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

        return step

    params, plans = jax.eval_shape(first_state)["params"], []
    absent = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for over in (absent, mesh()):
        options = {"mesh": over, "shard": "zero3", "target": "8xh100"}
        full = fit(constrained(over), budget="100%", **options).plan(params, rows)
        options["budget"] = int(0.5 * full.compiled_bytes)
        plans.append(fit(constrained(over), **options).plan(params, rows))
        followed = fit(constrained(over), plan=plans[0], **options).plan(params, rows)
        assert followed.kept and followed.compiled_bytes == plans[0].compiled_bytes
    assert plans[0].fingerprint == plans[1].fingerprint


CHECKS = {
    "bytes on paper": bytes_on_paper,
    "split as compiled": split_as_compiled,
    "absent and real": absent_and_real,
    "collectives once": collectives_once,
    "gathered again": gathered_again,
    "one scale": one_scale,
    "automatic": automatic,
}

if __name__ == "__main__":
    run(CHECKS)
