"""Steps over the devices of several processes; prints what holds. See test_mesh_processes.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem import processes
from jaxmem.planning import Planning
from jaxmem.runtime import agreed
from tests import cluster

P = PartitionSpec
WIDTH, LAYERS = 64, 3
TENSOR = {"*up*": P(None, "model"), "*down*": P("model")}
TX = optax.adam(1e-3, eps=1e-3)
X = np.random.default_rng(1).standard_normal((1024, WIDTH)).astype(np.float32)


def loss(params, x):
    for w in params:
        x = x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"]
    return (x**2).mean()


def step(state, x):
    value, grads = jax.value_and_grad(loss)(state["params"], x)
    updates, opt_state = TX.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


def first_state() -> dict:
    """Equal on all processes, each on its own first device."""
    draw = np.random.default_rng(0).standard_normal
    params = [
        {
            "up": jnp.asarray(draw((WIDTH, 4 * WIDTH)) / 8, jnp.float32),
            "down": jnp.asarray(draw((4 * WIDTH, WIDTH)) / 16, jnp.float32),
        }
        for _ in range(LAYERS)
    ]
    return {"params": params, "opt_state": TX.init(params)}


def same(expected: Any, found: Any) -> None:
    """Every part that this process has is that part of what one device computes."""
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        for part in b.addressable_shards:
            np.testing.assert_allclose(np.asarray(a)[part.index], part.data, rtol=1e-4, atol=1e-5)


def fit(over, rule, function=step, **options) -> Any:
    options = {"donate_argnums": 0, "progress": False, **options}
    return jaxmem.fit(function, mesh=over, shard=rule, **options)


def small_budget(over, rule) -> int:
    """A budget between what a step takes as written and the smallest that works."""
    written = fit(over, rule).plan(first_state(), X).compiled_bytes
    try:
        fit(over, rule, budget=1000).plan(first_state(), X)
    except jaxmem.BudgetInfeasibleError as error:
        return (written + error.smallest_bytes) // 2
    raise AssertionError("1000 bytes were enough")


def part_of(written: int) -> int:
    """A budget in which steps as written do not fit; looking for the smallest takes 6 s."""
    return written * 17 // 20


def compute(over, rule, budget: int) -> jaxmem.Plan:
    """Three steps inside a small budget are those of one device."""
    expected, state, plain = first_state(), first_state(), jax.jit(step)
    fitted = fit(over, rule, budget=budget)
    for n in range(3):
        # As NumPy has it on each process, or as JAX wants it from each.
        rows = X if n else put_rows(X, over)
        expected, expected_loss = plain(expected, X)
        state, value = fitted(state, rows)
        same((expected, expected_loss), (state, value))
    plan = fitted.plan(state, X)
    assert plan.solver != "keep-all", plan
    assert plan.compiled_bytes <= budget
    return plan


def main(directory: Path) -> None:
    me = cluster.initialize()
    agreed._ARRIVE_SECONDS = 60.0
    data = jax.make_mesh((8,), ("data",))
    grid = jax.make_mesh((4, 2), ("data", "model"))
    plain = jax.jit(step)
    if sys.argv[5:] == ["rules"]:
        for over, rule in ((data, "zero1"), (data, "zero3"), (grid, TENSOR)):
            compute(over, rule, small_budget(over, rule))
        print("what one device computes: holds")
        return
    split = [TENSOR, "zero3"]
    written = fit(grid, split).plan(first_state(), X).compiled_bytes
    plan = compute(grid, split, part_of(written))
    print("what one device computes: holds")

    if me == 0:
        plan.save(directory / "plan.json")
    processes.meet("wait for the file", 20)
    followed = fit(grid, split, plan=jaxmem.Plan.load(directory / "plan.json"))
    same(plain(first_state(), X), followed(first_state(), X))
    placed = followed.place(first_state(), X)
    same((first_state(), X), placed)
    same(plain(first_state(), X), followed(*placed))
    print("a plan from a file: holds")

    def other(state, x):
        state, value = step(state, x)
        return state, value * (2 + me)

    text = cluster.said(lambda: fit(data, "zero3", other).plan(first_state(), X))
    assert "the step of process 1 is not that of process 0" in text, text
    assert "process 1 has the program" in text, text
    text = cluster.said(lambda: fit(data, "zero3", budget=10**8 + me)(first_state(), X))
    assert "process 0 has budget=100000000, process 1 has budget=100000001" in text, text
    text = cluster.said(lambda: fit(data, "zero1" if me else "zero3")(first_state(), X))
    assert "argument state['opt_state'][0].mu" in text or "argument state['params']" in text, text
    text = cluster.said(lambda: fit(data, "zero3", budget=1000)(first_state(), X))
    assert "BudgetInfeasibleError: no plan fits" in text, text
    text = cluster.said(lambda: fit(data, "zero3", time_limit=5.0)(first_state(), X))
    assert "time_limit= in 2 processes" in text, text
    plan = fit(data, "zero3").plan(first_state(), X)
    given = {"plan": plan} if me else {}
    text = cluster.said(lambda: fit(data, "zero3", **given)(first_state(), X))
    assert "process 0 has no plan, process 1 has the plan" in text, text
    print("the same errors on all processes: holds")

    # Two that came to different plans run that of process 0.
    decide, calls = Planning.decide, []

    def differing(self, call, traced, target, budget, host, given):
        calls.append(given)
        lower = written if given is not None or me == 0 else smaller
        return decide(self, call, traced, target, lower, host, given)

    written = fit(data, "zero3").plan(first_state(), X).compiled_bytes
    smaller = part_of(written)
    Planning.decide = differing
    fitted = fit(data, "zero3", budget=written)
    same(plain(first_state(), X), fitted(first_state(), X))
    plans = processes.meet("compare plans", 20).exchange(
        "plan", fitted.plan(first_state(), X).to_json()
    )
    assert len(calls) == 2, calls
    assert calls[0] is None, calls
    assert calls[1] is not None, calls
    assert jaxmem.Plan.from_json(plans[0]).kept == jaxmem.Plan.from_json(plans[1]).kept
    Planning.decide = decide
    print("one plan where they differ: holds")

    alone = jaxmem.fit(step, progress=False)
    if me == 0:
        same(plain(first_state(), X), alone(first_state(), X))
    print("a process plans for itself: holds")


def put_rows(rows: np.ndarray, over) -> jax.Array:
    mine = np.split(rows, jax.process_count())[jax.process_index()]
    return jax.make_array_from_process_local_data(NamedSharding(over, P("data")), mine)


if __name__ == "__main__":
    main(Path(sys.argv[4]))
