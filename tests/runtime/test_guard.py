"""A jaxlib that computes wrong numbers from host memory is found out before it is used."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import policies
from jaxmem.rewrite import chunked, joined
from jaxmem.runtime import guard, parts
from jaxmem.targets.target import Target
from tests.fitted_steps import DEEP_ARGS, deep

pytestmark = pytest.mark.default_code

H200 = Target("h200")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that knows nothing, with a cache of its own."""
    monkeypatch.setattr(guard, "_known", {})
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def offloaded():
    """A schedule with values in host memory."""
    step = jaxmem.fit(
        deep, target="h200", policy=policies.offload(primitive="dot_general"), progress=False
    )
    step.plan(*DEEP_ARGS)
    (outcome,) = step._outcomes.values()
    return outcome.block


def test_copies_change_nothing_here():
    assert guard.wrong_on(H200) == ""


def test_wrong_numbers_are_found(monkeypatch):
    real = guard.as_function

    def wrong(block):
        run = real(block)
        away = guard.has_transfers(block) or any(
            guard.has_transfers(op.loop.body) for op in block.ops if op.loop
        )
        return lambda *a: [r * (1.01 if away else 1) for r in run(*a)]

    monkeypatch.setattr(guard, "as_function", wrong)
    assert "a scanned net: result" in guard.wrong_on(H200)


def test_updates_by_rows_come_out_right_here():
    assert guard.wrong_by_rows(H200) == ""


def test_rows_that_start_at_the_counter_itself_are_found(monkeypatch):
    """What jaxlib 0.10.2 makes of rows that are fetched ahead."""

    class Raw(chunked._Loop):
        def _fetch(self, stack, start, count):
            raw = start if isinstance(start, int) else start - count
            return super()._fetch(stack, raw, count)

    monkeypatch.setattr(parts, "as_loop", Raw)
    assert "an update by rows: result" in guard.wrong_by_rows(H200)


def test_rows_that_start_at_the_counter_itself_are_found_in_loops(monkeypatch):
    class Raw(joined._Joined):
        def _fetch(self, stack, turn):
            return super()._fetch(stack, turn if isinstance(turn, int) else turn - 1)

    monkeypatch.setattr(parts, "as_joined", lambda part: Raw(part).run)
    assert "one in a loop: result" in guard.wrong_by_rows(H200)


def test_what_is_wrong_with_rows_is_asked_of_the_gpu_that_is_here(monkeypatch, fresh):
    monkeypatch.setattr(guard, "wrong_by_rows", lambda target: "all differ")
    assert guard.against_rows(H200) == ""
    monkeypatch.setattr(guard, "runs_here", lambda target: True)
    assert re.search(r"jaxlib \d.*46231.*all differ", guard.against_rows(H200))
    (file,) = fresh.glob("rows-*.json")
    assert json.loads(file.read_text()) == {"wrong": "all differ"}


def test_what_was_found_is_kept_for_the_next_process(monkeypatch, fresh, offloaded):
    asked = []
    monkeypatch.setattr(guard, "wrong_on", lambda target: asked.append(target.name) or "")
    for _ in range(2):
        guard.check(offloaded, H200)
        guard._known.clear()
    assert asked == ["h200"]
    (file,) = fresh.glob("offload-*.json")
    assert json.loads(file.read_text()) == {"wrong": ""}
    file.write_text("{")
    guard.check(offloaded, H200)
    assert asked == ["h200", "h200"]


def test_a_jaxlib_that_is_wrong_is_refused_by_name(monkeypatch, fresh, offloaded):
    monkeypatch.setattr(guard, "wrong_on", lambda target: "a scanned net: result [1] differs.")
    for _ in range(2):
        with pytest.raises(
            jaxmem.VerificationError, match=r"jaxlib \(\d.*\n.*46231.*host_budget=0"
        ):
            guard.check(offloaded, H200)


def test_what_stays_on_the_device_is_not_checked(monkeypatch, fresh, offloaded):
    monkeypatch.setattr(guard, "wrong_on", lambda target: pytest.fail("checked for nothing"))
    guard.check(offloaded, Target("cpu"))
    step = jaxmem.fit(deep, target="h200", progress=False)
    step.plan(*DEEP_ARGS)
    (outcome,) = step._outcomes.values()
    guard.check(outcome.block, H200)
    assert jax.tree.all(jax.tree.map(jnp.isfinite, step(*DEEP_ARGS)[1]))
