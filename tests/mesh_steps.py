"""Steps fitted over a mesh of eight CPU devices; run by test_mesh.py in a process that has them.

Prints one line for every check that holds, and what does not hold of the others.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxmem
from tests import embedded_nets
from tests.problems import PROBLEMS, assert_same

P = PartitionSpec
WIDTH, LAYERS = 128, 4
TENSOR = {"*up*": P(None, "model"), "*down*": P("model")}
TX = optax.adam(1e-3, eps=1e-3)


def mesh(axis_type: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    axes = axes or {"data": 8}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))


def loss(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return (x**2).mean()


def step(state, x):
    value, grads = jax.value_and_grad(loss)(state["params"], x)
    updates, opt_state = TX.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


def first_state():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [
        {
            "up": jax.random.normal(key, (WIDTH, 4 * WIDTH)) / 11,
            "down": jax.random.normal(key, (4 * WIDTH, WIDTH)) / 22,
        }
        for key in keys
    ]
    return {"params": params, "opt_state": TX.init(params)}


X = np.random.default_rng(1).standard_normal((512, WIDTH)).astype(np.float32)


def fit(function, **options) -> Any:
    return jaxmem.fit(function, progress=False, **{"donate_argnums": 0, **options})


def small_budget(function, *args, share: float = 0.3, **options) -> int:
    """A budget between what a step takes as written and the smallest that works."""
    written = fit(function, **options).plan(*args).compiled_bytes
    try:
        fit(function, budget=1000, **options).plan(*args)
    except jaxmem.BudgetInfeasibleError as error:
        return int(share * written + (1 - share) * error.smallest_bytes)
    raise AssertionError("1000 bytes were enough")


def layouts(tree) -> list[NamedSharding]:
    return [a.sharding for a in jax.tree.leaves(tree)]


def three_steps(rule, over: Mesh, **options) -> jaxmem.Plan:
    """States and losses of three steps are those of one device, and layouts stay what they are."""
    expected, state, places = first_state(), first_state(), None
    plain = jax.jit(step)
    fitted = fit(step, mesh=over, shard=rule, **options)
    for _ in range(3):
        expected, expected_loss = plain(expected, X)
        state, value = fitted(state, X)
        assert_same(expected_loss, value)
        assert_same(expected, state)
        places = layouts(state) if places is None else places
        assert layouts(state) == places
    assert len(fitted._outcomes) == 1, "a state that came back was planned anew"
    found = jaxmem.shard(first_state(), over, rule or ())
    for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(found.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), (leaf.sharding, place)
    return fitted.plan(state, X)


def named_rules() -> None:
    for rule in ("zero1", "zero3"):
        options = {"mesh": mesh(), "shard": rule}
        budget = small_budget(step, first_state(), X, **options)
        plan = three_steps(rule, mesh(), budget=budget)
        assert plan.solver != "keep-all"
        assert plan.compiled_bytes <= budget
        assert plan.mesh == (("data", 8),)


def tensor_parallel() -> None:
    """Alone, beside a batch that is split, and with what it leaves split as well."""
    three_steps(TENSOR, mesh(model=8))
    grid = mesh(data=2, model=4)
    three_steps([TENSOR, "zero1"], grid)
    budget = small_budget(step, first_state(), X, mesh=grid, shard=[TENSOR, "zero3"])
    plan = three_steps([TENSOR, "zero3"], grid, budget=budget)
    assert plan.compiled_bytes <= budget


def axis_types() -> None:
    """A mesh as it is made and inside ``jax.set_mesh``: types of axes ask nothing of a step."""

    def constrained(state, x):
        return step(state, jax.lax.with_sharding_constraint(x, P("data")))

    expected = jax.jit(step)(first_state(), X)
    kinds = [mesh(), mesh(AxisType.Explicit)]
    for over, around in [(kinds[1], None), *itertools.product(kinds, kinds)]:
        with contextlib.nullcontext() if around is None else jax.set_mesh(around):
            fitted = fit(constrained, mesh=over, shard="zero3")
            state, value = fitted(first_state(), X)
            assert_same(expected, (state, value))
            fitted(state, X)
            assert len(fitted._outcomes) == 1
    assert jax.make_mesh((8,), ("data",)).axis_types == (AxisType.Explicit,), "not the default"


def explicit_axes() -> None:
    """Arrays laid out over Explicit axes keep their types where no rule is given."""
    over = mesh(AxisType.Explicit)

    def spread(state, x):
        types.append(jax.typeof(x).sharding.spec)
        loss, grads = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.1 * grads}, loss

    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 11
    for typed, spec in ((True, P("data", None)), (False, P(None, None))):
        types: list[P] = []
        expected, state = {"w": w}, {"w": w.copy()}
        fitted = fit(spread, mesh=over)
        rows = jax.device_put(X, NamedSharding(over, P("data"))) if typed else X
        for _ in range(2):
            state, value = fitted(state, rows)
            expected, expected_loss = jax.jit(spread)(expected, X)
            assert_same((expected, expected_loss), (state, value))
        assert types[0] == spec, types


def _observed(args: tuple, out: Any) -> Any:
    objects = tuple(a for a in args if isinstance(a, nnx.Module | nnx.Optimizer))
    return jax.tree.map(np.asarray, (out, nnx.to_pure_dict(nnx.state(objects)) if objects else ()))


def problem(name: str, rule, over: Mesh, share: float = 0.4) -> None:
    """A problem in a small budget: what it returns, and what it leaves in objects."""
    one, donated = PROBLEMS[name], PROBLEMS[name].donate
    options = {"mesh": over, "shard": rule, "donate_argnums": donated}
    function, args = one.make()
    budget = small_budget(function, *args, share=share, **options)
    fitted = fit(function, budget=budget, **options)
    plain = nnx.jit(function) if "nnx" in one.tags else jax.jit(function)
    _, theirs = one.make()
    for _ in range(2):
        out, expected = fitted(*args), plain(*theirs)
        assert_same(_observed(theirs, expected), _observed(args, out))
        if "nnx" not in one.tags:
            args = (*out[: len(donated)], *args[len(donated) :])
            theirs = (*expected[: len(donated)], *theirs[len(donated) :])
    assert len(fitted._outcomes) == 1
    plan = fitted.plan(*args)
    assert plan.solver != "keep-all"
    assert plan.compiled_bytes <= budget
    assert plan.split, "nothing of it is split"


def bytes_of_the_compiler() -> None:
    """State of N devices takes 1/N of the bytes on each, gradients among it."""
    whole = sum(a.nbytes for a in jax.tree.leaves(first_state()["params"]))

    def near(found: float, wanted: float) -> None:
        assert abs(found - wanted) <= 0.05 * wanted, (found, wanted)

    def memory(function, rule, *args):
        fitted = fit(function, mesh=mesh(), shard=rule)
        return fitted.lower(*args).compile().memory_analysis()

    batch = X.nbytes / 8
    for rule, of_state in (("zero3", 3 / 8), ("zero1", 1 + 2 / 8), (None, 3)):
        found = memory(step, rule, first_state(), X)
        near(found.argument_size_in_bytes - batch, of_state * whole)
        near(found.alias_size_in_bytes, of_state * whole)
        near(found.output_size_in_bytes, of_state * whole)

    def with_gradients(state, x):
        grads = jax.grad(loss)(state["params"], x)
        return {"params": state["params"], "grads": grads}

    def state():
        return {name: first_state()["params"] for name in ("params", "grads")}

    near(memory(with_gradients, "zero3", state(), X).output_size_in_bytes, 2 / 8 * whole)


def placing() -> None:
    """What is placed needs no moving; what is not is moved by the step, whatever it is."""
    over = mesh()
    fitted = fit(step, mesh=over, shard="zero1")
    placed, batch = fitted.place(first_state(), X)
    assert placed["params"][0]["up"].sharding == NamedSharding(over, P())
    assert placed["opt_state"][0].mu[0]["up"].sharding == NamedSharding(over, P("data"))
    assert batch.sharding == NamedSharding(over, P("data"))
    expected = jax.jit(step)(first_state(), X)
    assert_same(expected, fitted(placed, batch))
    one = jax.devices()[3]
    for given in (X, jnp.asarray(X), jax.device_put(X, one), batch):
        assert_same(expected, fitted(first_state(), given))
        assert_same(expected, fitted(jax.device_put(first_state(), one), given))
    assert len(fitted._outcomes) == 1
    whole = jax.device_put(X, NamedSharding(over, P()))
    assert_same(expected, fitted(first_state(), whole))
    whole_bytes = fitted.plan(first_state(), whole).argument_bytes
    assert whole_bytes > fitted.plan(first_state(), X).argument_bytes
    tied = {"params": first_state()["params"][:1] * 2}
    tied["opt_state"] = TX.init(tied["params"])
    expected = jax.jit(step)(tied, X)
    assert_same(expected, fitted(*fitted.place(tied, X)))


def donated_once() -> None:
    """What was donated is gone wherever it was, and what was not is there."""
    over, state = mesh(), first_state()
    fitted = fit(step, mesh=over, shard="zero3")
    fitted(state, X)
    assert all(a.is_deleted() for a in jax.tree.leaves(state))
    kept = first_state()
    undonated = fit(step, mesh=over, shard="zero3", donate_argnums=())
    first, _ = undonated(kept, X)
    again, _ = undonated(first, X)
    assert layouts(first) == layouts(again)
    assert not any(a.is_deleted() for a in jax.tree.leaves([kept, first]))


def without_rules() -> None:
    """Arrays that are laid out by the caller stay so, with a mesh and without one."""
    over, state = mesh(), first_state()
    found = jaxmem.shard(state, over, "zero3")
    expected = jax.jit(step)(first_state(), X)
    for options in ({"mesh": over}, {}):
        placed = jax.device_put(first_state(), found.shardings)
        rows = jax.device_put(X, NamedSharding(over, P("data")))
        after, value = fit(step, **options)(placed, rows)
        assert_same(expected, (after, value))
        if options:
            assert layouts(after) == jax.tree.leaves(found.shardings)


def specs_and_metadata() -> None:
    """Trees of specs, what ``jaxmem.shard`` returned, and specs of NNX variables."""
    over, state = mesh(), first_state()
    specs = {"params": P("data"), "opt_state": None}
    fitted = fit(step, mesh=over, shard=specs)
    after, _ = fitted(state, X)
    assert after["params"][0]["down"].sharding == NamedSharding(over, P("data"))
    assert after["opt_state"][0].mu[0]["up"].sharding == NamedSharding(over, P())
    with nnx.use_eager_sharding(False):
        model = nnx.Linear(
            WIDTH,
            WIDTH,
            rngs=nnx.Rngs(0),
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data")),
        )
    found = jaxmem.shard(model, over)

    def descend(model, x):
        value, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda a, g: a - g, nnx.state(model), grads))
        return value

    graphdef, values = nnx.split(model)
    for rule in (None, (), found):
        ours = nnx.merge(graphdef, jax.tree.map(jnp.copy, values))
        theirs = nnx.merge(graphdef, jax.tree.map(jnp.copy, values))
        fitted = fit(descend, mesh=over, shard=rule)
        for _ in range(2):
            assert_same(nnx.jit(descend)(theirs, X), fitted(ours, X))
        assert ours.kernel[...].sharding == NamedSharding(over, P(None, "data"))
        assert_same(nnx.to_pure_dict(nnx.state(theirs)), nnx.to_pure_dict(nnx.state(ours)))


def told_how_to_split() -> None:
    """Where the compiler is told how to split products, results are those of one device.

    Followed, a plan that says so compiles to the same.
    """
    args = (embedded_nets.shapes(), embedded_nets.tokens())
    options = {"mesh": mesh(), "shard": "zero3"}
    written = fit(embedded_nets.step, **options).plan(*args)
    for more in ({"verify": "full"}, {"budget": int(0.8 * written.compiled_bytes)}):
        fitted = fit(embedded_nets.step, **options, **more)
        params, expected = embedded_nets.params(), embedded_nets.params()
        for _ in range(2):
            params, value = fitted(params, args[1])
            expected, expected_value = jax.jit(embedded_nets.step)(expected, args[1])
            assert_same((expected, expected_value), (params, value))
        assert fitted.plan(*args).pinned
        assert len(fitted._outcomes) == 1
    followed = fit(embedded_nets.step, plan=written, **options).plan(*args)
    assert followed.compiled_bytes == written.compiled_bytes


def plans_again() -> None:
    """A plan is for its mesh and its rules, on devices that are there or not."""
    import tempfile

    state, options = first_state(), {"mesh": mesh(), "shard": "zero1"}
    plan = fit(step, **options).plan(state, X)
    path = Path(tempfile.mkdtemp()) / "plan.json"
    plan.save(path)
    plan = jaxmem.Plan.load(path)
    assert_same(jax.jit(step)(first_state(), X), fit(step, plan=plan, **options)(first_state(), X))
    for other, said in (
        ({"mesh": mesh(data=4, model=2)}, "for a mesh of data=8, and here it is data=4, model=2"),
        ({"shard": "zero3"}, "here it is split over"),
        ({"mesh": None, "shard": None}, "and here there is none"),
    ):
        try:
            fit(step, plan=plan, **{**options, **other}).plan(state, X)
        except jaxmem.errors.PlanMismatchError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"a plan for {options} was followed with {other}")


def repeated_calls_go_straight() -> None:
    """Batches of NumPy and states that came back take no more Python than without a mesh."""
    fitted = fit(step, mesh=mesh(), shard="zero3")
    state, _ = fitted(first_state(), X)
    for _ in range(2):
        state, _ = fitted(state, X)
    given = fitted._repeats.given((state, X), {})
    assert fitted._repeats.find(given) is not None


def other_uses() -> None:
    """Timed, verified in full, accumulated, and on a mesh of some of the devices."""
    state = first_state()
    options = {"mesh": mesh(), "shard": "zero3"}
    budget = small_budget(step, state, X, **options)
    measured = fit(step, budget=budget, measure=True, **options)
    assert measured.plan(state, X).measured_seconds is not None
    expected = jax.jit(step)(first_state(), X)
    assert_same(expected, measured(state, X))
    assert_same(expected, fit(step, verify="full", budget=budget, **options)(first_state(), X))
    few = Mesh(np.array(jax.devices()[2:4]), ("data",), axis_types=(AxisType.Auto,))
    three_steps("zero3", few)
    three_steps("zero3", Mesh(np.array(jax.devices()[5:6]), ("data",), axis_types=(AxisType.Auto,)))


def wrong_uses() -> None:
    state, over = first_state(), mesh()
    elsewhere = jax.device_put(first_state(), jax.devices()[7])
    few = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    cases = [
        (few, "zero3", elsewhere, X, "count of step is on cpu:7, which is not in"),
        (over, "zero3", state, X[:30], "30 rows do not divide by 8. Give it 32 rows or 24"),
        (over, "zero3", state, X[:5], "5 rows do not divide by 8. Give it 8 rows;"),
        (over, {"*nothing*": "zero3"}, state, X, "'*nothing*' matches no leaf"),
        (over, {"*up*": P("model")}, state, X, "the mesh has no axis 'model'; it has data=8"),
        (over, {"*count": P("data")}, state, X, "has 1 entries for 0 dimensions"),
        (over, {"params": P("x")}, state, X, "matches no leaf"),
        (mesh(a=4, b=2), "zero3", state, X, 'call one "data" or "fsdp"'),
        (over, jaxmem.shard(state["params"], over, "zero3"), state, X, "was made of another state"),
    ]
    for where, rule, given, batch, said in cases:
        try:
            fit(step, mesh=where, shard=rule).plan(given, batch)
        except jaxmem.errors.ShardingError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"nothing was said of {said}")


CHECKS = {
    "told how to split": told_how_to_split,
    "named rules": named_rules,
    "tensor parallel": tensor_parallel,
    "axis types": axis_types,
    "explicit axes": explicit_axes,
    "scanned": lambda: problem("transformer_scan", "zero3", mesh()),
    "unrolled": lambda: problem("transformer_unrolled", [TENSOR, "zero3"], mesh(data=4, model=2)),
    "linen": lambda: problem("transformer_linen", "zero1", mesh()),
    "nnx": lambda: problem("unet_nnx", "zero3", mesh()),
    "bytes of the compiler": bytes_of_the_compiler,
    "placing": placing,
    "donated once": donated_once,
    "without rules": without_rules,
    "specs and metadata": specs_and_metadata,
    "plans again": plans_again,
    "repeated calls": repeated_calls_go_straight,
    "other uses": other_uses,
    "wrong uses": wrong_uses,
}


def run(checks: dict[str, Any]) -> None:
    """Run those that are named on the command line, or all."""
    for name, check in checks.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        started = time.perf_counter()
        try:
            check()
        except Exception:
            traceback.print_exc()
        else:
            print(name, flush=True)
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    run(CHECKS)
