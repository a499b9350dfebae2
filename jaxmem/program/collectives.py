"""What a collective sends: bytes that leave each device, and the steps they take.

Ring algorithms, which are optimal in bytes (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations"), with the step counts and latencies of NCCL's own model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxmem.program.ir import aval_bytes

# The ring algorithm with the Simple protocol over NVLink, `baseLat` and `hwLat` of NCCL 2.18's
# src/graph/tuning.cc. Links other than NVLink are up to three times slower to answer.
_BASE_SECONDS = 8.4e-6
_STEP_SECONDS = 3.4e-6

_ALL_REDUCE = frozenset("psum psum2 psum_invariant pmax pmin unreduced_psum".split())
_ALL_REDUCE |= {"unreduced_pmax", "unreduced_pmin"}
_ALL_GATHER = frozenset("all_gather all_gather_invariant all_gather_reduced pgather".split())
_SCATTER = frozenset("reduce_scatter psum_scatter unreduced_reduce_scatter".split())
_EXCHANGE = frozenset("all_to_all ragged_all_to_all".split())
_WHOLE = frozenset("ppermute collective_permute pbroadcast pbroadcast_dynamic psend".split())
_RECEIVE = frozenset(["precv"])
_PLAIN = _ALL_REDUCE | _ALL_GATHER | _SCATTER | _EXCHANGE | _WHOLE | _RECEIVE
# Newer JAX splits a collective in two; the first half says what is sent.
COLLECTIVES = _PLAIN | {f"{name}_{half}" for name in _PLAIN for half in ("start", "done")}

Axes = Mapping[str, int]


class Sent(NamedTuple):
    """What each device of a collective sends.

    Attributes:
        nbytes: bytes that leave the device.
        seconds: time before the first byte counts: the start, and one latency for each step.
    """

    nbytes: float
    seconds: float


def sent(eqn, axes: Axes) -> Sent | None:
    """What a collective sends from each device; ``None`` for an equation that is none.

    Of ``n`` devices with ``b`` bytes each, every one sends ``2 (n - 1) / n * b`` to reduce,
    ``(n - 1) b`` to gather, ``(n - 1) / n * b`` to reduce and scatter or to exchange, and ``b`` to
    pass on. Where ``n`` is not known it is taken for large: ``2 b``, what is gathered, and ``b``.

    Args:
        eqn: the equation.
        axes: sizes of the mesh axes around it, by name.
    """
    name = eqn.primitive.name
    if name not in COLLECTIVES:
        return None
    if name in _RECEIVE or name.endswith("_done"):
        return Sent(0.0, 0.0)
    name = name.removesuffix("_start")
    count = devices(eqn.params, axes)
    if count == 1:
        return Sent(0.0, 0.0)
    given = float(sum(aval_bytes(v.aval) for v in eqn.invars))
    share = 1.0 if count is None else (count - 1) / count
    steps = 1 if count is None else count - 1
    if name in _ALL_REDUCE:
        return _counted(2 * share * given, 2 * steps)
    if name in _ALL_GATHER:
        made = float(sum(aval_bytes(v.aval) for v in eqn.outvars))
        return _counted(share * made, steps)
    if name in _WHOLE:
        return _counted(given, 1)
    return _counted(share * given, steps)


def reducing(nbytes: float, devices: int) -> Sent:
    """What each of ``devices`` sends to add up ``nbytes`` that each of them has."""
    return _counted(2 * (devices - 1) / devices * nbytes, 2 * (devices - 1))


def gathering(nbytes: float, devices: int) -> Sent:
    """What each sends so that all have the ``nbytes`` that they have parts of."""
    return _counted((devices - 1) / devices * nbytes, devices - 1)


def scattering(nbytes: float, devices: int) -> Sent:
    """What each sends to add up ``nbytes`` that each has, and keep a part of the sum."""
    return gathering(nbytes, devices)


def _counted(nbytes: float, steps: int) -> Sent:
    return Sent(nbytes, _BASE_SECONDS + steps * _STEP_SECONDS)


def devices(params: Mapping, axes: Axes) -> int | None:
    """Devices in each group of a collective; ``None`` where its parameters do not tell."""
    if groups := params.get("axis_index_groups"):
        return len(groups[0])
    if isinstance(size := params.get("axis_size"), int):
        return size
    names = params.get("axis_name", params.get("axes", ()))
    names = names if isinstance(names, tuple | list | frozenset) else (names,)
    # A positional axis is summed on the device itself.
    named = [name for name in names if not isinstance(name, int)]
    sizes = [axes.get(name) for name in named]
    return None if None in sizes else math.prod(size for size in sizes if size)


def within(eqn, axes: Axes) -> Axes:
    """Sizes of the mesh axes inside an equation."""
    mesh = eqn.params.get("mesh")
    return {**axes, **getattr(mesh, "shape", {})} if mesh is not None else axes
