"""What people get wrong: each mistake has its own error, which says what to do instead."""

from __future__ import annotations

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.targets import topology

KIB = 2**10
X = jnp.ones((64, 64))
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def double(x):
    return x * 2


def layers(w, x):
    """Ten layers of 512 KiB activations; the arguments are 64 KiB and 512 KiB."""

    def loss(w):
        y = x
        for _ in range(10):
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    return w - 0.1 * jax.grad(loss)(w)


LAYERS_ARGS = (jnp.eye(128), jnp.ones((1024, 128)))


# --- budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("lots", "'lots' is not a size. Use"),
        ("20 apples", "'20 apples' is not a size. Use"),
        ("20G", "'20G' is not a size: G alone could be GiB or GB"),
        ("", "'' is not a size"),
        (0, "0 is a zero size; it must be at least one byte"),
        ("0%", "'0%' is a zero budget"),
        (-1, "-1 is a negative size"),
        ("-2GiB", "'-2GiB' is a negative size"),
        (True, "True is not a size"),
        (float("nan"), "nan is not a size"),
        ([1], r"\[1\] \(list\) is not a size"),
    ],
)
def test_a_budget_that_is_no_size_is_refused_where_it_is_written(budget, message: str):
    with pytest.raises(jaxmem.BudgetError, match=message):
        jaxmem.fit(double, budget=budget)


@pytest.mark.parametrize(
    ("budget", "target", "message"),
    [
        ("1000TiB", None, "is more than cpu has: .* usable"),
        ("141GiB", "h200", r"budget='141GiB' \(141.0GiB\) is more than h200 has"),
        ("101%", "h200", r"budget='101%' .* is more than h200 has"),
    ],
)
def test_a_budget_above_the_device_names_what_the_device_has(budget, target, message: str):
    with pytest.raises(jaxmem.BudgetError, match=message):
        jaxmem.fit(double, budget=budget, target=target).plan(SHAPE)


@pytest.mark.parametrize(("gib", "is_told"), [(18.5, False), (18.9, True)])
def test_an_absent_gpu_may_be_given_more_than_is_counted_on_and_it_is_told(gib, is_told: bool):
    half = jax.ShapeDtypeStruct((int(gib * 2**28),), jnp.float32)
    plan = jaxmem.fit(double, budget="38GiB", target="a100-40", progress=False).plan(half)
    assert plan.budget_bytes == 38 * 2**30 and plan.compiled_bytes == 2 * half.size * 4
    told = [note for note in plan.notes if "XLA_PYTHON_CLIENT_MEM_FRACTION=0.97" in note]
    assert bool(told) == is_told
    with pytest.raises(jaxmem.BudgetError, match=r"'39.5GiB' .* is more than a100-40 has: 37.5GiB"):
        jaxmem.fit(double, budget="39.5GiB", target="a100-40", progress=False).plan(half)


def test_a_budget_that_an_absent_gpu_may_be_given_is_named_as_one():
    half = jax.ShapeDtypeStruct((int(18.9 * 2**28),), jnp.float32)
    fitted = jaxmem.fit(double, target="a100-40", progress=False)
    with pytest.raises(jaxmem.BudgetInfeasibleError, match=r'Use budget="37\.8') as caught:
        fitted.plan(half)
    jaxmem.fit(double, budget=caught.value.smallest_bytes, target="a100-40").plan(half)


def test_an_argument_bigger_than_the_budget_is_named():
    said = []
    fitted = jaxmem.fit(double, budget=8 * KIB, progress=said.append)
    message = r"no plan fits budget=8.0KiB on cpu .*: the smallest peak found for double is 32.0KiB"
    with pytest.raises(jaxmem.BudgetInfeasibleError, match=message) as caught:
        fitted(X)
    assert not said, "it can be told without a compile"
    error = caught.value
    assert (error.budget_bytes, error.smallest_bytes) == (8 * KIB, 32 * KIB)
    assert {(h.name, h.nbytes, h.kind) for h in error.holders} == {
        ("x", 16 * KIB, "argument"),
        ("results of the step", 16 * KIB, "output"),
    }
    assert "its arguments and results alone are 32.0KiB" in str(error)
    assert "donate_argnums=..." in str(error)
    assert jaxmem.fit(double, budget=error.smallest_bytes)(X)[0, 0] == 2


def test_a_budget_that_only_a_smaller_batch_meets_says_so():
    w, x = LAYERS_ARGS
    with pytest.raises(jaxmem.BudgetInfeasibleError, match="or a smaller batch") as caught:
        jaxmem.fit(layers, budget=w.nbytes * 2 + x.nbytes + 100 * KIB, progress=False)(w, x)
    error = caught.value
    assert "layers" in str(error)
    assert "test_bad_input.py" in str(error), "a holder is named by its line"
    assert error.smallest_bytes > error.budget_bytes
    plan = jaxmem.plan(layers, w, x, budget=error.smallest_bytes, progress=False)
    assert plan.compiled_bytes <= error.smallest_bytes
    # Half the batch does fit what the whole one does not.
    half = jaxmem.plan(layers, w, x[:512], budget=error.smallest_bytes - 1, progress=False)
    assert half.compiled_bytes < error.smallest_bytes


# --- targets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["h2oo", "9000xcpu", ""])
def test_an_unknown_target_is_named_with_those_there_are(target: str):
    with pytest.raises(jaxmem.UnknownTargetError, match=r"Known: cpu, .*a100-80, .*h200"):
        jaxmem.fit(double, budget="1MiB", target=target).plan(SHAPE)


def test_a_target_of_another_type():
    with pytest.raises(jaxmem.ArgumentError, match="must be a Target, a name or None, not int"):
        jaxmem.plan(double, SHAPE, budget="1MiB", target=8)


def test_planning_for_a_gpu_without_the_wheels_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(topology, "wheel_versions", dict)
    with pytest.raises(jaxmem.MissingPluginError, match=r"pip install .*jax-cuda13-plugin"):
        jaxmem.plan(double, SHAPE, budget="1MiB", target="h200")


# --- functions that cannot be traced -----------------------------------------------------------


def branches(x):
    if x.sum() > 0:
        return x
    return -x


def leaves_jax(x):
    return np.asarray(x) + 1


def reads_a_number(x):
    return x * float(x[0, 0])


def picks_by_value(x):
    return x[x > 0]


@pytest.mark.parametrize(
    ("step", "line", "cause"),
    [
        (branches, "if x.sum() > 0:", "TracerBoolConversionError"),
        (leaves_jax, "return np.asarray(x) + 1", "TracerArrayConversionError"),
        (reads_a_number, "return x * float(x[0, 0])", "ConcretizationTypeError"),
        (picks_by_value, "return x[x > 0]", "NonConcreteBooleanIndexError"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_function_that_cannot_be_traced_shows_the_users_own_line(step, line, cause, jitted):
    fitted = jaxmem.fit(jax.jit(step) if jitted else step, budget="1MiB")
    with pytest.raises(jaxmem.TraceError, match="static_argnums") as caught:
        fitted(X)
    first, second, *_ = str(caught.value).splitlines()
    number = step.__code__.co_firstlineno + 1
    assert (
        first
        == f"JAX cannot trace {step.__name__} at {__file__}:{number} ({step.__name__}): {line}"
    )
    assert second.strip().startswith(f"{cause}: ")
    assert isinstance(caught.value.__cause__, Exception)


def test_a_result_that_is_no_array():
    def tagged(x):
        return x, "tag"

    with pytest.raises(jaxmem.TraceError, match="tagged returned a str, which JAX cannot return"):
        jaxmem.fit(tagged, budget="1MiB")(X)


def test_a_tracer_that_escaped():
    kept = []

    def keeps(x):
        kept.append(x)
        return x

    def uses(x):
        return x + kept[0]

    jaxmem.fit(keeps, budget="1MiB")(X)
    line = uses.__code__.co_firstlineno + 1
    message = rf"uses at .*test_bad_input.py:{line} \(.*uses\)\n  UnexpectedTracerError: it uses a"
    with pytest.raises(jaxmem.TraceError, match=message):
        jaxmem.fit(uses, budget="1MiB")(X)
    with pytest.raises(jaxmem.TraceError, match="outside of other JAX transformations"):
        jax.jit(lambda y: jaxmem.fit(lambda x: x + y, budget="1MiB")(X))(X)


# --- errors of the step's own ------------------------------------------------------------------


class OutOfData(Exception):
    """An exception that no library knows."""


def raises(x):
    raise OutOfData("epoch 3")


def multiplies(x):
    return x @ jnp.ones((3, 3))


@pytest.mark.parametrize(
    ("step", "kind", "message"),
    [(raises, OutOfData, "epoch 3"), (multiplies, TypeError, "contracting dimensions")],
)
def test_a_step_that_raises_raises_the_same_and_points_at_its_line(step, kind, message):
    fitted = jaxmem.fit(step, budget="1MiB")
    for call in (fitted, fitted.plan, fitted.report):
        with pytest.raises(kind, match=message) as caught:
            call(X)
        assert not isinstance(caught.value, jaxmem.JaxmemError)
        frames = traceback.extract_tb(caught.value.__traceback__)
        own = [f.lineno for f in frames if f.filename == __file__ and f.name == step.__name__]
        assert own == [step.__code__.co_firstlineno + 1]


def test_a_step_that_raises_once_can_be_called_again():
    failing = [True]

    def step(x):
        if failing.pop() if failing else False:
            raise OutOfData
        return x + 1

    fitted = jaxmem.fit(step, budget="1MiB")
    with pytest.raises(OutOfData):
        fitted(X)
    assert fitted(X)[0, 0] == 2


def test_nnx_objects_are_untouched_by_a_step_that_raises():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    kernel = model.kernel[...]

    def spoils(model):
        model.kernel[...] = model.kernel[...] * 2
        raise OutOfData

    with pytest.raises(OutOfData):
        jaxmem.fit(spoils, budget="1MiB")(model)
    assert model.kernel[...] is kernel


# --- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 32), (64, 64, 1)], ids=["size", "rank"])
def test_a_plan_made_for_other_shapes(shape):
    plan = jaxmem.plan(double, SHAPE, budget="1MiB")
    fitted = jaxmem.fit(double, budget="1MiB", plan=plan)
    assert fitted(X)[0, 0] == 2
    message = r"the plan for double \(program .*\) was made for another program or other shapes"
    for call in (fitted, fitted.plan):
        with pytest.raises(jaxmem.PlanMismatchError, match=message) as caught:
            call(jnp.ones(shape))
        assert "double.plan(...)" in str(caught.value), "it says what to do instead"


def test_a_plan_made_for_another_program():
    def triple(x):
        return x * 3

    plan = jaxmem.plan(double, SHAPE, budget="1MiB")
    message = r"the plan for double .* than triple has here"
    with pytest.raises(jaxmem.PlanMismatchError, match=message):
        jaxmem.fit(triple, budget="1MiB", plan=plan)(X)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not a jaxmem plan"),
        ("[]", "plan has schema version 'list'"),
        ('{"schema_version": 0}', "plan has schema version 0, this jaxmem reads 15. Plan again"),
        ('{"schema_version": 15}', "plan file is damaged: function is missing. Plan again"),
        ('{"schema_version": 15, "x": 1}', "plan file is damaged: x is not a field of a plan"),
        ('{"schema_version": true}', "plan has schema version True"),
        ('{"a": 1, "a": 2}', "it says 'a' twice"),
    ],
)
def test_a_plan_file_that_is_not_one(text: str, message: str, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(jaxmem.PlanMismatchError, match=message):
        jaxmem.Plan.load(tmp_path / "plan.json")
