"""Bytes over a mesh as the compiler of absent GPUs has them: in host memory, and in a budget."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jaxmem
from jaxmem.runtime import compiler
from jaxmem.runtime.overlaps import ALONE, OVERLAPPING, Overlaps
from jaxmem.runtime.tries import MOST_COMPILES
from jaxmem.targets import options as xla_options

WIDTH, LAYERS, ROWS = 1024, 4, 8192
# Slow arithmetic: what is made again costs more than a copy.
SLOW = {"float32": 1e12, "bfloat16": 1e12}
TX = optax.adam(1e-3)


def step(state, x):
    def loss(params):
        y = x
        for w in params:
            y = y + jnp.tanh(y @ w["up"]) @ w["down"]
        return (y**2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = TX.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def shapes():
    sides = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    layer = {name: jax.ShapeDtypeStruct(side, jnp.float32) for name, side in sides.items()}
    params = [dict(layer) for _ in range(LAYERS)]
    state = {"params": params, "opt": jax.eval_shape(TX.init, params)}
    return state, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def fitted(**options):
    target = dataclasses.replace(jaxmem.Target("2xh200"), flops=SLOW)
    settings = {"mesh": AbstractMesh((2,), ("data",)), "shard": "zero3", "target": target}
    return jaxmem.fit(step, donate_argnums=0, progress=False, **{**settings, **options})


def host_bytes(run) -> int:
    memory = run.lower(*shapes()).compile().memory_analysis()
    return memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes


@pytest.fixture(scope="module")
def budget() -> int:
    return int(0.8 * fitted().plan(*shapes()).compiled_bytes)


@pytest.mark.parametrize("allowed", [24 * 2**20, "8GiB"])
def test_plans_use_what_is_allowed_for_each_device_and_no_more(budget, allowed):
    run = fitted(budget=budget, host_budget=allowed)
    plan = run.plan(*shapes())
    assert plan.compiled_bytes <= budget
    assert plan.host_bytes == host_bytes(run)
    if isinstance(allowed, int):
        assert plan.host_bytes <= allowed
    else:
        assert plan.host_bytes > 0


def test_what_fits_in_no_other_way_uses_host_memory_unasked():
    with pytest.raises(jaxmem.BudgetInfeasibleError) as without:
        fitted(budget="64MiB", host_budget=0).plan(*shapes())
    run = fitted(budget=without.value.smallest_bytes - 4 * 2**20)
    plan = run.plan(*shapes())
    assert plan.compiled_bytes < without.value.smallest_bytes
    assert plan.host_bytes == host_bytes(run) > 0


def test_more_than_each_devices_share_of_the_host_is_refused():
    """All devices of a process pin from the same memory."""
    target = dataclasses.replace(jaxmem.Target("2xh200"), host_bytes=2**30)
    with pytest.raises(jaxmem.BudgetError, match=r"each device's share of the host: 512.0MiB"):
        fitted(target=target, host_budget="600MiB").plan(*shapes())


def test_the_compiler_is_told_of_a_budget_and_puts_less_beside_collectives():
    """Tensor parallel: all-reduces in the backward pass, and work put off that could hide them."""
    rules = {"*up*": PartitionSpec(None, "model"), "*down*": PartitionSpec("model")}
    settings = {"mesh": AbstractMesh((2,), ("model",)), "shard": rules}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step: every device computes the whole batch")
        written = fitted(**settings).plan(*shapes())
        assert written.options == ()
        budget = int(0.9 * written.compiled_bytes)
        run = fitted(budget=budget, host_budget=0, **settings)
        plan = run.plan(*shapes())
        again = fitted(budget=budget, plan=plan, **settings).plan(*shapes())
    assert [name for name, _ in plan.options] == ["xla_gpu_memory_limit_slop_factor"]
    assert plan.compiled_bytes == again.compiled_bytes <= budget
    overlapped, in_order = plan.rounds[:2]
    assert overlapped.compiled_bytes == written.compiled_bytes > 1.05 * in_order.compiled_bytes
    # In its own order the program takes about what was predicted for both.
    assert overlapped.predicted_bytes == in_order.predicted_bytes
    assert 0.95 < in_order.predicted_bytes / in_order.compiled_bytes < 1.05


TENSOR = {
    "mesh": AbstractMesh((2,), ("model",)),
    "shard": {"*up*": PartitionSpec(None, "model"), "*down*": PartitionSpec("model")},
}


@pytest.fixture
def roomy(monkeypatch):
    """A device so large that the compiler puts what it likes beside collectives, if it may."""

    def within_room(target, room_bytes, fixed_bytes):
        return xla_options.within_room(target, 0, 0) if not room_bytes else {}

    monkeypatch.setattr(compiler, "within_room", within_room)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:step. every device computes the whole batch")
@pytest.mark.parametrize(
    ("share", "settings", "overlaps"),
    [(0.75, TENSOR, True), (0.8, {"shard": "zero1"}, False)],
    ids=["fits beside collectives, too", "nothing was tried alone"],
)
@pytest.mark.usefixtures("roomy")
def test_near_a_budget_nothing_runs_beside_collectives_until_a_program_is_chosen(
    share: float, settings: dict, overlaps: bool, monkeypatch
):
    budget = int(share * fitted(**settings).plan(*shapes()).compiled_bytes)
    if not overlaps:
        monkeypatch.setattr(compiler, "_ROOMY", 2.0)
    plan = fitted(budget=budget, host_budget=0, **settings).plan(*shapes())
    names = [r.name for r in plan.rounds]
    if overlaps:
        last = plan.rounds[-1]
        assert last.name == OVERLAPPING
        assert last.fits
        assert plan.compiled_bytes == last.compiled_bytes
    else:
        # What is over the budget beside collectives is compiled again without.
        first = names.index("search")
        assert names[first + 1] == f"search, {ALONE}"
        assert not plan.rounds[first].fits
        assert plan.rounds[first + 1].predicted_bytes == plan.rounds[first].predicted_bytes
    assert plan.compiled_bytes <= budget
    again = fitted(budget=budget, plan=plan, **settings).plan(*shapes())
    assert (again.options, again.compiled_bytes) == (plan.options, plan.compiled_bytes)


@pytest.fixture
def hungry(monkeypatch):
    """Overlaps take half as much again, which this step is too small for on a real device."""
    compile_one = compiler.Compiler.compile

    def compiled(self, solution, *, options=None):
        options = self.options(solution) if options is None else options
        found = compile_one(self, solution, options=options)
        if solution is None or options == self.least_options(solution):
            return found
        hungrier = replaced.get(id(found))
        if hungrier is None:
            temp_bytes = int(1.5 * found.memory.temp_bytes)
            memory = dataclasses.replace(found.memory, temp_bytes=temp_bytes)
            hungrier = dataclasses.replace(found, memory=memory)
            replaced[id(found)] = hungrier
            kept.append(found)
        return hungrier

    replaced, kept = {}, []
    monkeypatch.setattr(compiler.Compiler, "compile", compiled)
    monkeypatch.setattr(compiler.Compiler, "options_of", lambda self, compiled: {})


@pytest.mark.wide
@pytest.mark.usefixtures("hungry")
def test_more_than_an_error_names_is_enough_however_much_overlaps_take():
    with pytest.raises(jaxmem.BudgetInfeasibleError) as infeasible:
        fitted(budget="100MiB").plan(*shapes())
    smallest = infeasible.value.smallest_bytes
    for budget in (smallest, int(1.42 * smallest), int(1.45 * smallest)):
        plan = fitted(budget=budget).plan(*shapes())
        assert plan.compiled_bytes <= budget
        assert len(plan.rounds) <= MOST_COMPILES


@pytest.mark.wide
@pytest.mark.usefixtures("hungry")
def test_a_frontier_is_compiled_as_a_budget_would_have_it():
    """What takes more than was predicted because of overlaps is compiled without them, too."""
    curve = jaxmem.frontier(fitted(), *shapes(), points=2, compile=True)
    planned = [p for p in curve.points if p.solver != "keep-all" and not p.problem]
    assert planned
    assert all(p.compiled_bytes < 1.2 * p.peak_bytes for p in planned)


def copies_beside_products(text: str) -> int:
    """Of a compiled program's copies to and from the host, those during which it multiplies."""
    lines = text[text.index("\nENTRY") :].splitlines()
    started, found = {}, 0
    for n, line in enumerate(lines):
        name, _, made = line.strip().partition(" = ")
        if " copy-start(" in made and "S(5)" in made:
            started[name] = n
        elif " copy-done(" in made:
            start = started.pop(made.partition(" copy-done(")[2].partition(")")[0], n)
            found += any(" fusion(" in t and "dot" in t for t in lines[start:n])
    return found


def test_copies_hide_although_nothing_runs_beside_collectives(budget, monkeypatch):
    # Whether the program would fit with them, too, is another matter.
    monkeypatch.setattr(Overlaps, "overlap", lambda self: None)
    run = fitted(budget=budget * 9 // 10, host_budget="8GiB")
    plan = run.plan(*shapes())
    target = jaxmem.Target("2xh200")
    assert dict(plan.options) == xla_options.collectives_in_turn(target)
    lowered = run.lower(*shapes())
    text = lowered.compile().as_text()
    moved = text.count(" copy-start(")
    assert copies_beside_products(text) > moved / 2
    # Without room XLA starts no copy before it needs its end, either.
    late = lowered.compile(compiler_options=xla_options.within_room(target, 0, 0)).as_text()
    assert copies_beside_products(late) < moved / 4


def test_a_compiled_report_has_each_buffer_of_asynchronous_collectives_by_itself():
    """What starts a collective and what ends it have tables of their own for the same parts."""
    report = fitted(shard="zero1").report(*shapes())
    temporaries = [b for b in report.buffers if b.category in ("residual", "temporary")]
    assert any("reduce-scatter" in name for name in report.operations)
    rows = 4 * ROWS * 2 * WIDTH
    assert max(b.nbytes for b in temporaries) <= rows
    assert sum(b.nbytes for b in report.at_peak()) == report.peak_bytes
