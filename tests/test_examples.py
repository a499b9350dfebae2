"""The example trains on real text, and notices a broken budget or a wrong loss."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.planner.plan import Plan

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module", autouse=True)
def examples_on_path():
    """Modules are found as they are when an example runs as a script."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def gpt():
    return importlib.import_module("models.gpt")


@pytest.fixture(scope="module")
def train_gpt():
    return importlib.import_module("train_gpt")


def tiny(gpt, **changes):
    return gpt.GPTConfig(
        **{"vocab_size": 61, "layers": 3, "heads": 2, "d_model": 16, "sequence": 12, **changes}
    )


def random_tokens(config, seed=0):
    return jax.random.randint(jax.random.key(seed), (2, config.sequence), 0, config.vocab_size)


@nnx.jit
def forward(model, tokens):
    return model(tokens)


def make(gpt, config, seed=0):
    return nnx.jit(lambda: gpt.GPT(config, rngs=nnx.Rngs(seed)))()


def test_parameter_count_is_the_textbook_one(gpt):
    config = tiny(gpt)
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    d_model, layers = config.d_model, config.layers
    weights = layers * 12 * d_model**2 + (config.vocab_size + config.sequence) * d_model
    norms = (2 * layers + 1) * d_model
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == weights + norms


def test_a_token_sees_only_what_came_before(gpt):
    config = tiny(gpt)
    model = make(gpt, config)
    tokens = random_tokens(config)
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % config.vocab_size)
    before, after = forward(model, tokens), forward(model, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7:] - after[:, 7:]).max(axis=(0, 2)).min() > 1e-6


def test_scanned_and_unrolled_blocks_are_the_same_function(gpt):
    unrolled = make(gpt, tiny(gpt))
    scanned = make(gpt, tiny(gpt, scan_layers=True), seed=1)
    blocks = [nnx.state(block) for block in unrolled.blocks]
    nnx.update(scanned.blocks, jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks))
    for part in ("tokens", "positions", "norm"):
        nnx.update(getattr(scanned, part), nnx.state(getattr(unrolled, part)))
    tokens = random_tokens(unrolled.config)
    np.testing.assert_allclose(
        forward(scanned, tokens),
        forward(unrolled, tokens),
        rtol=0,
        atol=32 * float(jnp.finfo(jnp.float32).eps),
    )


@pytest.mark.parametrize("scan_layers", [False, True])
def test_useful_values_have_names_for_policies(gpt, scan_layers):
    config = tiny(gpt, scan_layers=scan_layers)
    graph, state = nnx.split(gpt.GPT(config, rngs=nnx.Rngs(0)))
    text = str(jax.make_jaxpr(lambda s, t: nnx.merge(graph, s)(t))(state, random_tokens(config)))
    per_program = 1 if scan_layers else config.layers
    for name in ("block_in", "block_mid", "qkv", "attention", "mlp_up"):
        assert text.count(f"name[name={name}]") == per_program, name
    assert text.count("name[name=logits]") == 1


@pytest.mark.parametrize("scan_layers", [False, True])
def test_dropout_draws_new_numbers_in_training_and_none_in_evaluation(gpt, scan_layers):
    config = tiny(gpt, dropout=0.5, scan_layers=scan_layers)
    model = make(gpt, config)
    tokens = random_tokens(config)
    assert np.abs(forward(model, tokens) - forward(model, tokens)).max() > 1e-4
    model.eval()
    np.testing.assert_array_equal(forward(model, tokens), forward(model, tokens))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_computes_in_the_dtype_asked_for(gpt, scan_layers):
    config = tiny(gpt, dtype=jnp.bfloat16, scan_layers=scan_layers)
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    logits = nnx.eval_shape(lambda model, tokens: model(tokens), model, random_tokens(config))
    assert logits.shape == (2, config.sequence, config.vocab_size)
    assert logits.dtype == jnp.bfloat16


@pytest.mark.parametrize("scan_layers", [False, True])
def test_it_learns_a_repeating_text(gpt, scan_layers):
    config = tiny(gpt, scan_layers=scan_layers)
    model = make(gpt, config)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    tokens = jnp.tile(jnp.arange(4), 4)[: config.sequence + 1][None]

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss_fn(model):
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer, tokens)) for _ in range(40)]
    assert losses[0] == pytest.approx(np.log(config.vocab_size), rel=0.05)
    assert losses[-1] < 0.1


def run_with(train_gpt, name="25%", losses=(5.5, 4.5, 3.5, 2.5), budget_bytes=1000, needs=1000):
    return train_gpt.Run(
        name=name,
        budget_bytes=budget_bytes,
        predicted_bytes=990,
        compiled_bytes=needs,
        recomputed=3,
        rounds=2,
        plan_seconds=1.0,
        losses=list(losses),
        seconds=[0.1] * len(losses),
    )


def test_no_problem_where_budgets_are_kept_and_losses_are_equal(train_gpt):
    keep_all = run_with(train_gpt, "keep-all", budget_bytes=None, needs=4000)
    rounding = [loss * (1 + 0.5 * train_gpt.LOSS_TOLERANCE) for loss in keep_all.losses]
    runs = [keep_all, run_with(train_gpt), run_with(train_gpt, losses=rounding)]
    assert train_gpt.problems(keep_all, runs) == []


def test_one_byte_over_the_budget_is_a_problem(train_gpt):
    keep_all = run_with(train_gpt, "keep-all", budget_bytes=None, needs=4000)
    runs = [keep_all, run_with(train_gpt, "60%"), run_with(train_gpt, needs=1001)]
    assert train_gpt.problems(keep_all, runs) == ["25%: needs 1001 bytes, budget 1000"]


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("factor", [1 + 1e-5, 1 - 1e-5, float("nan"), float("inf")])
def test_one_wrong_loss_at_any_step_is_a_problem(train_gpt, step, factor):
    keep_all = run_with(train_gpt, "keep-all", budget_bytes=None, needs=4000)
    losses = list(keep_all.losses)
    losses[step] *= factor
    found = train_gpt.problems(keep_all, [keep_all, run_with(train_gpt, losses=losses)])
    assert len(found) == 1
    assert "25%: losses differ" in found[0]


def test_learning_nothing_is_a_problem(train_gpt):
    keep_all = run_with(train_gpt, "keep-all", losses=(5.5, 5.4, 5.5), budget_bytes=None)
    assert train_gpt.problems(keep_all, [keep_all]) == [
        "keep-all: nothing was learned, loss 5.5 to 5.5"
    ]


def test_batches_are_real_text_and_the_same_every_time(train_gpt, gpt):
    config = gpt.GPTConfig(sequence=200)
    first, again = (list(train_gpt.batches(config, 4, 3)) for _ in range(2))
    assert [batch.shape for batch in first] == [(4, 201)] * 3
    np.testing.assert_array_equal(jnp.stack(first), jnp.stack(again))
    assert not np.array_equal(first[0], first[1])
    text = bytes(np.asarray(jnp.stack(first)).astype(np.uint8).ravel()).decode(errors="replace")
    assert " the " in text


def claimed_plan(budget_bytes):
    """A plan that says it fits, and that keep-all does not."""
    return Plan(
        function="train_step",
        target="claimed",
        budget_bytes=budget_bytes,
        predicted_bytes=budget_bytes,
        compiled_bytes=budget_bytes,
        argument_bytes=0,
        output_bytes=0,
        aliased_bytes=0,
        keep_all_predicted_bytes=2 * budget_bytes,
        keep_all_compiled_bytes=2 * budget_bytes,
        predicted_seconds=1.0,
        keep_all_seconds=1.0,
        decisions=(),
        solver="claimed",
        rounds=(),
        fingerprint="",
    )


class IgnoresBudget:
    """What ``jaxmem.fit`` would return if it ran everything as written and claimed it fits."""

    def __init__(self, fun, *, budget, target, donate_argnums):
        self.fun = nnx.jit(fun, donate_argnums=donate_argnums)
        self.budget_bytes = 10**9 if budget is None or target is not None else budget

    def __call__(self, *args):
        return self.fun(*args)

    def lower(self, *args):
        return self.fun.lower(*args)

    def plan(self, *args):
        return claimed_plan(self.budget_bytes)


def test_a_planner_that_ignores_the_budget_fails_the_example(
    train_gpt, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(jaxmem, "fit", IgnoresBudget)
    monkeypatch.setattr(train_gpt, "FRACTIONS", (0.9,))
    results = tmp_path / "results.json"
    assert train_gpt.main(["--quick", "--steps", "3", "--json", str(results)]) == 1
    found = json.loads(results.read_text())["problems"]
    assert [problem.split(":")[0] for problem in found] == ["90%"]
    assert "bytes, budget" in found[0]
    assert "Every budget was kept" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def quick_results(train_gpt, tmp_path_factory):
    """Exit code and JSON of the real example, quick, without its middle budget."""
    results = tmp_path_factory.mktemp("example") / "results.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_gpt, "FRACTIONS", (train_gpt.FRACTIONS[0], train_gpt.FRACTIONS[-1]))
        code = train_gpt.main(["--quick", "--json", str(results)])
    return code, json.loads(results.read_text())


@pytest.mark.slow
def test_quick_example_keeps_every_budget_and_every_loss(train_gpt, quick_results):
    code, results = quick_results
    assert results["problems"] == []
    assert code == 0
    keep_all, *inside = results["runs"]
    assert train_gpt.FRACTIONS == (0.6, 0.4, 0.25), "`make demo` runs all of them"
    assert [run["name"] for run in inside] == ["60%", "25%"]
    for run, fraction in zip(inside, (0.6, 0.25), strict=True):
        assert run["budget_bytes"] == int(fraction * keep_all["compiled_bytes"])
        # The budget is kept, and not by giving away much of it.
        assert 0.6 * run["budget_bytes"] < run["compiled_bytes"] <= run["budget_bytes"]
        assert run["predicted_bytes"] == pytest.approx(run["compiled_bytes"], rel=0.1)
        assert len(run["losses"]) == len(keep_all["losses"]) == train_gpt.QUICK.steps


@pytest.mark.slow
def test_quick_example_plans_for_an_h100_that_is_not_there(quick_results):
    plan = quick_results[1]["absent_gpu"]
    assert plan["compiled_bytes"] <= plan["budget_bytes"] < plan["keep_all_compiled_bytes"]
    assert plan["predicted_bytes"] == pytest.approx(plan["compiled_bytes"], rel=0.1)
    assert 14 * 2**30 < plan["argument_bytes"] < 16 * 2**30  # 1.3e9 x 12 bytes


@pytest.mark.wide
def test_a_step_that_trains_slightly_wrong_fails_the_example(train_gpt, monkeypatch, tmp_path):
    """A fitted step whose parameters come out one part in a thousand off at a budget.

    The budget is one that it fits as it is written, so that nothing is searched.
    """
    fit = jaxmem.fit

    def wrong_inside_a_budget(fun, *, budget, **options):
        def wrong(model, optimizer, tokens):
            loss = fun(model, optimizer, tokens)
            nnx.update(model, jax.tree.map(lambda x: x * 1.001, nnx.state(model, nnx.Param)))
            return loss

        return fit(fun if budget is None else wrong, budget=budget, **options)

    monkeypatch.setattr(jaxmem, "fit", wrong_inside_a_budget)
    monkeypatch.setattr(train_gpt, "FRACTIONS", (2.0,))
    monkeypatch.setattr(train_gpt, "plan_for_absent_gpu", lambda *sizes: claimed_plan(1000))
    results = tmp_path / "results.json"
    assert train_gpt.main(["--quick", "--json", str(results)]) == 1
    found = json.loads(results.read_text())["problems"]
    assert len(found) == 1
    assert found[0].startswith("200%: losses differ from keep-all's by ")


@pytest.mark.parametrize(
    "error",
    [
        jaxmem.BudgetInfeasibleError("no plan fits", budget_bytes=7, smallest_bytes=9),
        jaxmem.MissingPluginError("install it: pip install [what] is missing"),
    ],
)
def test_an_error_of_jaxmem_is_one_clean_message(train_gpt, monkeypatch, capsys, error):
    def refuse(*sizes):
        raise error

    monkeypatch.setattr(train_gpt, "train_inside_budgets", refuse)
    assert train_gpt.main(["--quick"]) == 1
    assert capsys.readouterr().out == f"{type(error).__name__}: {error}\n"


def test_one_step_cannot_be_timed(train_gpt, capsys):
    with pytest.raises(SystemExit) as exit_code:
        train_gpt.main(["--quick", "--steps", "1"])
    assert exit_code.value.code == 2
    assert "--steps must be at least 2" in capsys.readouterr().err
