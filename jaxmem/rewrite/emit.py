"""Turn a written-out schedule into a function JAX can trace and compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jaxmem import _compat
from jaxmem.program.ir import Atom, Block, Loop, Op, Value
from jaxmem.program.pinning import constraint, has_pins
from jaxmem.rewrite.fetching import run_fetching
from jaxmem.rewrite.stacked import scan_apart

_MEMORY = {"send": jax.memory.Space.Host, "fetch": jax.memory.Space.Device}
_TRANSFERS = {
    name: jax.make_jaxpr(functools.partial(jax.device_put, device=space))(0.0).eqns[0]
    for name, space in _MEMORY.items()
}
_BARRIER = jax.make_jaxpr(lambda x: jax.lax.optimization_barrier((x,)))(0.0).eqns[0]


def as_function(block: Block, *, pinned: bool = True) -> Callable[..., list[Any]]:
    """A function of the block's inputs that returns its outputs.

    Equations are run as data by ``jax.core.eval_jaxpr``; only loops whose body changed, or has
    values that are pinned, are made anew, with ``jax.lax.scan``. Without ``pinned`` a block as it
    was traced leaves it to the compiler how values are split.
    """
    segments = _segments(block, pinned)

    def run(*args: Any) -> list[Any]:
        env: dict[Value, Any] = dict(zip(block.inputs, args, strict=True))
        for segment in segments:
            segment(env)
        return [_get(env, atom) for atom in block.outputs]

    return run


def _get(env: dict[Value, Any], atom: Atom) -> Any:
    return env[atom] if isinstance(atom, Value) else atom.val


def _segments(block: Block, pinned: bool) -> list[Callable[[dict[Value, Any]], None]]:
    """Runs of plain operations, and the rewritten loops between them."""
    last_read = _last_reads(block)
    segments: list[Callable[[dict[Value, Any]], None]] = []
    pending: list[Op] = []
    start = 0
    for index, op in enumerate(block.ops):
        anew = op.loop is not None and (op.loop.rewritten or (pinned and has_pins(op.loop.body)))
        if not anew:
            pending.append(op)
            continue
        if pending:
            segments.append(_straight(pending, last_read, start + len(pending), pinned))
        segments.append(_loop(op))
        pending, start = [], index + 1
    if pending:
        segments.append(_straight(pending, last_read, start + len(pending), pinned))
    return segments


def _last_reads(block: Block) -> dict[Value, int]:
    last: dict[Value, int] = {}
    for index, op in enumerate(block.ops):
        for value in op.values:
            last[value] = index
    for atom in block.outputs:
        if isinstance(atom, Value):
            last[atom] = len(block.ops)
    return last


def _straight(
    ops: Sequence[Op], last_read: dict[Value, int], end: int, pinned: bool
) -> Callable[[dict[Value, Any]], None]:
    """A run of plain operations as one list of equations, evaluated in one go."""
    variables: dict[Value, jex.Var] = {}
    taken: list[Value] = []

    def variable(value: Value) -> jex.Var:
        known = variables.get(value)
        if known is None:
            known = variables[value] = jex.Var(value.aval)
            taken.append(value)
        return known

    equations, made = [], []
    for op in ops:
        invars = [variable(a) if isinstance(a, Value) else a for a in op.inputs]
        plain = [jex.Var(v.aval) for v in op.outputs]
        equations.append(_equation(op, invars, plain))
        for value, result in zip(op.outputs, plain, strict=True):
            variables[value] = result
            made.append(value)
            if pinned and value.pinned is not None:
                variables[value] = jex.Var(value.aval)
                equations.append(_pinned(op, value, result, variables[value]))
    given = [variables[v] for v in taken]
    results = [v for v in made if last_read.get(v, -1) >= end]
    outvars = [variables[v] for v in results]

    def run(env: dict[Value, Any]) -> None:
        outs = _compat.evaluate(equations, given, outvars, [env[v] for v in taken])
        env.update(zip(results, outs, strict=True))

    return run


def _equation(op: Op, invars: list[Any], outvars: list[jex.Var]) -> jex.JaxprEqn:
    added = _BARRIER if op.barrier else _TRANSFERS.get(op.transfer)
    eqn = op.eqn.replace(invars=invars, outvars=outvars)
    if added is not None:
        eqn = eqn.replace(primitive=added.primitive, params=added.params, effects=added.effects)
    return _compat.with_name(eqn, op.recompute) if op.recompute else eqn


def _pinned(op: Op, value: Value, result: jex.Var, name: jex.Var) -> jex.JaxprEqn:
    """Gives a result the sharding that it is to have."""
    made = _constraint(value.aval, value.pinned)
    source = op.eqn.source_info
    return made.replace(invars=[result], outvars=[name], source_info=source, ctx=op.eqn.ctx)


_constraint = functools.cache(constraint)


def _loop(op: Op) -> Callable[[dict[Value, Any]], None]:
    """A loop whose body changed."""
    loop = op.loop
    assert loop is not None
    body = as_function(loop.body)
    carried = loop.num_consts + loop.num_carry

    def run(env: dict[Value, Any]) -> None:
        operands = [_get(env, atom) for atom in op.inputs]
        consts, init, slices = (
            operands[: loop.num_consts],
            operands[loop.num_consts : carried],
            operands[carried:],
        )

        if loop.ahead:
            with jax.named_scope(op.recompute or "jaxmem.loop"):
                results = run_fetching(loop, body, operands, op.outputs[loop.num_carry :])
            env.update(zip(op.outputs, results, strict=True))
            return
        windowed = _windowed(loop, slices) if loop.step else None
        slices = slices[: len(slices) - loop.rows]

        def step(carry: Sequence[Any], sliced: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            if windowed:
                return windowed(body, consts, carry, sliced)
            results = body(*consts, *carry, *sliced)
            return results[: loop.num_carry], results[loop.num_carry :]

        with jax.named_scope(op.recompute or "jaxmem.loop"):
            if loop.apart:
                stacks = op.outputs[loop.num_carry :]
                carry, stacked = scan_apart(
                    step, init, slices, stacks, loop.length, reverse=loop.reverse
                )
            else:
                carry, stacked = jax.lax.scan(
                    step, init, slices, length=loop.length, reverse=loop.reverse, unroll=loop.unroll
                )
        env.update(zip(op.outputs, [*carry, *stacked], strict=True))

    return run


def _windowed(loop: Loop, slices: Sequence[Any]) -> Callable[..., tuple[list[Any], list[Any]]]:
    """One iteration of a loop that takes rows of whole arrays and fills others row by row."""
    wholes = slices[len(slices) - loop.rows :]
    first = loop.num_carry - loop.filled

    def iteration(
        body: Callable[..., list[Any]],
        consts: Sequence[Any],
        carry: Sequence[Any],
        sliced: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        index = carry[0]
        rows = [jax.lax.dynamic_index_in_dim(a, index, keepdims=False) for a in wholes]
        results = body(*consts, *carry, *sliced, *rows)
        written = zip(carry[first:], results[first : loop.num_carry], strict=True)
        filled = [jax.lax.dynamic_update_index_in_dim(a, row, index, 0) for a, row in written]
        following = index + 1 if loop.step > 0 else index - 1
        return [following, *results[1:first], *filled], results[loop.num_carry :]

    return iteration
