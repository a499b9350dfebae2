"""Stacked leaves are updated in the loop that makes their gradients, a row in each turn."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.errors import BudgetInfeasibleError
from jaxmem.program.calling import Caller
from jaxmem.program.cut import cut
from jaxmem.program.joining import joinable
from jaxmem.rewrite.fetching import fetching_ahead
from jaxmem.rewrite.staged import staged
from jaxmem.runtime import guard, line, parts, room, streamed
from tests.scanned_nets import (
    LAYERS,
    WIDTH,
    X,
    backwards,
    checkpointed,
    inside_out,
    layer,
    params_of,
    plain,
    with_rows_of_both,
)
from tests.streamed_steps import MIB, failing, fitted, kinds, same, step_of

ROW = WIDTH * WIDTH * 4
ADAM = optax.adam(1e-2, eps=1e-3)


def without_products(params, x):
    """Nothing in a turn that would tell where its middle is."""

    def scaled(x, w):
        return x * jnp.cos(w["in"][:8]) + jnp.sin(w["out"][:8]) + w["bias"], None

    return (jax.lax.scan(scaled, x, params)[0] ** 2).mean()


def cast_before(params, x):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    return plain(half, x.astype(jnp.bfloat16)).astype(jnp.float32)


def cast_within(params, x):
    def halved(x, w):
        return layer(x, jax.tree.map(lambda a: a.astype(jnp.bfloat16), w))

    x = x.astype(jnp.bfloat16)
    return (jax.lax.scan(halved, x, params)[0].astype(jnp.float32) ** 2).mean()


def checkpointed_inside(params, x):
    """A layer of two parts, each of which is made again, in a layer that is, too."""

    def part(x, w):
        return x + jnp.tanh(x @ w)

    def both(x, w):
        x = jax.checkpoint(part)(x, w["in"])
        return jax.checkpoint(part)(x, w["out"]) + w["bias"], None

    return (jax.lax.scan(jax.checkpoint(both), x, params)[0] ** 2).mean()


def with_keys(params, x):
    """What is costly in a turn ends with a key: nothing to compute with."""

    @jax.custom_vjp
    def drawn(x, w):
        return x @ w

    def forward(x, w):
        return drawn(x, w), (x, w)

    def backward(kept, g):
        x, w = kept

        def again(carry, _):
            g, key = carry
            return (g @ w, jax.random.split(key)[0]), None

        (made, _), _ = jax.lax.scan(again, (g, jax.random.key(0)), None, length=1)
        return made * 0.5 + g @ w.T, x.T @ g

    drawn.defvjp(forward, backward)

    def layer(x, w):
        return x + jnp.tanh(drawn(x, w["in"])) @ w["out"] + w["bias"], None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


def states_of(tx, layers=LAYERS):
    params = params_of(layers)
    return params, tx.init(params)


@pytest.fixture(autouse=True)
def in_small_buckets(monkeypatch):
    monkeypatch.setattr(streamed, "_BUCKET_BYTES", 2 * MIB)
    monkeypatch.setattr(room, "_WINDOW_BYTES", 8 * MIB)


@pytest.fixture
def gaining(monkeypatch):
    """Nets of this size compute too little to hide a copy: on paper they do."""
    monkeypatch.setattr(line.Inside, "taken", lambda self, computing, link: computing)


NETS = (
    *(plain, backwards, checkpointed, without_products, with_rows_of_both),
    *(cast_before, cast_within, inside_out, checkpointed_inside, with_keys),
)
# Of each: the net, the optimizer, and how many leaves are updated in the loop if all may wait on
# the host, and if the moments may.
STEPS: dict = {net.__name__: (net, ADAM, 6, 4) for net in NETS}
# Where nothing is multiplied it is an update itself.
STEPS["without_products"] = (without_products, ADAM, None, 4)
STEPS["decayed"] = (plain, optax.adamw(1e-2, eps=1e-3, weight_decay=0.1), 6, 4)
STEPS["descent"] = (plain, optax.sgd(1e-2), 2, None)
STEPS["momentum"] = (plain, optax.sgd(1e-2, momentum=0.9), 4, 2)
STEPS["lion"] = (plain, optax.lion(1e-3), 4, 2)
STEPS["scheduled"] = (plain, optax.adam(optax.cosine_decay_schedule(1e-2, 9), eps=1e-3), 6, 4)
STEPS["averaged"] = (plain, optax.chain(ADAM, optax.ema(0.9)), 8, 6)
STEPS["halves"] = (plain, optax.adam(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16), 6, 4)
# All gradients decide about each update, so none may start before the last is made (test_kept.py).
STEPS["clipped"] = (plain, optax.chain(optax.clip_by_global_norm(0.1), ADAM), 0, None)
# The norm of a leaf is of all its rows.
STEPS["lamb"] = (plain, optax.lamb(1e-2, eps=1e-3), 0, None)
QUICK = ("plain", "with_rows_of_both")
WIDE = ("backwards", "clipped", "cast_within", "checkpointed_inside")
CASES = [
    pytest.param(
        name,
        host,
        marks=()
        if (name, host) in (("plain", "*"), ("with_rows_of_both", "state[1]*"))
        else (pytest.mark.wide if name in (*QUICK, *WIDE) else pytest.mark.slow),
    )
    for name in STEPS
    for host, along in zip(("*", "state[1]*"), STEPS[name][2:], strict=True)
    if along is not None
]


@pytest.mark.parametrize(("name", "host"), CASES)
def test_steps_are_those_of_jit(name: str, host: str, gaining):
    """Parameters, moments and losses, and each array where it was."""
    net, tx, of_all, of_moments = STEPS[name]
    step, state = step_of(net, tx), states_of(tx)
    run = fitted(step, host=host, budget=60 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.along == (of_all if host == "*" else of_moments)
    assert plan.compiled_bytes <= 60 * MIB
    mine, theirs = run.place(jax.tree.map(jnp.copy, state), X)[0], state
    where = kinds(mine)
    for _ in range(3):
        mine, found = run(mine, X)
        theirs, expected = jax.jit(step)(theirs, X)
        same(found, expected, rtol=1e-4)
        assert kinds(mine) == where
    same(mine, theirs, rtol=0.2 if name == "halves" else 1e-2)


@pytest.mark.parametrize("layers", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 13))])
def test_loops_of_any_length(layers: int, gaining):
    step, state = step_of(plain, ADAM), states_of(ADAM, layers)
    run = fitted(step, host="*", budget=60 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.along == (6 if layers > 3 else 0), "one turn would be no loop"
    same(run(jax.tree.map(jnp.copy, state), X), jax.jit(step)(state, X), rtol=1e-4)


def test_gradients_are_what_others_need_too(gaining):
    """Their norm is a result: they are stacked for it, and the update goes along all the same."""

    def step(state, x):
        params, moments = state
        grads = jax.grad(plain)(params, x)
        updates, moments = ADAM.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), optax.tree.norm(grads)

    state = states_of(ADAM)
    run = fitted(step, host="*", budget=60 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.along == 6
    mine, theirs = jax.tree.map(jnp.copy, state), state
    for _ in range(2):
        mine, norm = run(mine, X)
        theirs, expected = jax.jit(step)(theirs, X)
        same(norm, expected, rtol=1e-4)
    same(mine, theirs, rtol=1e-2)


@pytest.mark.parametrize("along", [True, False])
def test_weights_that_their_update_only_writes_wait_as_well(along: bool, gaining, monkeypatch):
    """Made anew of masters, which are float32."""
    if not along:
        monkeypatch.setattr(streamed, "_joined", lambda *args, **options: None)
        monkeypatch.setattr(streamed, "_WHOLE_BYTES", 4 * MIB)

    def step(state, x):
        loss, grads = jax.value_and_grad(cast_within)(state["params"], x)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, moments = ADAM.update(grads, state["moments"])
        master = optax.apply_updates(state["master"], updates)
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
        return {"params": params, "master": master, "moments": moments}, loss

    params, moments = states_of(ADAM)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    state = {"params": half, "master": params, "moments": moments}
    run = fitted(step, host="*", budget=60 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.along == (8 if along else 0)
    assert plan.streamed.by_rows == (0 if along else 2)
    assert plan.streamed.sent_bytes == (2 + 3 * 4) * 2 * LAYERS * WIDTH**2
    mine, theirs = run.place(jax.tree.map(jnp.copy, state), X)[0], state
    for _ in range(3):
        mine, found = run(mine, X)
        theirs, expected = jax.jit(step)(theirs, X)
        same(found, expected, rtol=1e-2)
    same(mine["master"], theirs["master"], rtol=0.1)
    same(mine["params"], jax.tree.map(lambda w: w.astype(jnp.bfloat16), mine["master"]), rtol=0)


@pytest.mark.wide
def test_what_is_beside_a_scan_is_updated_after_it(gaining):
    """An embedding before and a head after it, and a second scan."""

    def net(params, x):
        x = x @ params["before"]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        x, _ = jax.lax.scan(layer, x, params["more"])
        return ((x @ params["after"]) ** 2).mean()

    square = jax.random.normal(jax.random.key(5), (2, WIDTH, WIDTH)) * 0.05
    params = {"before": square[0], "layers": params_of(), "more": params_of(4), "after": square[1]}
    step, state = step_of(net, ADAM), (params, ADAM.init(params))
    run = fitted(step, host="*", budget=70 * MIB)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.along == 12
    assert plan.streamed.updates > 0
    mine, theirs = jax.tree.map(jnp.copy, state), state
    for _ in range(2):
        mine, found = run(mine, X)
        theirs, expected = jax.jit(step)(theirs, X)
        same(found, expected, rtol=1e-4)
    same(mine, theirs, rtol=1e-2)


@pytest.mark.wide
def test_a_budget_that_gradients_alone_would_exceed():
    """Of 24 layers no stack of gradients is ever whole, whatever is quicker on paper."""
    step, state = step_of(plain, ADAM), states_of(ADAM, 24)
    budget = 40 * MIB
    assert budget < 2 * 24 * ROW, "the gradients"
    run = fitted(step, host="*", budget=budget)
    plan = run.plan(state, X)
    assert plan.streamed is not None
    assert plan.streamed.along == 6
    assert plan.compiled_bytes <= budget
    assert plan.streamed.fetched_bytes == (6 + 2) * 24 * ROW, "weights twice"
    assert plan.streamed.sent_bytes == 6 * 24 * ROW
    assert "updated 6 in the loops that make their gradients" in " ".join(plan.explain().sentences)
    same(run(jax.tree.map(jnp.copy, state), X), jax.jit(step)(state, X), rtol=1e-4)


def test_nothing_goes_along_where_that_is_no_quicker():
    """The copies of so small a net have nothing to hide behind."""
    plan = fitted(step_of(plain, ADAM), budget=60 * MIB).plan(states_of(ADAM), X)
    assert plan.streamed is not None
    assert plan.streamed.along == 0


@pytest.mark.wide
def test_a_smallest_budget_is_named_that_works():
    step, state = step_of(plain, ADAM), states_of(ADAM, 24)
    with pytest.raises(BudgetInfeasibleError) as error:
        fitted(step, host="*", budget=12 * MIB).plan(state, X)
    enough = error.value.smallest_bytes
    assert fitted(step, host="*", budget=enough).plan(state, X).compiled_bytes <= enough


@pytest.mark.parametrize("net", [plain, pytest.param(checkpointed, marks=pytest.mark.wide)])
def test_copies_go_both_ways_beside_what_a_turn_computes(net, gaining, monkeypatch):
    """Read in the program for an absent GPU.

    No leaf is copied in host memory, every copy is one of rows at the loop's counter, and products
    stand between the start and the end of each.
    """
    found, real = [], parts._compiled

    def kept(part, target, options):
        compiled = real(part, target, options)
        if part.chunks is not None and part.chunks.beside is not None:
            found.append(compiled)
        return compiled

    monkeypatch.setattr(parts, "_compiled", kept)
    x = jnp.zeros((4096, WIDTH))
    fitted(step_of(net, ADAM), host="*", budget=200 * MIB).plan(states_of(ADAM), x)
    compiled = found[-1]
    assert compiled.memory.host_temp_bytes == 0
    assert compiled.memory.host_argument_bytes == 6 * LAYERS * ROW
    assert compiled.memory.host_output_bytes == 6 * LAYERS * ROW
    text = compiled.hlo_text()
    (body,) = [
        part.splitlines()
        for part in text.split("\n\n")
        if "-slice-start" in part and not part.lstrip().startswith("ENTRY")
    ]

    def lines(pattern):
        return [n for n, line in enumerate(body) if re.search(rf"%{pattern}\S* = ", line)]

    fetched, written = lines("dynamic-slice-start"), lines("dynamic-update-slice-start")
    products = lines(r"\S*(gemm|dot|cublas)")
    assert len(fetched) == len(written) == 6
    for starts, ends in (
        (fetched, lines("dynamic-slice-done")),
        (written, lines("dynamic-update-slice-done")),
    ):
        assert starts[0] < products[0]
        assert products[-1] < ends[-1]
        assert any(starts[0] < n < ends[0] for n in products)
    called = {m for n in (*fetched, *written) for m in re.findall(r"calls=(%\S+),", body[n])}
    wrapped = [part for part in text.split("\n\n") if part.split(" ")[0].strip() in called]
    assert len(wrapped) == 12
    assert all('"loop_index"' in part for part in wrapped)


def test_a_jaxlib_that_gets_rows_wrong_updates_afterwards(gaining, monkeypatch):
    monkeypatch.setattr(guard, "against_rows", lambda target: "jaxlib 0.0 gets them wrong")
    plan = fitted(step_of(plain, ADAM), budget=80 * MIB).plan(states_of(ADAM), X)
    assert plan.streamed is not None
    assert plan.streamed.along == 0


def test_a_plan_says_why_updates_come_after_the_loop(gaining, monkeypatch):
    real = streamed.lending

    def lending(*args, joining=False, **options):
        return (None, 0) if joining else real(*args, **options)

    monkeypatch.setattr(streamed, "lending", lending)
    plan = fitted(step_of(plain, ADAM), budget=80 * MIB).plan(states_of(ADAM), X)
    assert plan.streamed is not None
    assert plan.streamed.along == 0
    assert "after the loops that make their gradients: in them they do" in " ".join(plan.notes)


@pytest.mark.parametrize(
    ("pinned", "advice"),
    [(40 * MIB, r"pinned_host_bytes=\d+"), (2**40, "allow more with host_budget=")],
)
def test_too_little_host_memory_is_told_with_what_helps(pinned: int, advice: str):
    target = jaxmem.Target("h200", host_bytes=2**30, pinned_host_bytes=pinned)
    run = fitted(step_of(plain, ADAM), target=target, host_budget=30 * MIB)
    with pytest.raises(jaxmem.BudgetError, match=advice):
        run.plan(states_of(ADAM, 12), X)


@pytest.mark.wide
def test_a_saved_plan_is_followed(tmp_path, gaining, monkeypatch):
    step, state = step_of(plain, ADAM), states_of(ADAM)
    plan = fitted(step, host="*", budget=60 * MIB).plan(state, X)
    plan.save(tmp_path / "plan.json")
    monkeypatch.undo()
    again = jaxmem.Plan.load(tmp_path / "plan.json")
    assert again.streamed is not None and again.streamed.along == 6
    run = jaxmem.fit(step, plan=again, target="h200", donate_argnums=0, progress=False)
    assert run.plan(state, X).streamed == plan.streamed
    same(run(jax.tree.map(jnp.copy, state), X), jax.jit(step)(state, X), rtol=1e-4)


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_a_loop_that_fails_is_run_again(times: int, gaining, monkeypatch):
    step, state = step_of(plain, ADAM), states_of(ADAM)
    run = fitted(step, host="*", budget=60 * MIB)
    expected = run(jax.tree.map(jnp.copy, state), X)

    given = run.place(jax.tree.map(jnp.copy, state), X)[0]
    found = failing(run, (given, X), times, "a stage of the gradients", monkeypatch)
    same(found, expected, rtol=0)


def test_on_paper_a_loop_takes_what_it_computes_and_copies_at_least():
    """And no more than both one after the other, with the rows at its ends."""
    caller = Caller(step_of(plain, ADAM), (0,))
    state = states_of(ADAM)
    program = caller.trace(caller.take((state, X), {})).program
    leaves = [n for n, v in enumerate(program.block.inputs) if v.nbytes == LAYERS * ROW]
    pieces = cut(program, leaves, 2 * MIB, 2 * MIB)
    block, _ = fetching_ahead(pieces.first.block, pieces.lent)
    (at,) = joinable(block, pieces.first.block.outputs, pieces.parts)
    made = staged(pieces, block, [0, at, at + 1], pieces.lent, joining=True)
    (part,) = (part for part in made.cut.parts if part.along)
    inside = line.Inside(part, [one for one in pieces.parts if one.chunks])
    assert part.moved_bytes == (6 * LAYERS * ROW, 6 * LAYERS * ROW)
    copied = 6 * LAYERS * ROW / 1e9
    ends = 12 * ROW / 1e9
    assert inside.copying(1e9) == pytest.approx(copied)
    for computing in (0.0, copied / 3, copied, 10 * copied):
        taken = inside.taken(computing, 1e9)
        assert max(computing, copied) <= taken <= computing + copied + ends
    assert inside.taken(1.0, 1e30) == pytest.approx(1.0)
