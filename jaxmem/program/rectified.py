"""Masks of rectified values, read from what is rectified.

The gradient of ``relu(x)`` asks where ``x > 0``. That is where ``relu(x) > 0``, for every ``x``,
NaN and both zeros among them, and what comes after reads ``relu(x)`` anyway, so ``x`` need not be
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from jaxmem.program.ir import Atom, Value


class Rectified:
    """What ``max(x, 0)`` is called, for each ``x`` that was made so far.

    Inputs are left out: they are there in any case.
    """

    def __init__(self):
        self._made: set[Value] = set()
        self._results: dict[tuple[Value, Any], Value] = {}

    def inputs(self, eqn: jex.JaxprEqn, inputs: Sequence[Atom]) -> tuple[Atom, ...]:
        """The operands of an equation: those of ``x > 0`` are ``max(x, 0)`` and 0."""
        if eqn.primitive.name == "gt" and isinstance(inputs[0], Value) and _is_zero(inputs[1]):
            return self._results.get((inputs[0], _where(eqn)), inputs[0]), inputs[1]
        return tuple(inputs)

    def add(self, eqn: jex.JaxprEqn, inputs: Sequence[Atom], outputs: Sequence[Value]) -> None:
        """See an equation."""
        self._made.update(outputs)
        if eqn.primitive.name != "max":
            return
        for x, other in (inputs, inputs[::-1]):
            if isinstance(x, Value) and x in self._made and _is_zero(other):
                self._results.setdefault((x, _where(eqn)), outputs[0])


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 0)


def _where(eqn: jex.JaxprEqn) -> Any:
    """What computes it: the device, or the host (``compute_on``)."""
    return getattr(eqn.ctx, "compute_type", None)
