"""Which leaves wait in host memory where the planner is to say: planned for an H200, run here."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.errors import ArgumentError, BudgetInfeasibleError, CutError
from jaxmem.planner.deadline import Deadline
from jaxmem.runtime import choosing, streamed, winning
from jaxmem.runtime.asked import Asked, NotQuickerError
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.progress import Part
from jaxmem.runtime.tries import Outcome
from tests.planner.lines import program
from tests.streamed_steps import (
    MIB,
    OPTIMIZERS,
    fitted,
    in_small_buckets,
    same,
    state_with,
    step_with,
)

ADAM = OPTIMIZERS["adam"]
STEP = step_with(ADAM)
# 2 MiB of weights, 4 of moments; at least 18 MiB where nothing waits, 17 with half of the moments
# and 16 with all of them.
ROWS = jnp.linspace(-1, 1, 1024 * 512).reshape(1024, 512)
TIGHT = 35 * MIB // 2


@pytest.fixture(autouse=True, scope="module")
def small_buckets():
    with in_small_buckets(python_seconds=0.0):
        yield


@functools.cache
def chosen(budget: int | str):
    return fitted(STEP, host=jaxmem.AUTO, budget=budget)


@functools.cache
def state():
    return state_with(ADAM, layers=2)


def test_what_may_wait_is_told_apart_by_what_reads_it():
    step = program(STEP, state(), ROWS, donate=0)
    half, moments, everything = choosing.ways(step)
    paths = [leaf.path for leaf in step.arguments]

    def named(way: choosing.Way) -> list[str]:
        return [paths[n] for n in way.leaves]

    assert len(moments.leaves) == 4 and all("mu" in p or "nu" in p for p in named(moments))
    assert set(half.leaves) < set(moments.leaves) < set(everything.leaves)
    assert len(half.leaves) == 2 and half.nbytes == 2 * MIB
    assert not any("x" == p or "b" in p.split("[")[-1] for p in named(everything))


def test_ways_are_told_by_what_they_are():
    """With few results nothing tells weights from moments; a single leaf is no half."""

    def sgd(params, x):
        def loss(params):
            return (jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2).sum()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    w = jnp.ones((512, 512))
    (way,) = choosing.ways(program(sgd, {"a": w, "b": w * 2}, ROWS, donate=0))
    assert way.what == "all that is updated" and len(way.leaves) == 2
    assert choosing.ways(program(lambda p, x: x @ p, w, ROWS)) == []


def test_nothing_waits_where_nothing_need_be_recomputed():
    plan = chosen("2GiB").plan(state(), ROWS)
    assert plan.streamed is None and not plan.hosted
    assert plan.notes[-1].startswith("host=AUTO took one program; predicted were one program: ")


@pytest.mark.wide
def test_the_quickest_of_what_fits_is_taken_and_computes_what_jit_does():
    step = chosen(TIGHT)
    with pytest.raises(BudgetInfeasibleError):
        fitted(STEP, host=None, host_budget=0, budget=TIGHT).plan(state(), ROWS)
    plan = step.plan(state(), ROWS)
    assert plan.compiled_bytes <= TIGHT and plan.hosted
    others = [plan_with(way) for way in choosing.ways(program(STEP, state(), ROWS, donate=0))]
    others.append(fitted(STEP, host=None, budget=TIGHT).plan(state(), ROWS))
    assert plan.predicted_seconds == min(p.predicted_seconds for p in others if p is not None)
    (given,) = step.place(jax.tree.map(jnp.copy, state()), ROWS)[:1]
    found, _ = step(given, ROWS)
    found, loss = step(found, ROWS)
    expected, _ = jax.jit(STEP)(state(), ROWS)
    same((found, loss), jax.jit(STEP)(expected, ROWS))


def plan_with(way: choosing.Way) -> jaxmem.Plan | None:
    """The plan with these leaves in host memory; ``None`` where nothing fits."""
    leaves = program(STEP, state(), ROWS, donate=0).arguments
    step = fitted(STEP, host=[leaves[n].path for n in way.leaves], budget=TIGHT)
    try:
        return step.plan(state(), ROWS)
    except BudgetInfeasibleError:
        return None


def test_a_plan_that_was_chosen_is_saved_and_followed(tmp_path):
    plan = chosen(TIGHT).plan(state(), ROWS)
    plan.save(tmp_path / "plan.json")
    read = jaxmem.Plan.load(tmp_path / "plan.json")
    again = fitted(STEP, host=None, budget=TIGHT, plan=read).plan(state(), ROWS)
    assert again.hosted == plan.hosted and again.compiled_bytes <= TIGHT
    assert again.host_bytes == plan.host_bytes


def test_a_policy_that_offloads_is_followed_where_no_leaf_is_streamed():
    def named(state, x):
        params, moments, count = state

        def loss(params):
            y = x
            for n in range(2):
                y = y + jnp.tanh(checkpoint_name(y @ params[f"w{n}"], "product"))
            return (y**2).mean()

        loss, grads = jax.value_and_grad(loss)(params)
        updates, moments = ADAM.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, count + 1), loss

    rules = jaxmem.policies.planned.override(jaxmem.policies.offload("product"))
    plan = fitted(named, host=jaxmem.AUTO, budget="60MiB", policy=rules).plan(state(), ROWS)
    assert plan.host_bytes >= 2 * ROWS.nbytes and "one program: 4.0MiB moved" in plan.notes[-1]


def outcome(seconds: float, host_bytes: int = 0) -> Outcome:
    """An outcome of a step that takes one second as written, predicted to take ``seconds``."""
    chosen("2GiB").plan(state(), ROWS)
    (found,) = chosen("2GiB")._outcomes.values()
    times = {"predicted_seconds": seconds, "keep_all_seconds": 1.0, "host_bytes": host_bytes}
    return replace(found, plan=replace(found.plan, notes=(), **times))


def choice(one_program, streaming, deadline=None, report=lambda message: None, **rates):
    """What is chosen of these, and how many leaves each try of a stream had."""
    step, tries = program(STEP, state(), ROWS, donate=0), []

    def one(report):
        report("compiling")
        return one_program if isinstance(one_program, Outcome) else refuse(one_program)

    def stream(asked, report):
        report(Part("compiling", 1, 3))
        tries.append(len(asked.hosted))
        found = streaming[len(tries) - 1]
        if callable(found):
            found = found(asked)
        return found if isinstance(found, Outcome) else refuse(found)

    def refuse(error):
        raise error

    clock = deadline or Deadline(math.inf)
    target = jaxmem.Target("h200", **rates)
    return choosing.fit(step, one, stream, target, None, clock, report), tries


INFEASIBLE = BudgetInfeasibleError("too much", budget_bytes=1, smallest_bytes=2 * MIB)


def test_of_what_fits_the_quickest_is_taken():
    found, tries = choice(outcome(2.0), [outcome(1.5), outcome(1.2), outcome(1.8)])
    assert found.plan.predicted_seconds == 1.2 and tries == [2, 4, 6]
    (note,) = found.plan.notes
    assert note == (
        "host=AUTO took what only updates read on the host; predicted were one program: 2.00s; "
        "half of what only updates read on the host: 1.50s; what only updates read on the host: "
        "1.20s; all that is updated on the host: 1.80s"
    )


def test_streams_are_tried_where_they_may_be_quicker():
    assert choice(outcome(1.0), [])[1] == []
    # What one program moves by itself may be slower than a stream, whatever is predicted.
    assert choice(outcome(1.0, host_bytes=MIB), [outcome(3.0)] * 3)[1] == [2, 4, 6]
    # 2 MiB take 1.3 s of copies, and all others more than the 2 s of the step in one program.
    slow = {"d2h_bytes_per_second": 1.6e6, "h2d_bytes_per_second": 1e9}
    found, tries = choice(outcome(2.0), [outcome(3.0)], **slow)
    assert (
        tries == [2]
        and "what only updates read on the host: copies alone 2.62s" in (found.plan.notes[0])
    )


def test_what_fits_is_taken_where_others_do_not():
    cut = CutError("it cannot be cut. Leave it out.")
    found, _ = choice(INFEASIBLE, [cut, outcome(5.0), INFEASIBLE])
    assert found.plan.predicted_seconds == 5.0
    told = "half of what only updates read on the host: it cannot be cut; what"
    assert told in found.plan.notes[0]
    with pytest.raises(BudgetInfeasibleError, match=r"too much\n.*one program: 2.0MiB or more"):
        choice(INFEASIBLE, [cut] * 3)


def test_when_time_is_over_nothing_else_is_tried_once_something_fits():
    # Spent, and nobody has asked yet whether it is over.
    over = Deadline(1.0, spent=1.0)
    found, tries = choice(outcome(2.0), [], over)
    assert tries == []
    told = "what only updates read on the host: not tried, the time limit is over"
    assert told in found.plan.notes[0]
    assert found.plan.notes[1].startswith("the time limit of 1 s ended the search: this is the")
    found, tries = choice(INFEASIBLE, [outcome(2.0)], over)
    assert tries == [2] and found.plan.predicted_seconds == 2.0


def test_time_that_ends_in_a_later_way_is_told_of_once():
    def slowly(asked):
        clock.spent = 1.0
        return outcome(3.0)

    clock = Deadline(1.0)
    found, tries = choice(outcome(2.0), [slowly], clock)
    assert tries == [2] and found.plan.predicted_seconds == 2.0
    assert [note.split(" s ")[0] for note in found.plan.notes[1:]] == ["the time limit of 1"]

    clock = Deadline(1.0)
    assert len(choice(outcome(2.0), [outcome(3.0)] * 3, clock)[0].plan.notes) == 1


@pytest.mark.parametrize("limit", [1e-9, 0.05])
def test_a_fit_that_runs_out_of_time_gives_what_fits_and_says_so(limit: float):
    plan = fitted(STEP, host=jaxmem.AUTO, budget=TIGHT, time_limit=limit).plan(state(), ROWS)
    assert plan.compiled_bytes <= TIGHT
    told = [
        note for note in plan.notes if f"the time limit of {limit:g} s ended the search" in note
    ]
    assert len(told) == 1


def test_progress_tells_which_way_is_planned():
    said: list[str] = []
    choice(outcome(2.0), [outcome(3.0)] * 3, report=said.append)
    assert [message.split(" on the host")[0] for message in said] == [
        "way 1 of 4, one program: compiling",
        "way 2 of 4, half of what only updates read",
        "way 3 of 4, what only updates read",
        "way 4 of 4, all that is updated",
    ]
    counted = [message for message in said if isinstance(message, Part)]
    assert {(message.done, message.total) for message in counted} == {(1, 3)}


def test_each_way_must_be_quicker_than_the_best_so_far():
    wanted: list[float] = []

    def slower(asked):
        wanted.append(asked.quicker_than)
        return NotQuickerError(1.6) if asked.quicker_than < 1.6 else outcome(1.5, host_bytes=MIB)

    found, _ = choice(INFEASIBLE, [slower] * 3)
    assert wanted == [math.inf, 1.5, 1.5]
    assert found.plan.predicted_seconds == 1.5
    assert "; what only updates read on the host: at least 1.60s; all" in found.plan.notes[0]


def test_host_memory_is_taken_for_more_than_a_hair():
    one, slightly, clearly = outcome(2.0), outcome(1.97, MIB), outcome(1.95, MIB)
    assert choice(one, [slightly] * 3)[0].plan.host_bytes == 0
    assert choice(one, [slightly, clearly, clearly])[0].plan.predicted_seconds == 1.95
    # Among those that take host memory the quickest is taken.
    assert choice(INFEASIBLE, [slightly, clearly, one])[0].plan.predicted_seconds == 1.95
    assert choice(outcome(1.98, MIB), [slightly, one, one])[0].plan.predicted_seconds == 1.97


@pytest.mark.wide
@pytest.mark.parametrize("budget", [TIGHT, "20MiB", "24MiB"])
def test_what_is_not_compiled_could_not_have_won(budget, monkeypatch):
    """The same plan as where every way is planned to its end."""
    with_bound = fitted(STEP, host=jaxmem.AUTO, budget=budget).plan(state(), ROWS)
    monkeypatch.setattr(winning, "least_seconds", lambda *args, **how: 0.0)
    without = fitted(STEP, host=jaxmem.AUTO, budget=budget).plan(state(), ROWS)
    notes = {"notes": ()}
    assert replace(with_bound, **notes).to_json() == replace(without, **notes).to_json()


@pytest.mark.parametrize("way", [1, 2])
def test_no_way_is_quicker_than_it_is_said_to_be_at_least(way: int):
    hosted = choosing.ways(program(STEP, state(), ROWS, donate=0))[way].leaves
    seconds = stream_within(Asked(hosted), 40 * MIB)
    assert stream_within(Asked(hosted, quicker_than=seconds * 1.01), 40 * MIB) == seconds
    with pytest.raises(NotQuickerError) as told:
        stream_within(Asked(hosted, quicker_than=seconds * 0.5), 40 * MIB)
    assert seconds * 0.5 <= told.value.seconds <= seconds


def stream_within(asked: Asked, budget: int) -> float:
    """Predicted seconds of the step that streams what is asked."""
    traced, target = program(STEP, state(), ROWS, donate=0), jaxmem.Target("h200")
    compiler_of = functools.partial(Compiler, target=target)
    found = streamed.fit(traced, asked, compiler_of, target, budget, lambda message: None)
    return found.plan.predicted_seconds


def test_a_target_without_links_is_planned_for():
    target = jaxmem.Target("h200", d2h_bytes_per_second=0.0)
    plan = fitted(STEP, host=jaxmem.AUTO, budget="1GiB", target=target).plan(state(), ROWS)
    assert not plan.hosted


@pytest.mark.wide
def test_an_error_names_a_budget_that_works_and_what_was_tried():
    compared = r"host=jaxmem.AUTO compared: one program: .* or more; half of what"
    with pytest.raises(BudgetInfeasibleError, match=compared) as told:
        chosen(4 * MIB).plan(state(), ROWS)
    smallest = told.value.smallest_bytes
    assert fitted(STEP, host=jaxmem.AUTO, budget=smallest).plan(state(), ROWS).compiled_bytes <= (
        smallest
    )


def test_where_there_is_one_memory_nothing_is_moved_and_the_plan_says_so():
    plan = fitted(STEP, host=jaxmem.AUTO, budget="1GiB", target="cpu").plan(state(), ROWS)
    assert not plan.hosted and "no leaves were streamed, as a CPU has one memory" in plan.notes[-1]


@pytest.mark.parametrize("options", [{"measure": True}, {"host": 3}, {"host": [jaxmem.AUTO]}])
def test_wrong_uses_are_refused(options):
    with pytest.raises(ArgumentError, match="host"):
        fitted(STEP, **{"host": jaxmem.AUTO, **options})


def test_the_word_is_no_pattern_and_the_error_says_what_to_write():
    with pytest.raises(ArgumentError, match=r"matches no argument .* write host=jaxmem.AUTO\."):
        fitted(STEP, host="auto").plan(state(), ROWS)
