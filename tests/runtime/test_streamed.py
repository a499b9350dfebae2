"""Steps of which argument leaves wait in host memory: planned for an H200, run here."""

from __future__ import annotations

import functools
import signal
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import StepInterruptedError
from jaxmem.program.ir import Value
from jaxmem.runtime import stream
from tests.streamed_steps import (
    LAYERS,
    MIB,
    OPTIMIZERS,
    WIDTH,
    X,
    fitted,
    in_small_buckets,
    kinds,
    on_device,
    same,
    state_with,
    step_with,
)

pytestmark = pytest.mark.default_code

ADAM = OPTIMIZERS["adam"]
# One of each kind of cut; tests/program/test_cut.py has all of them.
SOME = [
    *("adam", "clipped twice", "several", "muon"),
    *(
        pytest.param(name, marks=pytest.mark.wide)
        for name in ("adafactor", "noise", "only if finite")
    ),
]


@pytest.fixture(autouse=True, scope="module")
def small_buckets():
    with in_small_buckets(python_seconds=0.0):
        yield


@functools.cache
def adam():
    """A fitted step that several tests call; each with a state of its own."""
    return fitted(step_with(ADAM, norm=True))


@pytest.mark.parametrize("name", SOME)
def test_steps_are_those_of_jit(name: str):
    tx = OPTIMIZERS[name]
    step = step_with(tx)
    run, state, expected = fitted(step), state_with(tx), state_with(tx)
    state = run.place(state, X)[0]
    where = kinds(state)
    assert "pinned_host" in where
    for _ in range(3):
        state, loss = run(state, X)
        expected, reference = jax.jit(step)(expected, X)
        assert kinds(state) == where
        np.testing.assert_allclose(loss, reference, rtol=1e-5)
    same(state, expected)


def test_what_is_donated_is_gone_and_what_is_small_stays_on_the_device():
    run, state = adam(), state_with(ADAM)
    state = run.place(state, X)[0]
    plan = run.plan(state, X)
    new, _ = run(state, X)
    hosted = [a for a in jax.tree.leaves(state) if a.sharding.memory_kind == "pinned_host"]
    assert len(hosted) == len(plan.hosted) == 2 * LAYERS
    assert all(a.nbytes == MIB and a.is_deleted() for a in hosted)
    assert not any(a.is_deleted() for a in jax.tree.leaves(new))
    (note,) = [n for n in plan.notes if "stay on the device" in n]
    assert note.startswith("7 of the arguments that host= matches")


def test_a_state_on_the_device_is_taken_to_the_host_by_the_first_step():
    run, state = adam(), state_with(ADAM)
    expected = jax.jit(step_with(ADAM, norm=True))(state_with(ADAM), X)
    found = run(state, X)
    same(found, expected)
    same(run(found[0], X)[1], jax.jit(step_with(ADAM, norm=True))(expected[0], X)[1])


def test_the_plan_says_what_is_copied_and_what_is_not_hidden():
    plan = adam().plan(state_with(ADAM), X)
    assert plan.streamed.fetched_bytes == plan.streamed.sent_bytes == 2 * LAYERS * MIB
    assert plan.streamed.updates >= LAYERS
    assert plan.host_bytes >= 2 * LAYERS * MIB
    # Gradients are handed on from one program to others, and are no results of the step.
    assert plan.output_bytes == plan.aliased_bytes + 8 < plan.argument_bytes
    assert 0 < plan.exposed_seconds < plan.predicted_seconds
    shown = " ".join(str(plan).split())  # However wide the terminal is.
    assert "host" in shown and "6.0MiB each way" in shown
    (told,) = [said for said in plan.explain().sentences if "pieces" in said]
    assert "6.0MiB fetched and 6.0MiB sent back" in told


# --- budgets, stages, plans -------------------------------------------------------------------

ROWS = jnp.linspace(-1, 1, 2048 * WIDTH).reshape(2048, WIDTH)


class Deep:
    """A step of many layers that is fitted once; kept whole it takes 64 MiB beside its moments."""

    def __init__(self):
        self.step = step_with(ADAM)
        self.run = fitted(self.step)
        self.plan = self.run.plan(self.fresh(), ROWS)
        self.expected = jax.jit(self.step)(self.fresh(), ROWS)

    def fresh(self):
        return state_with(ADAM, layers=8)

    def placed(self):
        return self.run.place(self.fresh(), ROWS)[0]

    def check(self, found):
        np.testing.assert_allclose(found[1], self.expected[1], rtol=1e-5)
        same(found[0], self.expected[0], rtol=2e-3)


@pytest.fixture(scope="module")
def deep(small_buckets):
    return Deep()


def test_gradients_are_computed_in_stages_between_updates(deep):
    assert deep.plan.streamed.stages > 2 and deep.plan.streamed.updates > 2
    state, expected = deep.placed(), deep.fresh()
    for _ in range(2):
        state, _ = deep.run(state, ROWS)
        expected, _ = jax.jit(deep.step)(expected, ROWS)
    same(state, expected, rtol=2e-3)


@pytest.mark.wide
def test_a_smaller_budget_is_kept_by_every_program(deep, tmp_path):
    run = fitted(deep.step, budget=int(deep.plan.compiled_bytes * 0.6))
    plan = run.plan(deep.fresh(), ROWS)
    assert plan.compiled_bytes <= plan.budget_bytes
    assert plan.recomputed()
    check_line(run)
    deep.check(run(deep.placed(), ROWS))
    # The same plan from a file, without a search; and for another program it is refused.
    plan.save(tmp_path / "plan.json")
    loaded = jaxmem.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    again = fitted(deep.step, host=None, plan=loaded, budget=plan.budget_bytes)
    found = again.plan(deep.fresh(), ROWS)
    assert (found.kept, found.hosted, found.streamed) == (plan.kept, plan.hosted, plan.streamed)
    with pytest.raises(jaxmem.PlanMismatchError):
        fitted(deep.step, host=None, plan=plan).plan(state_with(ADAM, layers=3), ROWS)


def test_stages_hand_over_what_the_next_ones_read(deep):
    check_line(deep.run)


def test_what_no_later_part_reads_is_not_held(monkeypatch, deep):
    """Residuals of the first stage are given up as the backward pass goes on."""
    state, seen, real = deep.placed(), [], stream.Run._run

    def watched(self, item, alone):
        real(self, item, alone)
        made = set(self.stream.names or self.cut.first.block.outputs)
        made |= {v for i in self.stream.items[: self.at + 1] for v in i.part.names}
        later = {v for i in self.stream.items[self.at + 1 :] for v in i.part.reads}
        results = {v for v in self.cut.program.block.outputs if isinstance(v, Value)}
        seen.append((set(self.env) & made) - later - results - set(item.part.sent))
        held = {id(a) for a in self.given.values()}
        assert not held & {id(a) for a in self.env.values()}

    monkeypatch.setattr(stream.Run, "_run", watched)
    deep.check(deep.run(state, ROWS))
    assert len(seen) == len(next(iter(deep.run._outcomes.values())).stream.items)
    assert not any(seen)


def check_line(run):
    """Every value that a part reads was made before it, once, and was not given away."""
    (outcome,) = run._outcomes.values()
    pieces, items = outcome.stream.cut, outcome.stream.items
    first = pieces.first
    alive = set(first.block.inputs) - {first.block.inputs[n] for n in first.donated}
    alive |= set(outcome.stream.names or first.block.outputs)
    for item in items:
        part = item.part
        assert set(part.reads) - set(part.fetched) <= alive
        alive -= {part.reads[n] for n in part.over}
        assert not alive & (set(part.names) - set(pieces.program.block.inputs))
        alive |= set(part.names)


def test_a_budget_that_no_update_fits_names_one_that_works():
    run = fitted(step_with(ADAM), budget="8MiB")
    with pytest.raises(jaxmem.BudgetInfeasibleError) as raised:
        run.plan(state_with(ADAM), X)
    smallest = raised.value.smallest_bytes
    assert fitted(step_with(ADAM), budget=smallest).plan(state_with(ADAM), X)


def test_leaves_that_meet_in_one_operation_name_a_budget_that_works():
    tx = OPTIMIZERS["only if finite"]
    run = fitted(step_with(tx), budget="11MiB")
    with pytest.raises(jaxmem.BudgetInfeasibleError, match="5 more at once") as raised:
        run.plan(state_with(tx), X)
    smallest = raised.value.smallest_bytes
    assert fitted(step_with(tx), budget=smallest).plan(state_with(tx), X)


# --- faults -----------------------------------------------------------------------------------


class Failing:
    """``jax.device_put`` that fails at some of its calls."""

    def __init__(self, real, calls):
        self.real, self.calls, self.count = real, calls, 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.count in self.calls:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: pinned host memory")
        return self.real(*args, **kwargs)


def failing(monkeypatch, calls):
    patched = Failing(jax.device_put, calls)
    monkeypatch.setattr(jax, "device_put", patched)
    return patched


@pytest.mark.parametrize("call", [4, 5, 7, 12])
def test_a_copy_that_fails_once_is_made_up_for_and_told(monkeypatch, deep, call: int):
    state = deep.placed()
    failing(monkeypatch, {call})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = deep.run(state, ROWS)
    monkeypatch.undo()
    assert "RESOURCE_EXHAUSTED" in str(told[0].message)
    deep.check(found)


def test_a_step_that_stops_half_way_can_be_completed(monkeypatch, deep):
    state = deep.placed()
    failing(monkeypatch, set(range(9, 1000)))
    with pytest.raises(StepInterruptedError, match=r"part \d+ of \d+ of step\) .* twice") as raised:
        deep.run(state, ROWS)
    with pytest.raises(StepInterruptedError):
        raised.value.resume()
    monkeypatch.undo()
    deep.check(raised.value.resume())


def test_what_fails_before_any_update_leaves_the_state_as_it_was(monkeypatch, deep):
    state = deep.placed()
    before = [np.array(a) for a in jax.tree.leaves(on_device(state))]
    failing(monkeypatch, {1})
    with pytest.raises(jaxmem.DeviceOutOfMemoryError, match="RESOURCE_EXHAUSTED"):
        deep.run(state, ROWS)
    monkeypatch.undo()
    assert not any(a.is_deleted() for a in jax.tree.leaves(state))
    same(state, before)
    deep.check(deep.run(state, ROWS))


@pytest.mark.parametrize("at", [1, 5, 12])
def test_ctrl_c_between_updates_waits_until_the_step_is_complete(monkeypatch, deep, at: int):
    state, counting = deep.placed(), failing(monkeypatch, ())

    def interrupted(*args, **kwargs):
        counting.count += 1
        if counting.count == at:
            signal.raise_signal(signal.SIGINT)
        return counting.real(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found = deep.run(state, ROWS)
        time.sleep(10)  # Ended by the interrupt, which comes as soon as the step is complete.
    monkeypatch.undo()
    deep.check(found)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_in_another_thread_does_not_touch_signals():
    run, found = adam(), []
    state = run.place(state_with(ADAM), X)[0]
    thread = threading.Thread(target=lambda: found.append(run(state, X)))
    thread.start()
    thread.join()
    same(found[0], jax.jit(step_with(ADAM, norm=True))(state_with(ADAM), X))
