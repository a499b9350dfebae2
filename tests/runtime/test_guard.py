"""A jaxlib that computes wrong numbers from host memory is found out before it is used."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import policies
from jaxmem.runtime import guard
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
