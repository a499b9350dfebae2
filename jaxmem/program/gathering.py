"""Arrays that are gathered for products, as values of their own.

Where a weight is split along devices that a product needs for its rows (FSDP), XLA gathers it, and
as it makes nothing twice the gathered weight stays from the forward to the backward pass. As a
value of the program it is kept, or gathered again, like any other.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.program.exchange import gathered
from jaxmem.program.ir import Atom, Block, Op, Program, Value
from jaxmem.program.layout import Layout
from jaxmem.program.primitives import Kind, kind_of

_Made = dict[tuple[Value, Layout], Value]


def with_gathered(program: Program) -> Program:
    """``program`` with a sharding constraint where XLA gathers an operand of a product.

    It computes the same. Nothing changes where layouts are not known, and a program that has its
    constraints is left as it is.
    """
    layouts = [s for s in program.shardings if isinstance(s, NamedSharding) and s.mesh.size > 1]
    if not layouts or not program.is_laid_out:
        return program
    block = _written(program.block, layouts[0].mesh)
    return program if block is program.block else replace(program, block=block)


def _written(block: Block, mesh: Any) -> Block:
    ops: list[Op] = []
    made: _Made = {}
    for op in block.ops:
        loop = op.loop
        if loop is not None:
            body = _written(loop.body, mesh)
            if body is not loop.body:
                op = Op(op.eqn, op.inputs, op.outputs, replace(loop, body=body))
        elif kind_of(op) is Kind.OPAQUE and op.name != "sharding_constraint":
            op = _with_constraints(op, mesh, ops, made)
        ops.append(op)
    same = len(ops) == len(block.ops) and all(map(_is, ops, block.ops))
    return block if same else replace(block, ops=tuple(ops))


def _is(one: Op, other: Op) -> bool:
    return one is other


def _with_constraints(op: Op, mesh: Any, ops: list[Op], made: _Made) -> Op:
    """``op`` on gathered operands; what makes those that are not there yet is put before it."""
    stands: dict[Atom, Value] = {}
    for value, layout in gathered(op).items():
        if not {name for name, _ in layout.all_axes} <= {*mesh.axis_names}:
            continue  # A part of an axis has no name that a constraint could say.
        key = (value, layout)
        if key not in made:
            made[key] = Value(value.aval, f"{value.key}.gathered{len(made)}", layout=layout)
            eqn = _constraint(value, layout, mesh)
            placed = eqn.replace(source_info=op.eqn.source_info, ctx=op.eqn.ctx)
            ops.append(Op(placed, (value,), (made[key],)))
        stands[value] = made[key]
    if not stands:
        return op
    inputs = tuple(stands.get(a, a) if isinstance(a, Value) else a for a in op.inputs)
    return Op(op.eqn, inputs, op.outputs)


def _constraint(value: Value, layout: Layout, mesh: Any) -> Any:
    names = [tuple(name for name, _ in axes) or None for axes in layout.axes]
    asked = NamedSharding(mesh, PartitionSpec(*names))
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=asked)
    (eqn,) = jax.make_jaxpr(constrain)(value.aval).eqns
    return eqn
