"""Who holds an array is found, by the name that the user gave, and nothing is kept by looking."""

from __future__ import annotations

import collections
import dataclasses
import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxmem.monitor.arrays import made_at
from jaxmem.monitor.holders import Holding, holdings, stacks

OF_MODULE: dict[str, jax.Array] = {}


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class State:
    params: Any
    step: int = 0


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: Any):
        self.kept = kept


def array(seed: int = 0) -> jax.Array:
    return jnp.full((8, 8), float(seed))


def held(*arrays: jax.Array) -> tuple[Holding, ...]:
    return found(arrays)


def found(arrays: Sequence[jax.Array]) -> tuple[Holding, ...]:
    """However busy the machine is."""
    return holdings(arrays, stacks(), most_seconds=100.0)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda a: a, "found"),
        (lambda a: [a], "found[0]"),
        (lambda a: {"w": a}, "found['w']"),
        (lambda a: Pair(1, a), "found.right"),
        (lambda a: State({"w": [None, a]}), "found.params['w'][1]"),
        (lambda a: Slotted(a), "found.kept"),
        (lambda a: collections.deque([a]), "found[0]"),
        (lambda a: State(State({"deep": (a,)})), "found.params.params['deep'][0]"),
    ],
)
def test_the_path_to_an_array_is_how_python_reaches_it(wrap, path: str):
    made = array()
    found = wrap(made)
    (holding,) = held(made)
    names = {"made": made, "found": found}
    assert holding.largest in ("made", path)
    assert eval(holding.largest, names) is made


def test_a_list_of_many_is_one_holder_of_all():
    leaked = [array(n) for n in range(5)]
    (holding,) = held(*leaked)
    assert (holding.name, holding.count, holding.container) == ("leaked", 5, "list")
    assert holding.nbytes == 5 * 8 * 8 * 4
    assert holding.scope == "test_a_list_of_many_is_one_holder_of_all"
    assert holding.source.startswith("test_holders.py:")


def test_the_holder_is_the_innermost_object_that_has_most():
    trainer = State({"cache": {"features": [array(n) for n in range(20)]}, "bias": jnp.ones(2)})
    (holding,) = held(*trainer.params["cache"]["features"], trainer.params["bias"])
    assert holding.name == "trainer.params['cache']['features']"
    assert (holding.count, holding.container) == (20, "list")


def test_variables_of_callers_and_of_modules_are_found():
    def inner(parameter: jax.Array) -> tuple[Holding, ...]:
        return found([parameter, OF_MODULE["w"]])

    mine = array(2)
    OF_MODULE["w"] = array(1)
    try:
        names = {h.name: h.scope for h in inner(mine)}
    finally:
        OF_MODULE.clear()
    # The caller's name, not the parameter's: letting go of that would free nothing.
    assert names == {
        "mine": "test_variables_of_callers_and_of_modules_are_found",
        "OF_MODULE['w']": "",
    }


def test_modules_of_flax_are_walked():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    kernel = model.kernel.get_raw_value()
    del kernel
    (holding,) = found([model.kernel.get_raw_value()])
    assert holding.name.startswith("model.kernel")


def test_what_only_a_closure_has_is_described():
    def make():
        hidden = array(3)
        return lambda: hidden, weakref.ref(hidden)

    read, ref = make()
    (holding,) = found([ref()])
    assert holding.name == "read (closure: hidden)"
    assert not holding.reachable
    assert read() is ref()


def test_what_nothing_leads_to_is_described_too():
    hidden = iter([array(4)])  # An iterator shows nothing of what it goes through.
    arrays = [a for a in jax.live_arrays() if a.shape == (8, 8) and float(a[0, 0]) == 4.0]
    (holding,) = holdings([arrays.pop()], stacks(), most_seconds=100.0)
    assert (holding.name, holding.count) == ("a list of 1 without a name", 1)
    assert not holding.reachable
    assert next(hidden)[0, 0] == 4.0


def test_looking_keeps_no_array_alive():
    def run() -> weakref.ref[jax.Array]:
        mine = array(5)
        held(mine)
        ref = weakref.ref(mine)
        del mine
        assert ref() is None, "a copy of the variables was left in the frame"
        return ref

    run()
    gc.collect()


def test_cycles_and_hostile_names_are_no_problem():
    loop: dict[Any, Any] = {"<script>\x1b[31m": array(6)}
    loop["self"] = loop
    (holding,) = held(loop["<script>\x1b[31m"])
    assert holding.count == 1


class Outside:
    """As a proxy of what is only there while a request is handled."""

    @property
    def __class__(self):
        raise RuntimeError("outside of a request")

    def __getattr__(self, name: str):
        raise RuntimeError("outside of a request")


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


OUTSIDE = [Outside(), {Unprintable(): Outside()}]


def test_objects_that_cannot_be_looked_into_are_no_problem():
    mine = [array(8)]
    assert held(mine[0])[0].name == "mine[0]"
    assert OUTSIDE


def test_looking_ends_in_time():
    many = [{"n": n, "more": [n]} for n in range(60_000)]
    hidden = many[-1]["more"]
    hidden.append(array(7))
    started = time.perf_counter()
    (holding,) = holdings([hidden[1]], stacks(), most_seconds=0.0)
    assert time.perf_counter() - started < 20
    assert holding.name == "unknown, looking took too long" and not holding.reachable
    assert many


def test_an_array_knows_its_line():
    assert made_at(jnp.ones(3) + 1).startswith("test_holders.py:")
    assert made_at("no array") == ""
