"""examples/train_distributed.py: killed and started again, it comes to the losses it would have."""

from __future__ import annotations

import pytest

from tests.killing import STEPS, Run, check


def held(tmp_path, kills: int, seed: int) -> None:
    seen = check(tmp_path, kills, seed)
    assert [kill.moment for kill in seen[kills:]] == ["told", "end"]
    assert not [kill for kill in seen if kill.wrong]


@pytest.mark.wide
def test_killed_while_it_saves_and_told_to_stop_it_goes_on_from_its_newest_checkpoint(tmp_path):
    held(tmp_path, kills=1, seed=2)


@pytest.mark.slow
def test_killed_two_hundred_times_it_goes_on_from_its_newest_checkpoint(tmp_path):
    held(tmp_path, kills=200, seed=1)


@pytest.mark.slow
def test_told_to_stop_it_saves_and_exits_in_less_memory_too(tmp_path):
    directory = tmp_path / "run"
    with Run(directory, "--budget", "26MiB", "--shard", "zero1") as run:
        run.wait_for(3)
        run.process.terminate()
        assert run.ended(60) == 0, run.text()
        reached = max(run.losses())
    assert reached < STEPS - 1
    assert str(reached) in [p.name for p in directory.iterdir()]
