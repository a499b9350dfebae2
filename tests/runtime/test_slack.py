"""Slack for copies: it is tried last, kept where it fits and is quicker, and followed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import policies
from jaxmem.planner.plan import Plan
from jaxmem.planner.retimed import retimed
from jaxmem.program.ir import Block
from jaxmem.runtime import slack, tries
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.exposed import Exposed
from jaxmem.runtime.following import decisions_of
from jaxmem.runtime.order import order_of
from jaxmem.runtime.overlaps import OVERLAPPING
from jaxmem.runtime.slack import Slack
from jaxmem.targets import Target
from jaxmem.units import MIB
from tests.planner.lines import program
from tests.runtime.test_hosting import arguments, followed, planned, step

__all__ = ["planned"]

# Each gives another program.
SLACKS = (1e-5, 4e-6, 2e-6)


def run(
    planned: Plan,
    monkeypatch: pytest.MonkeyPatch,
    waits: dict[float, float | None],
    most: int = len(SLACKS),
) -> Slack:
    """The decisions of a plan compiled; ``waits`` by what is given to each copy.

    So ``most`` sizes are tried first, and the others where one of these is quicker.
    """
    compiler = Compiler(program(step, *arguments(), donate=(0,)), Target("h200"))
    started = Slack(compiler, 8 * MIB, lambda said: None)
    solution = decisions_of(compiler, planned)
    assert solution is not None
    given = {}
    for seconds in (0.0, *SLACKS):
        block = compiler.block(retimed(compiler.search, solution, slack_seconds=seconds))
        given[order_of(block)] = seconds
    assert len(given) == 1 + len(SLACKS), "each is another program"

    def told(_: object, block: Block, __: object) -> Exposed:
        return Exposed(0.0, waits[given[order_of(block)]])

    monkeypatch.setattr(slack, "SLACKS", SLACKS[:most])
    monkeypatch.setattr(slack, "OTHERS", SLACKS[most:])
    monkeypatch.setattr(slack, "exposed", told)
    monkeypatch.setattr(tries, "exposed", told)
    started.compile("search", solution.temp_bytes, solution)
    return started


@pytest.mark.parametrize(
    ("waits", "chosen", "compiles", "quicker"),
    [
        ((9.0, 0.0, 2.0, 1.0), SLACKS[0], 2, 1),
        ((9.0, 9.5, 0.0, 1.0), SLACKS[1], 3, 1),
        ((9.0, 3.0, 2.0, 1.0), SLACKS[2], 4, 3),
        ((9.0, 2.0, 3.0, 4.0), SLACKS[0], 4, 1),
        ((9.0, None, 9.5, 1.0), SLACKS[2], 4, 1),
        ((9.0, 9.0, 8.9999, 9.5), 0.0, 4, 0),
        ((1.0, 3.0, 2.0, 1.5), 0.0, 4, 0),
        ((0.0, 3.0, 2.0, 1.5), 0.0, 1, 0),
    ],
)
def test_sizes_are_tried_until_one_hides_all(
    planned, monkeypatch, waits, chosen, compiles, quicker
):
    """The quickest is taken, by more than rounding; none is tried where nothing waits."""
    started = run(planned, monkeypatch, dict(zip((0.0, *SLACKS), waits, strict=True)))
    scale = started.scale
    started.loosen()
    best = started.best().solution
    assert best is not None and best.slack_seconds == chosen
    assert len(started.fitting) == 1 + quicker
    assert started.scale == scale
    names = [f"{1e3 * s:g} ms a copy" for s in SLACKS]
    assert [r.name for r in started.rounds] == ["search", *names[: compiles - 1]]


@pytest.mark.parametrize(("first", "compiles"), [(9.5, 2), (3.0, 4), (0.0, 2)])
def test_others_are_tried_where_one_is_quicker_and_still_waits(
    planned, monkeypatch, first, compiles
):
    waits = dict(zip((0.0, *SLACKS), (9.0, first, 2.0, 1.0), strict=True))
    started = run(planned, monkeypatch, waits, most=1)
    started.loosen()
    assert len(started.rounds) == compiles


QUICKER = dict(zip((0.0, *SLACKS), (9.0, 3.0, 2.0, 1.0), strict=True))


def test_what_does_not_fit_is_not_taken(planned, monkeypatch):
    started = run(planned, monkeypatch, QUICKER)
    before, compiler = started.best(), started.compiler
    assert before.solution is not None
    options = compiler.options_of(before.compiled)
    loosened = [
        retimed(compiler.search, before.solution, slack_seconds=seconds) for seconds in SLACKS
    ]
    programs = [compiler.compile(solution, options=options) for solution in loosened]
    total = min(program.memory.total_bytes for program in programs)
    # On paper it fits: only the compiler's bytes say that it does not.
    low = dataclasses.replace(before, predicted_bytes=0)
    started.fitting[0], started.budget = low, total - 1
    started.loosen()
    assert started.best() is low and [r.fits for r in started.rounds[1:]] == [False] * 3
    # And what does not fit on paper is not compiled.
    started.fitting[0] = dataclasses.replace(before, predicted_bytes=total)
    started.rounds.clear()
    started.loosen()
    assert not started.rounds and len(started.fitting) == 1


def test_no_more_is_compiled_than_is_left(planned, monkeypatch):
    started = run(planned, monkeypatch, QUICKER)
    started.spent = started.left()
    started.loosen()
    assert len(started.rounds) == len(started.fitting) == 1


def test_the_same_program_is_not_compiled_again(planned, monkeypatch):
    """More than there is gives the program of all there is."""
    started = run(planned, monkeypatch, {0.0: 1.0, **dict.fromkeys(SLACKS, 2.0)})
    monkeypatch.setattr(slack, "SLACKS", (SLACKS[0], 2 * SLACKS[0], 0.0))
    started.loosen()
    assert len(started.rounds) == 2


def test_what_xla_cannot_compile_leaves_what_it_can(planned, monkeypatch):
    """With slack, and with collectives beside other work."""
    started = run(planned, monkeypatch, QUICKER)
    before = started.best()

    def failing(self, solution, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: no kernel found\nsomewhere")

    monkeypatch.setattr(Compiler, "attempt", failing)
    monkeypatch.setattr(Compiler, "may_take_less", lambda self, solution: True)
    started.loosen()
    started.overlapped.clear()
    started.overlap()
    assert started.fitting == [before] and len(started.rounds) == 1
    names = [*(f"{1e3 * s:g} ms a copy" for s in SLACKS), OVERLAPPING]
    said = "a program ({}) did not compile: INTERNAL: no kernel found"
    assert started.said == [said.format(name) for name in names]


def test_a_plan_is_given_slack_where_its_program_waits(monkeypatch):
    """And that is said of it, and followed: the same program."""
    state = 2 * ([jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 12,)
    args = state, jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    options = {"target": "h200", "donate_argnums": 0, "progress": False, "budget": "192MiB"}
    waits = Exposed(0.0, 1.0)
    for module in (slack, tries):
        monkeypatch.setattr(module, "exposed", lambda *_: waits)
    monkeypatch.setattr(slack, "SLACKS", (1e-4,))
    plain = jaxmem.plan(step, *args, **options)
    assert plain.hosted and not plain.slack_seconds, "a millionth of what is waited for is no gain"
    monkeypatch.setattr(slack, "exposed", lambda *_: replace(waits, compiled_seconds=0.5))
    step_with = jaxmem.fit(step, **options)
    plan = step_with.plan(*args)
    assert plan.slack_seconds == 1e-4 and plan.hosted == plain.hosted
    assert plan.rounds[-1].name == "0.1 ms a copy" and plan.rounds == plain.rounds
    followed_again = jaxmem.fit(step, plan=Plan.from_json(plan.to_json()), **options)
    assert followed_again.lower(*args).as_text() == step_with.lower(*args).as_text()


def test_a_plan_says_what_its_copies_are_given(planned):
    """Two programs, and each is followed as it was planned."""
    texts = set()
    for seconds in (0.0, SLACKS[1]):
        fitted = followed(dataclasses.replace(planned, slack_seconds=seconds))
        plan = fitted.plan(*arguments())
        assert plan.slack_seconds == seconds
        assert ("copies are given up to 4.00us each" in str(plan.explain())) == bool(seconds)
        texts.add(fitted.lower(*arguments()).as_text())
    assert len(texts) == 2
    given = dataclasses.replace(planned, slack_seconds=SLACKS[1])
    assert "given to each copy" in str(planned.diff(given))


@pytest.mark.parametrize("seconds", [-1e-3, float("inf"), float("nan"), True, "1ms"])
def test_what_cannot_be_given_is_refused(planned, seconds):
    said = json.dumps({**json.loads(planned.to_json()), "slack_seconds": seconds})
    with pytest.raises(jaxmem.PlanMismatchError, match="slack_seconds"):
        Plan.from_json(said)


def test_slack_for_copies_that_are_all_in_a_loop_is_refused():
    """It would change nothing, and the plan would say that it does."""

    def scanned(ws, x):
        def loss(ws):
            def layer(y, w):
                return jnp.tanh(checkpoint_name(y, "in") @ w), None

            return jnp.square(jax.lax.scan(layer, x, ws)[0]).mean()

        return ws - jax.grad(loss)(ws)

    args = jax.ShapeDtypeStruct((8, 256, 256), "f4"), jax.ShapeDtypeStruct((4096, 256), "f4")
    options = {"target": "h200", "donate_argnums": 0, "progress": False, "budget": "128MiB"}
    away = policies.nothing.override(policies.offload("in"))
    plan = jaxmem.plan(scanned, *args, policy=away, **options)
    assert plan.host_bytes and not plan.slack_seconds
    given = dataclasses.replace(plan, slack_seconds=1e-3)
    with pytest.raises(jaxmem.PlanMismatchError, match="each copy outside loops"):
        jaxmem.fit(scanned, plan=given, **options).plan(*args)
