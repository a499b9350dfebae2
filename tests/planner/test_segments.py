"""Loops in segments: the same numbers, the square root of the bytes, one more forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.planner.schedule import Keep
from jaxmem.planner.search import Search
from jaxmem.planner.segments import misfit, refusal, segment_choices, splittable, why_whole
from jaxmem.program.ir import Block
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime import verify
from jaxmem.targets import Compiled, Target, compile_for
from jaxmem.targets.options import memory_schedules
from tests.planner.lines import random_keep, search
from tests.problems import PROBLEMS, assert_same, large, pure
from tests.problems.transformers import Form, Shape


def smallest(found: Search) -> Keep:
    """Inside loops nothing but what is carried; outside of them everything."""
    return {
        choice.turn: frozenset() if choice.turn[0] else frozenset(c.name for c in choice.candidates)
        for choice in found.choices
    }


def compiled(found: Search, block: Block, target: str = "cpu", level: int | None = 0) -> Compiled:
    options = dict(memory_schedules(Target(target))[0])
    if target == "cpu" and level is not None:
        options["xla_backend_optimization_level"] = str(level)
    return compile_for(target, as_function(block), found.program.avals(), options=options)


def check_same(found: Search, leaves: list, keep: Keep, counts: tuple[int, ...]) -> Block:
    """Every pair of scans that can be split in segments is, and the results are the same."""
    pairs = splittable(found.nest)
    segments = {path: counts for path, length in pairs.items() if not misfit(length, counts)}
    assert segments
    block = found.scheduler.schedule(keep, segments=segments)
    reference = compiled(found, found.program.block).executable(*leaves)
    assert_same(reference, compiled(found, block).executable(*leaves))
    return block


# --- the same results --------------------------------------------------------------------------

PROBLEM_COUNTS = {
    "lstm": (5,),  # 64 steps: 12 in each segment, and 4
    "scan_many_carries": (4, 3),
    "accumulation": (2,),  # a pair inside a loop
}


@pytest.mark.parametrize("name", PROBLEM_COUNTS)
def test_train_steps_compute_the_same(name: str):
    step = pure(PROBLEMS[name])
    found = search(step.function, *step.args, host=True)
    leaves = [*found.program.consts, *jax.tree.leaves(step.args)]
    check_same(found, leaves, random_keep(found, len(name)), PROBLEM_COUNTS[name])


def layer(x, w):
    return x + jnp.tanh(x @ w)


def with_outputs(w, x, scale):
    """Stacked results that are used, a constant, and slices."""
    last, norms = lax.scan(lambda x, w: (layer(x, w) * scale, (x**2).sum()), x, w)
    return (last**2).mean() + (norms * jnp.arange(len(norms))).sum() * 1e-3


def with_keys(w, x, scale):
    """A key that is split in every iteration, and a counter."""

    def body(carry, w):
        x, key, count = carry
        key, drawn = jax.random.split(key)
        keep = jax.random.bernoulli(drawn, 0.9, x.shape)
        return (jnp.where(keep, layer(x, w), 0) * scale, key, count + 1), count

    start = (x, jax.random.key(3), jnp.int32(2))
    (last, key, count), counts = lax.scan(body, start, w)
    return (last**2).mean() + jax.random.uniform(key) * count + counts.sum()


def without_slices(w, x, scale):
    """No slices; the weight is a constant, and one of the carries is handed on as it is."""

    def body(carry, _):
        x, scale = carry
        return (layer(x, w[0]) * scale, scale), None

    return (lax.scan(body, (x, scale), None, length=len(w))[0][0] ** 2).mean()


def two_carries(w, x, scale):
    """A carry that is also a residual and one that is summed up and never read."""

    def body(carry, w):
        x, y, total = carry
        return (y / 2 + jnp.sin(x) / 4, layer(y, w) * scale, total + x.sum()), None

    x, y, total = lax.scan(body, (x, x + 1, 0.0), w)[0]
    return (x * y).mean() + total * 1e-3


def with_dropout(w, x, scale):
    """Keys among the slices, some iterations unrolled."""

    def body(x, given):
        w, key = given
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), layer(x, w), 0) * scale, None

    keys = jax.random.split(jax.random.key(5), len(w))
    return (lax.scan(body, x, (w, keys), unroll=3)[0] ** 2).mean()


def backwards(w, x, scale):
    return (lax.scan(lambda x, w: (layer(x, w) * scale, x), x, w, reverse=True)[1] ** 2).mean()


def nested(w, x, scale):
    """A pair inside the joint iteration of a pair: both are split."""

    def outer(x, w):
        return lax.scan(lambda x, s: (layer(x, w) * s, None), x, scale * jnp.ones(6))[0], x

    x, xs = lax.scan(outer, x, w)
    return (x**2).mean() + xs.mean()


FORMS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (with_outputs, with_keys, without_slices, two_carries, with_dropout, backwards, nested)
}


def stepping(form: str, length: int) -> tuple[Search, list]:
    """The search over the gradient of a form, and arrays."""
    rng = np.random.default_rng(length)
    w = jnp.asarray(rng.standard_normal((length, 16, 16)) / 16, jnp.float32)
    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
    args = (w, x, jnp.float32(0.97))
    found = search(jax.value_and_grad(FORMS[form], (0, 1, 2)), *args, host=True)
    return found, [*found.program.consts, *args]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("form", "length", "counts"),
    [
        ("with_outputs", 13, (3,)),
        ("with_outputs", 12, (4,)),
        ("with_outputs", 23, (2, 2, 2)),
        ("with_keys", 13, (3,)),
        ("with_keys", 12, (2, 3)),
        ("without_slices", 13, (2, 3)),
        ("two_carries", 12, (3,)),
        ("with_dropout", 13, (2,)),
        ("backwards", 13, (3, 2)),
        ("nested", 13, (2, 2)),
    ],
)
def test_loops_of_every_form_compute_the_same(form: str, length: int, counts: tuple[int, ...]):
    found, leaves = stepping(form, length)
    keep = {} if form == "two_carries" else smallest(found)
    check_same(found, leaves, keep, counts)


# --- what runs how often -----------------------------------------------------------------------


def products(jaxpr: Any) -> int:
    """Matrix products that a program runs, those in loops as often as these go round."""
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        total += eqn.primitive.name == "dot_general"
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            total += times * products(inner) if hasattr(inner, "eqns") else 0
    return total


def chain(length: int, width: int, rows: int, dtype: Any = jnp.float32) -> tuple:
    """An MLP with residual connections as a scan over layers, and its arguments."""

    def step(w, x):
        def loss(w):
            def body(x, w):
                return x + jnp.tanh(x @ w[0]) @ w[1], None

            return jnp.square(lax.scan(body, x, w)[0].astype(jnp.float32)).mean()

        return jax.value_and_grad(loss)(w)

    up = jax.ShapeDtypeStruct((length, width, 4 * width), dtype)
    down = jax.ShapeDtypeStruct((length, 4 * width, width), dtype)
    return step, ((up, down), jax.ShapeDtypeStruct((rows, width), dtype))


@pytest.mark.parametrize(
    ("length", "counts", "passes"),
    [
        (64, (8,), 64),
        (64, (4, 4), 2 * 64),
        (47, (7,), 47),  # six in each, and five that are run again by themselves
        (47, (5, 3), 45 + 47),  # the two left over go through no inner segments
    ],
)
def test_the_forward_pass_runs_again_as_often_as_there_are_levels(
    length: int, counts: tuple[int, ...], passes: int
):
    step, args = chain(length, 8, 8)
    found = search(step, *args)
    (path,) = splittable(found.nest)
    schedules = [found.scheduler.schedule({}, segments=s) for s in ({}, {path: counts})]
    flat = (*args[0], args[1])
    plain, parted = (products(jax.make_jaxpr(as_function(b))(*flat)) for b in schedules)
    assert plain == (2 + 4) * length, "two products forward and four backward"
    assert parted == plain + 2 * passes


# --- bytes -------------------------------------------------------------------------------------

# On an absent GPU the workspace of a product, 32 MiB, must be small beside the carries.
SIZES = {"cpu": (64, 1024, jnp.float32), "h200": (1024, 32768, jnp.bfloat16)}


def bytes_of(target: str, length: int, counts: tuple[int, ...]) -> tuple[int, int]:
    """Simulated and compiled temporary bytes of the chain, with nothing kept but carries."""
    step, args = chain(length, *SIZES[target])
    found = search(step, *args, host=target == "cpu")
    (path,) = splittable(found.nest)
    block = found.scheduler.schedule(smallest(found), segments={path: counts})
    executable = compiled(found, block, target, level=None)
    assert verify.undone(block, executable.hlo_text()) == ()
    return found.simulator.step(block).temp_bytes, executable.memory.temp_bytes


@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize(("length", "counts"), [(64, (8,)), (64, (4, 4)), (47, (7,))], ids=str)
def test_simulated_bytes_are_compiled_bytes(target: str, length: int, counts: tuple[int, ...]):
    simulated, made = bytes_of(target, length, counts)
    assert simulated == pytest.approx(made, rel=0.1)
    width, rows, dtype = SIZES[target]
    carry = width * rows * jnp.dtype(dtype).itemsize
    assert made < 0.6 * length * carry, "kept whole, at least every carry stays"


def test_four_times_the_layers_take_twice_the_bytes():
    (_, small), (_, large) = (bytes_of("h200", n, (math.isqrt(n),)) for n in (36, 144))
    assert large < 2.1 * small
    (_, small), (_, large) = (bytes_of("h200", n, ()) for n in (36, 144))
    assert large > 3.3 * small


@pytest.mark.slow  # two compiles of attention for a GPU; the MLP above is the fast one of its kind
def test_a_transformer_saves_what_is_simulated():
    """64 layers with attention, trained by AdamW on an absent H200."""
    shape = Shape(layers=64, d_model=1024, heads=8, vocab=1024, batch=32, sequence=1024)
    step, args = large.make(Form(), shape)
    found = search(step, *args)
    (path,) = splittable(found.nest)
    blocks = [
        found.scheduler.schedule(smallest(found), segments={path: counts}) for counts in ((), (8,))
    ]
    made = [compiled(found, block, "h200").memory.temp_bytes for block in blocks]
    simulated = [found.simulator.step(block).temp_bytes for block in blocks]
    assert simulated[0] - simulated[1] == pytest.approx(made[0] - made[1], rel=0.1)
    carry = 2 * shape.batch * shape.sequence * shape.d_model
    assert made[0] - made[1] > 40 * carry, "64 carries were kept, and now 8 and 8"


# --- what stays whole --------------------------------------------------------------------------


def loss_of(body: Callable, length: int = 8) -> Search:
    def step(w, x):
        def loss(w):
            return (lax.scan(lambda x, w: (body(x, w), None), x, w)[0] ** 2).sum()

        return jax.grad(loss)(w)

    return search(step, jnp.ones((length, 4, 4)), jnp.ones((4, 4)))


def printing(x, w):
    jax.debug.callback(lambda x: None, x[0, 0])
    return layer(x, w)


@pytest.mark.parametrize(
    ("body", "length", "why"),
    [
        (layer, 3, "it has 3 iterations"),
        (printing, 8, "may not be run again: debug_"),
    ],
    ids=("short", "callback"),
)
def test_what_stays_whole_says_why(body: Callable, length: int, why: str):
    found = loss_of(body, length)
    ((pair, _),) = found.nest.pairs
    assert why in why_whole(found.nest.block, pair)
    assert splittable(found.nest) == {}
    with pytest.raises(ValueError, match="stays whole"):
        found.scheduler.schedule({}, segments={pair.joint.path: (2,)})


def test_segments_that_cannot_be():
    found = loss_of(layer)
    (path,) = splittable(found.nest)
    for counts in ((1,), (5,), (2, 3), (0,), (-2,)):
        with pytest.raises(ValueError, match="8 iterations cannot be cut into segments"):
            found.scheduler.schedule({}, segments={path: counts})
    with pytest.raises(ValueError, match="there is no pair of scans '9"):
        found.scheduler.schedule({}, segments={"9+9": (2,)})
    assert not refusal(found.nest, {path: (2, 2)})
    assert found.scheduler.schedule({}, segments={path: ()}) is found.program.block


def test_every_choice_can_be_made():
    for length in range(300):
        choices = segment_choices(length)
        assert bool(choices) == (length >= 4)
        assert not any(misfit(length, counts) for counts in choices)
        if length >= 4:
            segments, left = min(((c[0], length // c[0]) for c in choices if len(c) == 1), key=sum)
            assert segments + left <= 2.5 * math.sqrt(length), "near the square root"
        assert any(len(c) == 2 for c in choices) == (length >= 64)


def test_schedules_with_segments_are_the_same_whatever_was_scheduled_before():
    found, leaves = stepping("nested", 12)
    first, second = splittable(found.nest)
    keep = smallest(found)
    fresh, _ = stepping("nested", 12)
    for segments in ({first: (2,)}, {second: (3,)}, {}, {first: (3,), second: (2,)}):
        found.scheduler.schedule(keep, segments=segments)
        found.scheduler.schedule({}, segments=segments)
    segments = {first: (3,), second: (2,)}
    texts = [
        str(
            jax.make_jaxpr(as_function(s.scheduler.schedule(smallest(s), segments=segments)))(
                *leaves
            )
        )
        for s in (found, fresh)
    ]
    assert texts[0] == texts[1]


def test_a_segment_that_xla_did_not_run_again_is_named():
    step, args = chain(64, 64, 64)
    found = search(step, *args, host=True)
    (path,) = splittable(found.nest)
    block = found.scheduler.schedule({}, segments={path: (4, 4)})
    text = compiled(found, block).hlo_text()
    assert verify.undone(block, text) == ()
    for depth in (1, 2):
        without = [line for line in text.splitlines() if f"segments{depth}" not in line]
        merged = verify.undone(block, "\n".join(without))
        assert [op.name for op in merged] == ["dot_general"] * 2
        assert not any(op.recompute for op in merged), "they are the user's own operations"
