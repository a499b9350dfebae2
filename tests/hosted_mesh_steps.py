"""Steps over a mesh whose state waits in host memory; run by test_mesh_hosted.py.

In one process with eight CPU devices, or as one of two processes with four each. Planned for absent
H100s, and run here: of CPU devices pinned memory is memory like any other. Prints one line for
every check that holds.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding

import jaxmem
from jaxmem.runtime import asked, choosing, room, stream, streamed, timeline
from tests import cluster
from tests.mesh_steps import TENSOR, P, loss, mesh

WIDTH, LAYERS = 64, 3
LEAF = 4 * WIDTH * 8 * WIDTH
PART = LEAF // 8
OPTIMIZERS = {
    "adam": optax.adam(1e-3, eps=1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3, eps=1e-3)),
    "adafactor": optax.adafactor(1e-3, momentum=0.9),
}


def step_with(tx):
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def first_state(tx) -> dict:
    """Equal on all processes."""
    draw = np.random.default_rng(0).standard_normal
    params = [
        {
            "up": jnp.asarray(draw((WIDTH, 8 * WIDTH)) / 8, jnp.float32),
            "down": jnp.asarray(draw((8 * WIDTH, WIDTH)) / 16, jnp.float32),
        }
        for _ in range(LAYERS)
    ]
    return {"params": params, "opt": tx.init(params)}


X = np.random.default_rng(1).standard_normal((256, WIDTH)).astype(np.float32)
STEP, TX = step_with(OPTIMIZERS["adam"]), OPTIMIZERS["adam"]


def fit(function=STEP, **options) -> Any:
    settings = {"donate_argnums": 0, "target": "8xh100", "host": "*'opt'*", "progress": False}
    return jaxmem.fit(function, **{"mesh": mesh(), "shard": "zero3", **settings, **options})


def same(expected: Any, found: Any) -> None:
    """Every part that this process has is that part of what one device computes."""
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        whole = np.asarray(a)
        for part in b.addressable_shards:
            np.testing.assert_allclose(whole[part.index], part.data, rtol=1e-4, atol=1e-5)


def steps(name: str = "adam", count: int = 2, **options) -> jaxmem.Plan:
    """Steps are those of one device; what waits stays split, in host memory, where it was."""
    tx = OPTIMIZERS[name]
    function = step_with(tx)
    run, plain = fit(function, **options), jax.jit(function)
    state, expected = run.place(first_state(tx), X)[0], first_state(tx)
    plan, places = run.plan(state, X), [a.sharding for a in jax.tree.leaves(state)]
    hosted = [place for place in places if place.memory_kind == "pinned_host"]
    assert len(hosted) == len(plan.hosted) > 0
    assert not any(place.is_fully_replicated for place in hosted)
    for _ in range(count):
        state, value = run(state, X)
        expected, reference = plain(expected, X)
        same((expected, reference), (state, value))
        assert [a.sharding for a in jax.tree.leaves(state)] == places
    assert len(run._outcomes) == 1, "a state that came back was planned anew"
    return plan


def zero1() -> None:
    split("zero1")


def zero3() -> None:
    split("zero3")


def split(rule: str) -> None:
    moments = 2 * PART * 2 * LAYERS
    plan = steps(shard=rule)
    # What is copied, and what waits, is what each device has.
    assert plan.streamed.fetched_bytes == plan.streamed.sent_bytes == moments
    params = moments / 2 * (1 if rule == "zero3" else 8)
    assert params <= plan.argument_bytes <= 1.05 * params + X.nbytes / 8
    assert plan.compiled_bytes > plan.argument_bytes


def tensor_parallel() -> None:
    steps(shard=[TENSOR, "zero3"], mesh=mesh(data=2, model=4))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step: every device computes the whole batch")
        steps(shard=TENSOR, mesh=mesh(model=8))


def optimizers() -> None:
    """Where all gradients decide about each update, and where moments are of other shapes."""
    steps("clipped")
    steps("adafactor", shard="zero1")


def whole_state() -> None:
    """Parameters as well: the gradients run in stages, which fetch their parts."""
    plan = steps(host="state*")
    assert plan.streamed.stages > 1
    assert plan.argument_bytes < 1.05 * X.nbytes / 8


def in_small_budgets() -> None:
    """With recomputation, and updates in pieces of the budget."""
    written = fit().plan(first_state(TX), X)
    try:
        fit(budget="1KiB").plan(first_state(TX), X)
    except jaxmem.BudgetInfeasibleError as error:
        smallest = error.smallest_bytes
    plan = steps(budget=smallest)
    assert plan.compiled_bytes <= smallest < written.compiled_bytes


def gradients_are_split() -> None:
    """The compiler's own figures: gradients leave their piece as parts, and not whole."""
    run = fit(shard="zero1", target="8xh100")
    memory = run.lower(first_state(TX), X).compile().memory_analysis()
    whole = LEAF * 2 * LAYERS
    handed = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert whole / 8 <= handed <= 1.05 * whole / 8, (handed, whole)


def given_on_a_mesh() -> None:
    """Arrays that are laid out by the caller, with a mesh and without; and from host memory."""
    over = mesh()
    found = jaxmem.shard(first_state(TX), over, "zero3", host="*'opt'*")
    rows = jax.device_put(X, NamedSharding(over, P("data")))
    expected = jax.jit(STEP)(first_state(TX), X)
    for options in ({"shard": None}, {"mesh": None, "shard": None}):
        run = fit(**options)
        state, value = run(jax.device_put(first_state(TX), found.shardings), rows)
        same(expected, (state, value))
        same(jax.jit(STEP)(expected[0], X), run(state, rows))
        kinds = [a.sharding.memory_kind for a in jax.tree.leaves(state)]
        assert kinds == [s.memory_kind or "device" for s in jax.tree.leaves(found.shardings)]
        assert len(run._outcomes) == 1


def explicit_axes() -> None:
    over = mesh(AxisType.Explicit)
    steps(mesh=over, count=1)


def values_and_state_within_one_program() -> None:
    """What ``host_budget`` allows: values and moments wait in host memory, each device's parts."""
    settings = {"host": None, "budget": None}
    grid = {"shard": [TENSOR, "zero3"], "mesh": mesh(data=2, model=4)}
    for options in ({}, grid):
        plan = _with_everything_away(**options)
        run, plain = fit(**settings, **options, plan=plan), jax.jit(STEP)
        state, expected = run.place(first_state(TX), X)[0], first_state(TX)
        places = [a.sharding for a in jax.tree.leaves(state)]
        assert [place.memory_kind for place in places].count("pinned_host") == 4 * LAYERS
        memory = run.lower(state, X).compile().memory_analysis()
        assert memory.host_argument_size_in_bytes == 4 * LAYERS * PART
        assert memory.host_temp_size_in_bytes > 0
        for _ in range(2):
            state, value = run(state, X)
            expected, reference = plain(expected, X)
            same((expected, reference), (state, value))
            assert [a.sharding for a in jax.tree.leaves(state)] == places
        assert len(run._outcomes) == 1, "a state that came back was planned anew"


def _with_everything_away(**options) -> jaxmem.Plan:
    """A plan that keeps products alone, with these and the moments in host memory."""
    policy = jaxmem.policies.dots
    plan = fit(host=None, policy=policy, **options).plan(first_state(TX), X)
    kept = tuple(dataclasses.replace(k, offloaded=k.names) for k in plan.kept)
    assert any(k.names for k in kept)
    leaves = jax.tree_util.tree_leaves_with_path(first_state(TX))
    moments = [jax.tree_util.keystr(path) for path, _ in leaves if "'opt'" in str(path[0])]
    away = tuple(f"state{path}" for path in moments if not path.endswith("count"))
    return dataclasses.replace(plan, kept=kept, hosted=away, policy="")


def values_of_loops() -> None:
    """What an iteration keeps waits on the host, and is there before the iteration that reads it.

    It was fetched where it was read: a GPT of 1.3e9 parameters over four H200 waited 82 ms of a
    step in 8 GiB for its copies, and 39 since, as its compiled programs are played through.
    """

    def step(state, x):
        def loss(w):
            def layer(x, w):
                y = jnp.tanh(x @ w)
                return x + jnp.sin(y @ w.T), None

            return (jax.lax.scan(layer, x, w)[0] ** 2).mean()

        value, grad = jax.value_and_grad(loss)(state)
        return state - 0.1 * grad, value

    w = jnp.asarray(np.random.default_rng(2).standard_normal((5, WIDTH, 8 * WIDTH)) / 64, "float32")
    settings: dict[str, Any] = {"host": None, "budget": None}
    plan = fit(step, host=None, policy=jaxmem.policies.dots).plan(w, X)
    kept = tuple(dataclasses.replace(k, offloaded=k.names) for k in plan.kept)
    run = fit(step, **settings, plan=dataclasses.replace(plan, kept=kept, policy=""))
    state, expected = run.place(w, X)[0], jnp.copy(w)
    for _ in range(2):
        state, value = run(state, X)
        expected, reference = jax.jit(step)(expected, X)
        same((expected, reference), (state, value))
    (outcome,) = run._outcomes.values()
    bodies = [op.loop.body for op in outcome.block.ops if op.loop is not None]
    fetched = [(body, op) for body in bodies for op in body.ops if op.transfer == "fetch"]
    assert fetched
    for body, op in fetched:
        assert set(op.outputs) <= set(body.outputs)
        assert not any(v in op.outputs for other in body.ops for v in other.values)


def plans_again(tmp: Path) -> None:
    fit().plan(first_state(TX), X).save(tmp / "plan.json")
    plan = jaxmem.Plan.load(tmp / "plan.json")
    assert steps(plan=plan, host=None, count=1).streamed == plan.streamed


def checkpoints(tmp: Path) -> None:
    """What waits is written from host memory, and comes back there, or on the devices."""
    run = fit()
    state, _ = run(first_state(TX), X)
    jaxmem.save(tmp / "run", state, step=0, wait=True)
    back = jaxmem.restore(tmp / "run", state)
    assert [a.sharding for a in jax.tree.leaves(back)] == [
        a.sharding for a in jax.tree.leaves(state)
    ]
    expected = jax.jit(STEP)(first_state(TX), X)[0]
    same(jax.jit(STEP)(expected, X), run(back, X))
    other = fit(host=None, shard="zero1")
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), expected)
    if jax.process_count() == 1:
        same(jax.jit(STEP)(expected, X), other(jaxmem.restore(tmp / "run", like), X))


def a_copy_that_fails() -> None:
    """It is made again with nothing else under way, and no program runs twice."""
    run, state = fit(), first_state(TX)
    state = run.place(state, X)[0]
    real, left = stream.Run._copy, [1]

    def fails(self, *args):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("RESOURCE_EXHAUSTED: injected")
        return real(self, *args)

    stream.Run._copy = fails
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = run(state, X)
    finally:
        stream.Run._copy = real
    assert any("worked with nothing else under way" in str(w.message) for w in told)
    same(jax.jit(STEP)(first_state(TX), X), found)


def automatic() -> None:
    """The planner may choose leaves to wait, as on one device."""
    try:
        fit(host=None, budget="1KiB").plan(first_state(TX), X)
    except jaxmem.BudgetInfeasibleError as error:
        smallest = error.smallest_bytes
    run = fit(host=jaxmem.AUTO, budget=smallest - PART)
    plan = run.plan(first_state(TX), X)
    assert plan.streamed is not None, plan.notes
    same(jax.jit(STEP)(first_state(TX), X), run(first_state(TX), X))


def wrong_uses() -> None:
    state = first_state(TX)
    elsewhere = jax.device_put(state, jaxmem.shard(state, mesh(), "zero3").shardings)
    alone = {**elsewhere, "opt": TX.init(state["params"])}
    cases = [
        ({"host": "*nothing*"}, state, "matches no argument of step"),
        ({"host": "*count*"}, state, "the largest has 4B on each device"),
        ({"target": None}, state, "computes in host memory"),
        ({"donate_argnums": ()}, state, "it is not donated"),
        ({"budget": "1KiB"}, state, "no plan fits budget=1.0KiB"),
        ({"host_budget": PART}, state, "in host memory, and there are 16.0KiB for each device"),
        ({"mesh": None, "shard": None}, alone, "is not laid out over the devices"),
        ({"target": "4xh100"}, state, "has 8 devices, and target=4xh100 has 4"),
        (
            {"shard": jaxmem.shard(state, mesh(), "zero3", host="*'opt'*"), "host": None},
            state,
            'fit(..., host="',
        ),
    ]
    for options, given, said in cases:
        try:
            fit(**options).plan(given, X)
        except jaxmem.JaxmemError as error:
            assert said in str(error), f"{options}: {error}"
        else:
            raise AssertionError(f"nothing was said of {said}")


def of_this_size() -> None:
    """What takes seconds with leaves of a useful size is the same with smaller ones."""
    asked.FEWEST_BYTES = choosing.FEWEST_BYTES = PART
    streamed._BUCKET_BYTES, room._WINDOW_BYTES, timeline._PYTHON_SECONDS = 4 * PART, 8 * PART, 0.0


ALONE = {
    "zero1": zero1,
    "zero3": zero3,
    "tensor parallel": tensor_parallel,
    "optimizers": optimizers,
    "whole state": whole_state,
    "small budgets": in_small_budgets,
    "gradients": gradients_are_split,
    "given": given_on_a_mesh,
    "explicit axes": explicit_axes,
    "within one program": values_and_state_within_one_program,
    "values of loops": values_of_loops,
    "plans again": plans_again,
    "checkpoints": checkpoints,
    "a failed copy": a_copy_that_fails,
    "automatic": automatic,
    "wrong uses": wrong_uses,
}
TOGETHER = {
    "zero3": lambda: steps(count=2, target="2x4xh100"),
    "clipped": lambda: steps("clipped", count=1, target="2x4xh100", shard="zero1"),
    "whole state": lambda: steps(host="state*", count=1, target="2x4xh100"),
    "checkpoints": checkpoints,
}


def main() -> None:
    together = sys.argv.pop(1) == "together"
    if together:
        cluster.initialize()
        del sys.argv[1:4]
    of_this_size()
    tmp, names = Path(sys.argv[1]), sys.argv[2:]
    checks = TOGETHER if together else ALONE
    for name in names or checks:
        check = checks[name]
        try:
            check(tmp) if check in (plans_again, checkpoints) else check()
        except Exception:
            traceback.print_exc()
        else:
            print(name, flush=True)


if __name__ == "__main__":
    main()
