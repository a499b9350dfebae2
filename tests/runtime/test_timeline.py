"""When parts run and copies go, on paper."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jaxmem.runtime import timeline
from jaxmem.runtime.timeline import Turn, run_through

SPEED = 100.0


@pytest.fixture(autouse=True)
def python_takes_no_time(monkeypatch):
    monkeypatch.setattr(timeline, "_PYTHON_SECONDS", 0.0)


def some(seed: int, room: int) -> list[Turn]:
    rng = random.Random(seed)
    found = []
    for _ in range(rng.randrange(3, 25)):
        fetched = rng.randrange(0, 200)
        stage = rng.random() < 0.4
        sent = 0 if stage else rng.choice([0, fetched])
        found.append(Turn(rng.random() * 3, fetched, sent, way=fetched, room=room, stage=stage))
    return found


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("room", [1, 300, 10**9])
def test_a_step_takes_as_long_as_what_is_busiest_and_no_longer_than_all_in_turn(
    seed: int, room: int
):
    turns = some(seed, room)
    times = run_through(1.0, turns, SPEED, room)
    computed = 1.0 + sum(turn.seconds for turn in turns)
    inwards = sum(turn.fetched for turn in turns) / SPEED
    outwards = sum(turn.sent for turn in turns) / SPEED
    assert times.seconds >= max(computed, inwards, 1.0 + outwards) - 1e-9
    assert times.seconds <= computed + inwards + outwards + 1e-9
    assert times.exposed == pytest.approx(times.seconds - computed)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_hides_where_one_copy_has_room(seed: int):
    turns = [dataclasses.replace(turn, stage=True, sent=0) for turn in some(seed, 1)]
    moved = [turn for turn in turns if turn.fetched]
    times = run_through(0.0, moved, SPEED, 0)
    copies = sum(turn.fetched for turn in moved) / SPEED
    assert times.exposed == pytest.approx(copies)


@pytest.mark.parametrize("seed", range(60))
def test_copies_never_take_more_than_the_part_that_runs_leaves(monkeypatch, seed: int):
    rng = random.Random(seed)
    turns = [
        dataclasses.replace(turn, room=rng.randrange(200, 900), way=rng.randrange(0, 200))
        for turn in some(seed, 0)
    ]
    seen, real = [], timeline._Clock._send

    def watched(self, number, turn):
        seen.append(number)
        assert self.under_way <= turn.room
        real(self, number, turn)

    monkeypatch.setattr(timeline._Clock, "_send", watched)
    run_through(1.0, turns, SPEED, 500)
    assert seen == list(range(len(turns)))


def test_python_is_waited_for_where_parts_are_short(monkeypatch):
    monkeypatch.setattr(timeline, "_PYTHON_SECONDS", 2.0)
    short = [Turn(0.1, 10, way=10, room=100, stage=True) for _ in range(8)]
    assert run_through(0.0, short, SPEED, 100).seconds == pytest.approx(7 * 2.0 + 0.1)
    long = [dataclasses.replace(turn, seconds=3.0) for turn in short]
    assert run_through(0.0, long, SPEED, 100).seconds == pytest.approx(8 * 3.0 + 0.1)
