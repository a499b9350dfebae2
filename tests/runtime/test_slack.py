"""Slack for copies: it is tried last, kept where it fits and is quicker, and followed."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

import jaxmem
from jaxmem.planner.fill import Solution
from jaxmem.planner.plan import Plan
from jaxmem.runtime import slack, tries
from jaxmem.runtime.compiler import Attempt, Compiler
from jaxmem.runtime.exposed import Exposed
from jaxmem.runtime.following import decisions_of
from jaxmem.runtime.slack import Slack
from jaxmem.targets import Target
from jaxmem.units import MIB
from tests.planner.lines import program
from tests.runtime.test_hosting import arguments, followed, planned, step

__all__ = ["planned"]

SLACKS = (6e-5, 5e-5, 4e-5)


class Told(Slack):
    """Each program waits for its copies as long as is said, whatever it compiles to."""

    waits: dict[float, float]
    now: float

    def compile(self, name: str, limit: int, solution: Solution) -> Attempt:
        self.now = solution.slack_seconds
        return super().compile(name, limit, solution)

    def exposed(self, *_: object) -> Exposed:
        return Exposed(0.0, self.waits[self.now])


def run(planned: Plan, monkeypatch: pytest.MonkeyPatch, waits: tuple[float, ...]) -> Told:
    """The decisions of a plan compiled; ``waits`` with nothing given, and with each slack."""
    compiler = Compiler(program(step, *arguments(), donate=(0,)), Target("h200"))
    started = Told(compiler, 8 * MIB, lambda said: None)
    started.waits = dict(zip((0.0, *SLACKS), waits, strict=True))
    monkeypatch.setattr(slack, "SLACKS", SLACKS)
    monkeypatch.setattr(tries, "exposed", started.exposed)
    solution = decisions_of(compiler, planned)
    assert solution is not None
    started.compile("search", solution.temp_bytes, solution)
    return started


@pytest.mark.parametrize(
    ("waits", "chosen", "compiles"),
    [
        ((9.0, 3.0, 2.0, 1.0), 6e-5, 2),
        ((9.0, 9.5, 2.0, 1.0), 5e-5, 3),
        ((1.0, 3.0, 2.0, 1.5), 0.0, 4),
        ((0.0, 3.0, 2.0, 1.5), 0.0, 1),
    ],
)
def test_the_first_that_is_quicker_is_taken(planned, monkeypatch, waits, chosen, compiles):
    """And no other is compiled; none at all where nothing is waited for."""
    started = run(planned, monkeypatch, waits)
    scale = started.scale
    started.loosen()
    best = started.best().solution
    assert best is not None and best.slack_seconds == chosen
    assert len(started.rounds) == compiles and started.scale == scale
    assert [r.name for r in started.rounds[1:]] == [f"{1e3 * s:g} ms a copy" for s in SLACKS][
        : compiles - 1
    ]


def test_what_does_not_fit_is_not_taken(planned, monkeypatch):
    started = run(planned, monkeypatch, (9.0, 3.0, 2.0, 1.0))
    before = started.best()
    started.budget = before.compiled.memory.total_bytes - 1
    # On paper it fits: only the compiler's bytes say that it does not.
    monkeypatch.setattr(Slack, "predicted", lambda self, solution: 0)
    started.loosen()
    assert started.best() is before and len(started.rounds) == 4
    started.rounds.clear()
    monkeypatch.setattr(Slack, "predicted", lambda self, solution: started.budget + 1)
    started.loosen()
    assert started.best() is before and not started.rounds


def test_a_plan_says_what_its_copies_are_given(planned):
    """Two programs, and each is followed as it was planned."""
    texts = set()
    for seconds in (0.0, SLACKS[0]):
        fitted = followed(dataclasses.replace(planned, slack_seconds=seconds))
        plan = fitted.plan(*arguments())
        assert plan.slack_seconds == seconds
        assert ("copies are given 60.0us each" in str(plan.explain())) == bool(seconds)
        texts.add(fitted.lower(*arguments()).as_text())
    assert len(texts) == 2
    given = dataclasses.replace(planned, slack_seconds=SLACKS[0])
    assert "given to each copy" in str(planned.diff(given))


@pytest.mark.parametrize("seconds", [-1e-3, float("inf"), float("nan")])
def test_what_cannot_be_given_is_refused(planned, seconds):
    said = json.dumps({**json.loads(planned.to_json()), "slack_seconds": seconds})
    with pytest.raises(jaxmem.PlanMismatchError, match="slack_seconds"):
        Plan.from_json(said)


def test_nothing_is_given_where_nothing_is_moved():
    plan = jaxmem.plan(
        step, *jax.eval_shape(arguments), budget="8MiB", target="h200", progress=False
    )
    assert not plan.hosted and plan.slack_seconds == 0.0
    said = json.dumps({**json.loads(plan.to_json()), "slack_seconds": 1e-3})
    with pytest.raises(jaxmem.PlanMismatchError, match="0 where nothing is moved"):
        Plan.from_json(said)
