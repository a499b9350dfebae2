"""Runs take turns, and short ones more of them."""

from __future__ import annotations

import itertools

from jaxmem.runtime.timing import in_turns, wall_seconds


class Run:
    """Notes when it is prepared and when it runs."""

    def __init__(self, name: str, diary: list[str]):
        self.name, self.diary = name, diary

    def prepare(self) -> None:
        self.diary.append(f"prepare {self.name}")

    def __call__(self) -> None:
        self.diary.append(self.name)


def test_they_take_turns_there_and_back_each_prepared_before():
    diary: list[str] = []
    timed: list[str] = []

    def timer(run) -> float:
        run()
        timed.append(run.name)
        return 1.0

    assert in_turns([Run(name, diary) for name in "abc"], timer) == [[1.0] * 5] * 3
    assert "".join(timed) == "abccba" * 2 + "abc"
    assert diary[0::2] == [f"prepare {name}" for name in diary[1::2]]
    assert len(diary) == 2 * (3 * 2 + 15), "two rounds of warm-up and five that count"


def test_short_runs_are_run_more_often():
    counts = []
    for seconds in (1e-3, 0.05, 10.0):
        timed: list[float] = []
        in_turns([Run("a", [])], lambda run, s=seconds, t=timed: t.append(s) or s)
        counts.append(len(timed))
    assert counts == [25, 20, 5]


def test_each_run_that_counts_is_told():
    figures = itertools.chain([9.0, 1.0, 1.0, 9.0], itertools.repeat(1.0))
    assert in_turns([Run("a", [])], lambda run: next(figures)) == [[9.0, 1.0, 1.0, 9.0, 1.0]]


def test_a_run_takes_time():
    assert 0 < wall_seconds(lambda: sum(range(1000)) and None) < 1
