"""Straight lines of operations to simulate and schedule: drawn at random, or traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxmem.planner.schedule import Turn
from jaxmem.planner.search import Search
from jaxmem.program.calling import Caller
from jaxmem.program.cost import Rates
from jaxmem.program.ir import Block, Op, Program, Value
from jaxmem.program.loops import Nest

RATES = Rates({"float32": 1e12}, 1e11)
# A kernel of its own that nothing fuses into; its variables do not matter, only its primitive.
# A call into nowhere, which costs the bytes of its operands and results.
_NOWHERE = jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct((4,), jnp.float32))
OPAQUE = jax.make_jaxpr(_NOWHERE)(jnp.zeros(4)).eqns[0]
# What is fused into its readers.
ELEMENTWISE = jax.make_jaxpr(jnp.add)(jnp.zeros(4), jnp.zeros(4)).eqns[0]


@dataclass(frozen=True)
class Line:
    """A random line of opaque operations.

    Attributes:
        block: the operations.
        turn: where its late part starts.
        keys: of the values made before the turn.
    """

    block: Block
    turn: int
    keys: tuple[str, ...]

    @property
    def nest(self) -> Nest:
        """The line as the scheduler takes it."""
        return Nest(self.block, None, (), ())


@st.composite
def lines(draw: Callable[..., Any], most: int = 12, *, mixed: bool = False) -> Line:
    """Lines of up to ``most`` operations with one or two results each, of 1 to 9 floats.

    With ``mixed`` some are element-wise, and have one result.
    """
    sizes = st.integers(1, 9)
    values = [_value(draw(sizes), f"x{n}") for n in range(draw(st.integers(1, 2)))]
    inputs = tuple(values)
    ops = []
    for index in range(draw(st.integers(3, most))):
        operands = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        eqn = draw(st.sampled_from((OPAQUE, ELEMENTWISE))) if mixed else OPAQUE
        count = draw(st.sampled_from((1, 1, 2))) if eqn is OPAQUE else 1
        results = [_value(draw(sizes), f"v{index}.{n}") for n in range(count)]
        ops.append(Op(eqn, tuple(operands), tuple(results)))
        values.extend(results)
    made = values[len(inputs) :]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    turn = draw(st.integers(1, len(ops) - 1))
    keys = tuple(str(v.key) for op in ops[:turn] for v in op.outputs)
    return Line(Block("", inputs, tuple(ops), tuple(outputs)), turn, keys)


def _value(size: int, key: str) -> Value:
    return Value(jax.ShapeDtypeStruct((size,), jnp.float32), key)


def program(step: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Program:
    """A step, traced."""
    caller = Caller(step, donate)
    return caller.trace(caller.take(args, {})).program


def search(step: Callable[..., Any], *args: Any, host: bool = False) -> Search:
    """The search over a step, with rates that are the same on every machine."""
    return Search(program(step, *args), RATES, host=host)


def random_keep(search: Search, seed: int) -> dict[Turn, frozenset[str]]:
    """For every turn of a program, a random part of what may be kept across it."""
    rng = np.random.default_rng(seed)
    keep = {}
    for choice in search.choices:
        share = rng.choice([0.0, 0.2, 0.6])
        names = sorted({c.name for c in choice.candidates})
        keep[choice.turn] = frozenset(name for name in names if rng.random() < share)
    return keep
