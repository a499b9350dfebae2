"""Arrays that are gathered for products, as values of their own.

Where a weight is split along devices that a product needs for its rows (FSDP), XLA gathers it, and
as it makes nothing twice the gathered weight stays from the forward to the backward pass. As a
value of the program it is kept, or gathered again, like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.program.exchange import gathered
from jaxmem.program.ir import Atom, Block, Op, Program, Value
from jaxmem.program.layout import Layout
from jaxmem.program.pinning import constraint
from jaxmem.program.primitives import Kind, kind_of

_SAME = frozenset("convert_element_type reshape squeeze transpose".split())

_Made = dict[tuple[Value, Layout], Value]


def with_gathered(program: Program) -> Program:
    """``program`` with a sharding constraint where XLA gathers a weight for a product.

    It computes the same. Activations are left to XLA, which may find something cheaper. Nothing
    changes where layouts are not known, and a program that has its constraints is left as it is.
    """
    layouts = [s for s in program.shardings if isinstance(s, NamedSharding) and s.mesh.size > 1]
    if not layouts or not program.is_laid_out:
        return program
    block = _written(program.block, program.block.inputs, layouts[0].mesh)
    return program if block is program.block else replace(program, block=block)


def _written(block: Block, given: Sequence[Value], mesh: Any) -> Block:
    """``block`` with constraints on what is ``given`` to it, or is the same as another type."""
    ops: list[Op] = []
    made: _Made = {}
    weights = set(given)
    for op in block.ops:
        loop = op.loop
        if loop is not None:
            carried = loop.num_consts + loop.num_carry
            formals = zip(loop.body.inputs, op.inputs, strict=True)
            rest = [
                formal
                for n, (formal, operand) in enumerate(formals)
                if isinstance(operand, Value) and operand in weights
                if not loop.num_consts <= n < carried
            ]
            body = _written(loop.body, rest, mesh)
            if body is not loop.body:
                op = Op(op.eqn, op.inputs, op.outputs, replace(loop, body=body))
        elif kind_of(op) is Kind.OPAQUE and op.name != "sharding_constraint":
            op = _with_constraints(op, weights, mesh, ops, made)
        elif op.name in _SAME and weights.issuperset(op.values):
            weights.update(op.outputs)
        ops.append(op)
    same = len(ops) == len(block.ops) and all(map(_is, ops, block.ops))
    return block if same else replace(block, ops=tuple(ops))


def _is(one: Op, other: Op) -> bool:
    return one is other


def _with_constraints(op: Op, weights: set[Value], mesh: Any, ops: list[Op], made: _Made) -> Op:
    """``op`` on gathered operands; what makes those that are not there yet is put before it."""
    stands: dict[Atom, Value] = {}
    for value, layout in gathered(op).items():
        named = {name for name, _ in layout.all_axes} <= {*mesh.axis_names}
        if value not in weights or not named:
            continue  # A part of an axis has no name that a constraint could say.
        key = (value, layout)
        if key not in made:
            made[key] = Value(value.aval, f"{value.key}.gathered{len(made)}", layout=layout)
            names = [tuple(name for name, _ in axes) or None for axes in layout.axes]
            eqn = constraint(value.aval, NamedSharding(mesh, PartitionSpec(*names)))
            placed = eqn.replace(source_info=op.eqn.source_info, ctx=op.eqn.ctx)
            ops.append(Op(placed, (value,), (made[key],)))
        stands[value] = made[key]
    if not stands:
        return op
    inputs = tuple(stands.get(a, a) if isinstance(a, Value) else a for a in op.inputs)
    return Op(op.eqn, inputs, op.outputs)
