"""Out-of-memory errors of eager, jitted, fitted and tracked code explain themselves."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import ArgumentError, DeviceOutOfMemoryError, StepInterruptedError
from jaxmem.monitor import arrays, figures
from jaxmem.monitor.oom import explain, failed
from jaxmem.monitor.oom.explanation import Explanation
from jaxmem.runtime.step import Step
from jaxmem.units import MIB
from tests.monitor import paper_limit

HUGE = (2**22, 2**22)  # 64 TiB: no address space has it, and asking for it takes no time.
TEXT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8388608 bytes."


def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def written(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w - 0.1 * jax.grad(loss_fn)(w, x), x.sum()


def arguments() -> tuple[jax.Array, jax.Array]:
    return jnp.eye(128) * 1.0, jnp.ones((1024, 128))


def exhausted() -> Exception:
    return jax.errors.JaxRuntimeError(TEXT)


@pytest.fixture
def limited(monkeypatch):
    """The device says that it has 16 MiB, and holds nothing that other tests left alive."""
    limit = 16 * MIB
    before = arrays.alive()  # Kept, so that no new array gets the identity of an old one.
    old, alive = set(map(id, before)), arrays.alive

    def since() -> list[Any]:
        return [array for array in alive() if id(array) not in old]

    for module in (arrays, explain):
        monkeypatch.setattr(module, "alive", since)
    monkeypatch.setattr(
        figures, "stats_of", lambda d: {**paper_limit.stats(d), "bytes_limit": limit}
    )
    return limit


@pytest.fixture
def failing():
    """The next run of a compiled step fails as it does on a device that is full."""
    patch = pytest.MonkeyPatch()
    failing_refs: list[Any] = []

    def run(self: Step, call: Any) -> Any:
        arrays = [jnp.ones((33, 33))]  # What a frame of ours would keep.
        failing_refs.append(weakref.ref(arrays[0]))
        patch.undo()
        raise exhausted()

    patch.setattr(Step, "__call__", paper_limit.of_a_library(run))
    yield failing_refs
    patch.undo()


# --- eager ---------------------------------------------------------------------------------------


def test_what_fills_the_device_is_named_and_letting_go_of_it_is_the_first_fix(limited):
    history = [jnp.ones((256, 1024)) for _ in range(12)]
    with pytest.raises(RuntimeError) as caught:
        jnp.ones(HUGE)
    explanation = jaxmem.explain_oom(caught.value)
    assert explanation.requested_bytes == 2**46
    assert explanation.line.startswith("test_oom.py:")
    first = explanation.holdings[0]
    assert (first.name, first.count, first.nbytes) == ("history", 12, 12 * MIB)
    fix = explanation.fixes[0]
    assert (fix.code, fix.saves_bytes, fix.basis) == ("history.clear()", 12 * MIB, "counted")
    refs = [weakref.ref(array) for array in history]
    exec(fix.code, {"history": history})
    assert all(ref() is None for ref in refs)


def test_more_than_the_device_has_is_said_to_be_that(limited):
    with pytest.raises(RuntimeError) as caught:
        jnp.ones(HUGE)
    explanation = jaxmem.explain_oom(caught.value)
    assert any("more than the device has" in note for note in explanation.notes)
    assert not any(fix.enough for fix in explanation.fixes)


def test_what_frees_enough_comes_before_what_does_not(limited):
    small, large = [jnp.ones((256, 1024)) for _ in range(2)], jnp.ones((10 * 256, 1024))
    explanation = jaxmem.explain_oom(jax.errors.JaxRuntimeError(TEXT))
    assert [fix.code for fix in explanation.fixes[:2]] == ["del large", "small.clear()"]
    assert [fix.enough for fix in explanation.fixes[:2]] == [True, False]
    assert small is not None and large is not None


def test_fragmentation_is_told_apart_from_a_full_device(limited):
    kept = jnp.ones((256, 1024))
    explanation = jaxmem.explain_oom(jax.errors.JaxRuntimeError(TEXT))
    assert explanation.largest_free == figures.Figure(8 * MIB, "inferred")
    assert explanation.device is not None and explanation.device.free_bytes is not None
    assert explanation.device.free_bytes > 8 * MIB
    assert any("in pieces" in note for note in explanation.notes)
    assert kept is not None


# --- jitted --------------------------------------------------------------------------------------


def test_a_jitted_step_is_planned_for_what_is_left(limited):
    train_step = jax.jit(written)
    w, x = arguments()
    cache = jnp.ones((12 * 256, 1024))

    def run(w: jax.Array) -> jax.Array:
        w, loss = train_step(w, x)
        blocked(loss)
        return w

    def blocked(loss: jax.Array) -> None:
        raise exhausted()

    paper_limit.of_a_library(blocked)
    with pytest.raises(RuntimeError) as caught:
        run(w)
    explanation = jaxmem.explain_oom(caught.value, free=False)
    assert explanation.doing == "train_step"
    assert explanation.report is not None
    assert explanation.report.compiled_bytes == explanation.program_bytes
    assert any("loss_fn" in line for line in list(explanation.report.by_source())[:1])
    fix = explanation.fixes[0]
    assert (fix.basis, fix.enough) == ("compiled", True)
    # The result takes the variable of the argument: it may be donated.
    assert re.fullmatch(
        r'train_step = jaxmem\.fit\(train_step, budget="[\d.]+MiB", donate_argnums=0\)', fix.code
    )
    names: dict[str, Any] = {"jaxmem": jaxmem, "train_step": train_step}
    expected = train_step(w, x)[1]
    exec(fix.code, names)
    plan = names["train_step"].plan(w, x)
    assert plan.compiled_bytes <= plan.budget_bytes <= limited - cache.nbytes
    assert plan.recomputed()
    assert fix.saves_bytes == explanation.program_bytes - plan.compiled_bytes
    assert names["train_step"](w, x)[1] == expected


def test_arguments_that_are_expressions_are_not_computed(limited):
    train_step, calls = jax.jit(written), []

    def made() -> jax.Array:
        calls.append(1)
        return arguments()[0]

    def stopped(loss: Any) -> None:
        raise exhausted()

    paper_limit.of_a_library(stopped)
    with pytest.raises(RuntimeError) as caught:
        stopped(train_step(made(), arguments()[1]))
    explanation = jaxmem.explain_oom(caught.value)
    assert len(calls) == 1
    assert explanation.report is None


def test_planning_can_be_left_out(limited):
    explanation = jaxmem.explain_oom(exhausted(), seconds=0)
    assert all(fix.basis != "compiled" for fix in explanation.fixes)


# --- fitted --------------------------------------------------------------------------------------


def test_a_fitted_step_raises_an_error_that_explains_itself(failing, limited, monkeypatch):
    step = jaxmem.fit(written, budget="8MiB", progress=False)
    w, x = arguments()
    before = step.plan(w, x)
    with pytest.raises(DeviceOutOfMemoryError, match="RESOURCE_EXHAUSTED") as caught:
        step(w, x)
    error = caught.value
    assert isinstance(error, jaxmem.JaxmemError)
    assert isinstance(error.__cause__, jax.errors.JaxRuntimeError)
    explanation = error.explanation
    assert (explanation.doing, explanation.program_bytes) == ("step", before.compiled_bytes)
    assert explanation.line.startswith("test_oom.py:")
    held = {h.name for h in explanation.holdings}
    assert {"w", "x"} <= held
    fix = explanation.fixes[0]
    assert re.fullmatch(r'step = jaxmem\.fit\(step\.__wrapped__, budget="[\d.]+[KM]iB"\)', fix.code)
    assert fix.code in str(error)
    names: dict[str, Any] = {"jaxmem": jaxmem, "step": step}
    exec(fix.code, names)
    plan = names["step"].plan(w, x)
    assert plan.compiled_bytes < before.compiled_bytes
    assert fix.saves_bytes == before.compiled_bytes - plan.compiled_bytes
    assert names["step"](w, x)[1] == x.sum()


def test_the_next_call_of_a_step_that_failed_works(failing):
    step = jaxmem.fit(written, budget="8MiB", progress=False)
    w, x = arguments()
    with pytest.raises(DeviceOutOfMemoryError):
        step(w, x)
    assert step(w, x)[1] == x.sum()


def test_no_array_is_alive_because_of_the_error(failing):
    step = jaxmem.fit(written, budget="8MiB", progress=False)

    def train() -> None:
        w, x = arguments()
        refs.extend(map(weakref.ref, (w, x)))
        step(w, x)

    refs: list[Any] = []
    kept: list[BaseException] = []
    try:
        train()
    except DeviceOutOfMemoryError as error:
        kept.append(error)
    # Our own frames keep nothing; the caller's are the caller's, and go with its traceback.
    assert failing[0]() is None
    assert kept[0].__cause__ is not None
    jaxmem.monitor.oom.release.let_go(kept[0])  # pyright: ignore[reportAttributeAccessIssue]
    assert [ref() for ref in refs] == [None, None]


def test_a_method_keeps_none_of_its_arguments(failing):
    class Trainer:
        @jaxmem.fit(budget="8MiB", progress=False, static_argnums=0)
        def step(self, w, x):
            return written(w, x)

    refs: list[Any] = []

    def given() -> tuple[jax.Array, jax.Array]:
        made = arguments()
        refs.extend(map(weakref.ref, made))
        return made

    kept = []
    try:
        Trainer().step(*given())
    except DeviceOutOfMemoryError as error:
        kept.append(error)
    gc.collect()
    assert kept
    assert [ref() for ref in refs] == [None, None]


def test_an_error_of_the_user_is_passed_on_as_it_is():
    class OwnError(Exception):
        pass

    @jaxmem.fit(budget="8MiB", progress=False)
    def step(x):
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
        step(jnp.ones(3))


def test_a_step_that_can_be_resumed_keeps_its_error():
    error = StepInterruptedError("half way", resume=lambda: 1)
    error.__cause__ = exhausted()
    assert failed.out_of_memory(error, lambda: None) is None
    assert "device memory ran out" in error.__notes__[0]
    assert error.resume() == 1


def test_an_explanation_that_fails_hides_nothing(monkeypatch):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("of the explanation")

    monkeypatch.setattr(failed, "explained", broken)
    error = exhausted()
    assert failed.out_of_memory(error, lambda: None) is None
    assert "ZeroDivisionError: of the explanation" in error.__notes__[0]


# --- tracked -------------------------------------------------------------------------------------


def test_a_tracked_block_and_function_raise_it_too():
    with pytest.raises(DeviceOutOfMemoryError, match=r"64\.0TiB more were asked for"):
        with jaxmem.track("block", publish=False):
            jnp.ones(HUGE)

    @jaxmem.track
    def grows(x):
        return jnp.ones(HUGE) + x

    refs = []

    def call() -> None:
        x = jnp.ones(3)
        refs.append(weakref.ref(x))
        grows(x)

    with pytest.raises(DeviceOutOfMemoryError) as caught:
        call()
    with pytest.raises(ValueError, match="mine"):
        with jaxmem.track("block", publish=False):
            raise ValueError("mine")
    jaxmem.explain_oom(caught.value)
    assert refs[0]() is None


# --- other memory, other errors -------------------------------------------------------------------


def test_pinned_memory_that_ran_out_has_its_own_fix():
    error = RuntimeError(
        "RESOURCE_EXHAUSTED: Failed to allocate a 8388608-byte pinned host staging buffer for a "
        "host-to-device transfer."
    )
    explanation = jaxmem.explain_oom(error)
    assert explanation.where == "pinned host"
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=" in explanation.fixes[0].what
    assert "pinned host memory ran out" in explanation.headline


def test_a_program_that_did_not_compile_shows_the_buffers_that_xla_lists():
    text = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 21.95G of 15.48G hbm. Exceeded hbm capacity by 6.47G.\n  1. Size: 2.00G\n"
        '     Operator: op_name="jit(f)/dot" source_file="/x/net.py" source_line=7\n'
        "     Shape: f32[32,4096]\n"
    )
    explanation = jaxmem.explain_oom(RuntimeError(text))
    assert explanation.where == "compile"
    assert "net.py:7" in str(explanation)
    assert "while it was compiled" in explanation.headline
    assert not any("in pieces" in note for note in explanation.notes), "nothing was allocated"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ValueError("no memory of yours"), "ValueError is no out-of-memory error: 'no memory"),
        (KeyError("x"), "KeyError is no out-of-memory error"),
        ("RESOURCE_EXHAUSTED", "explain_oom takes an exception, got str"),
        (RuntimeError, "explain_oom takes an exception, got type"),
    ],
)
def test_what_is_no_such_error_is_refused(given: Any, message: str):
    with pytest.raises(ArgumentError, match=message):
        jaxmem.explain_oom(given)


def test_planning_takes_a_number_of_seconds():
    with pytest.raises(ArgumentError, match="seconds is -1: it takes"):
        jaxmem.explain_oom(exhausted(), seconds=-1)
    with pytest.raises(ArgumentError, match="seconds is 'long'"):
        jaxmem.explain_oom(exhausted(), seconds="long")  # pyright: ignore[reportArgumentType]


def test_the_error_may_be_a_cause_or_one_of_a_group():
    wrapped = RuntimeError("the trainer failed")
    wrapped.__cause__ = exhausted()
    assert jaxmem.explain_oom(wrapped).requested_bytes == 8 * MIB
    group = ExceptionGroup("two", [ValueError("other"), exhausted()])
    assert jaxmem.explain_oom(group).requested_bytes == 8 * MIB


def test_without_an_argument_it_is_the_error_at_hand(monkeypatch):
    try:
        raise exhausted()
    except RuntimeError:
        assert jaxmem.explain_oom().requested_bytes == 8 * MIB
    monkeypatch.delattr("sys.last_value", raising=False)
    monkeypatch.delattr("sys.last_exc", raising=False)
    with pytest.raises(ArgumentError, match="there is no exception to explain"):
        jaxmem.explain_oom()


def test_an_explanation_explained_again_is_itself():
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        with jaxmem.track("block", publish=False):
            raise exhausted()
    assert jaxmem.explain_oom(caught.value) is caught.value.explanation


# --- displays ------------------------------------------------------------------------------------


def test_both_displays_say_the_same_and_hostile_names_are_inert():
    loot = {"<script>alert(1)</script>\x1b[31m": jnp.ones((64, 64))}
    explanation = jaxmem.explain_oom(exhausted())
    assert isinstance(explanation, Explanation)
    text, html = str(explanation), explanation._repr_html_()
    assert "<script>" not in html
    assert "\x1b" not in text + html
    for fix in explanation.fixes:
        assert fix.what[:20] in text.replace("\n", " ")
    assert "live arrays, and who holds them" in text and "live arrays, and who holds them" in html
    assert loot
