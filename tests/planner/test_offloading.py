"""Which values the search moves to host memory one by one, on lines that are worked out by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem
from jaxmem.planner.candidates import Candidate
from jaxmem.planner.fill import Solution
from jaxmem.planner.offloading import Offloader
from jaxmem.program.ir import Op, Value
from tests.planner.lines import OPAQUE

TURN = ("", 1)
LINK = 1e9
# Bytes and what making them again takes, as a share of the time on the link.
GROUPS = st.lists(st.tuples(st.integers(1, 100), st.floats(0, 2)), min_size=1, max_size=8)


class Paper:
    """Kept bytes add up; what is made again and what is moved takes its time.

    Args:
        groups: for each value its bytes, and what making it takes as a share of its link's time.
        after: of values their operand, which nothing else reads.
    """

    def __init__(self, groups: list[tuple[int, float]], after: dict[str, str] | None = None):
        op, self.after = Op(OPAQUE, (), ()), after or {}
        value = Value(jax.core.ShapedArray((1,), jnp.float32), "v")
        self.values = {
            str(n): Candidate(str(n), op, value, size, size * share / LINK, str(n))
            for n, (size, share) in enumerate(groups)
        }

    def evaluate(self, keep, offload) -> Solution:
        kept, away = keep[TURN], offload.get(TURN, frozenset())
        assert away <= kept
        again = self.values.keys() - set(self.after.values()) - kept
        again |= {self.after[name] for name in again if name in self.after} - kept
        moved = sum(self.values[name].nbytes for name in away)
        device = sum(self.values[name].nbytes for name in kept - away)
        seconds = 1 + sum(self.values[n].seconds for n in again) + 0.01 * moved / LINK
        return Solution(keep, device, seconds, offload=offload, host_bytes=moved)

    def offloader(self, host_bytes: int = 10**6) -> Offloader:
        groups = {name: [(TURN, value)] for name, value in self.values.items()}
        return Offloader(groups, self.evaluate, host_bytes, LINK)

    def fastest(self, limit: int, host_bytes: int = 10**6) -> Solution:
        offloader = self.offloader(host_bytes)
        everything, nothing = (
            self.evaluate({TURN: frozenset(kept)}, {}) for kept in (self.values, ())
        )
        found = offloader.fastest(everything, [nothing], limit)
        assert found is not None  # Nothing kept fits everywhere.
        return found

    def away(self, solution: Solution) -> list[Candidate]:
        return [self.values[name] for name in solution.offload.get(TURN, ())]


@given(GROUPS, st.integers(0, 300), st.integers(0, 300))
def test_what_is_made_again_at_once_is_not_moved(groups, limit, host_bytes):
    paper = Paper(groups)
    found = paper.fastest(limit, host_bytes)
    assert found.temp_bytes <= limit and found.host_bytes <= host_bytes
    pruned = paper.offloader().worthwhile(found, limit)
    assert pruned.temp_bytes <= limit and pruned.host_bytes <= found.host_bytes
    assert all(v.seconds * LINK >= 0.1 * v.nbytes * (1 - 1e-9) for v in paper.away(pruned))
    lost = set(found.offload.get(TURN, ())) - set(pruned.offload.get(TURN, ()))
    gains = sum(0.1 * paper.values[name].nbytes / LINK for name in lost)
    assert pruned.seconds <= found.seconds + gains + 1e-9


@given(GROUPS, st.integers(0, 300))
def test_what_takes_long_to_make_is_moved_and_stays_so(groups, limit):
    paper = Paper([(size, max(share, 0.2)) for size, share in groups])
    found = paper.fastest(limit)
    assert found.keep[TURN] == paper.values.keys()
    assert paper.offloader().worthwhile(found, limit) == found


def test_what_is_quick_but_comes_of_something_slow_stays_moved():
    """A product and its tanh, all that is kept of both: without it the product is made again."""
    paper = Paper([(100, 0.5), (100, 0.02)], after={"1": "0"})
    only = paper.evaluate({TURN: frozenset("1")}, {TURN: frozenset("1")})
    assert paper.offloader().worthwhile(only, 50) == only
    both = paper.evaluate({TURN: frozenset("01")}, {TURN: frozenset("01")})
    pruned = paper.offloader().worthwhile(both, 50)
    assert pruned.keep[TURN] == pruned.offload[TURN] == frozenset("0")


WIDTH, LAYERS, ROWS = 1024, 4, 8192


def step(params, x):
    """Layers in bfloat16 whose weights are cast for them: the casts are large and quickly made."""

    def loss(params):
        y = x
        for w in params:
            y = y + jnp.tanh(y @ w["up"].astype(y.dtype)) @ w["down"].astype(y.dtype)
        return (y.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value


@pytest.fixture(scope="module")
def fitted():
    sides = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layer = {name: jax.ShapeDtypeStruct(side, jnp.float32) for name, side in sides.items()}
    args = [dict(layer) for _ in range(LAYERS)], jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    target = dataclasses.replace(jaxmem.Target("h200"), flops={"float32": 1e13, "bfloat16": 2e13})

    def planned(**settings):
        run = jaxmem.fit(step, donate_argnums=0, target=target, progress=False, **settings)
        return run.plan(*args)

    return planned


@pytest.mark.wide
def test_casts_of_weights_are_made_again_and_layers_moved(fitted):
    everything = fitted().compiled_bytes
    plan = fitted(budget=int(0.8 * everything), host_budget="8GiB")
    assert plan.compiled_bytes <= 0.8 * everything
    moved = [d for d in plan.decisions if d.offloaded]
    assert moved and not [d for d in moved if "convert" in d.primitive]
