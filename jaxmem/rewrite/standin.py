"""Programs without their callbacks, to compile for a GPU that is not there.

A callback is lowered with an address in this process, which XLA cannot make for a device that
does not exist. For memory it is enough that something produces its results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jaxmem.program.ir import Block, Op, Value
from jaxmem.program.primitives import inner_jaxprs
from jaxmem.targets.compiling import runs_here
from jaxmem.targets.target import Target

_CALLBACKS = frozenset(["debug_callback", "debug_print", "io_callback", "pure_callback"])


def has_callbacks(block: Block) -> bool:
    """Whether anything in ``block`` calls back into Python."""
    return any(
        _holds(op.eqn) if op.loop is None else has_callbacks(op.loop.body) for op in block.ops
    )


def compilable(block: Block, target: Target | None) -> Block:
    """``block``, without its callbacks where the target is not here; ``None`` is this machine."""
    if target is None or not has_callbacks(block) or runs_here(target):
        return block
    return without_callbacks(block)


def without_callbacks(block: Block) -> Block:
    """``block`` with zeros in the place of what its callbacks return."""
    ops: list[Op] = []
    for op in block.ops:
        if op.name in _CALLBACKS:
            ops.extend(_zero_op(value) for value in op.outputs)
        elif op.loop is not None and has_callbacks(op.loop.body):
            loop = replace(op.loop, body=without_callbacks(op.loop.body), rewritten=True)
            ops.append(op.with_loop(loop))
        elif op.loop is None and not (op.barrier or op.transfer) and _holds(op.eqn):
            eqn = _without(op.eqn)
            ops.append(Op(eqn, op.inputs, op.outputs, None, op.recompute, origin=op.origin))
        else:
            ops.append(op)
    return Block(block.path, block.inputs, tuple(ops), block.outputs)


def _holds(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in _CALLBACKS or any(
        _holds(inner) for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns
    )


def _zeros(aval: Any) -> jex.JaxprEqn:
    """An equation that makes zeros; ``full`` of a scalar is a literal and no equation at all."""
    zero = np.zeros((), aval.dtype)
    make = jax.lax.full if aval.shape else lambda _, value: jax.lax.optimization_barrier(value)
    return jax.make_jaxpr(lambda: make(aval.shape, zero))().eqns[-1]


def _zero_op(value: Value) -> Op:
    eqn = _zeros(value.aval)
    literals = tuple(atom for atom in eqn.invars if isinstance(atom, jex.Literal))
    return Op(eqn, literals, (value,))


def _without(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    params = {name: _param(param) for name, param in eqn.params.items()}
    inner = [e for param in params.values() for jaxpr in _jaxprs(param) for e in jaxpr.eqns]
    return eqn.replace(params=params, effects=frozenset().union(*(e.effects for e in inner)))


def _jaxprs(param: Any) -> list[Any]:
    items = param if isinstance(param, tuple | list) else (param,)
    return [j for item in items if hasattr(j := getattr(item, "jaxpr", item), "eqns")]


def _param(param: Any) -> Any:
    if type(param) in (tuple, list):
        return type(param)(_param(item) for item in param)
    jaxpr = getattr(param, "jaxpr", param)
    if not hasattr(jaxpr, "eqns"):
        return param
    eqns: list[jex.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLBACKS:
            eqns.extend(_zeros(var.aval).replace(outvars=[var]) for var in eqn.outvars)
        else:
            eqns.append(_without(eqn) if _holds(eqn) else eqn)
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    changed = jaxpr.replace(eqns=eqns, effects=effects)
    return changed if jaxpr is param else jex.ClosedJaxpr(changed, param.consts)
