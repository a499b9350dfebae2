"""Trace a step once into a :class:`Program`: calls inlined, loops opened, the rest kept whole."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core as jex
from jax.sharding import NamedSharding

from jaxmem import _compat
from jaxmem.program.ir import Atom, Block, Leaf, Loop, Op, Program, Value
from jaxmem.program.pinning import constraint
from jaxmem.program.primitives import inner_jaxprs
from jaxmem.program.rectified import Rectified
from jaxmem.program.sinking import Sinking

_INLINED = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"]
)
# Of a printed program: colours, addresses, and the devices of meshes.
_NOT_OF_THE_PROGRAM = re.compile(
    r"\x1b\[[0-9;]*m|0x[0-9a-f]+"
    r"|Abstract(?=Mesh\()|, device_kind=.*?, num_cores=\w+, platform=\w+|, memory_kind=device\b"
)


def program_from_jaxpr(
    closed: jex.ClosedJaxpr,
    *,
    name: str,
    arguments: Sequence[Leaf],
    results: Sequence[Leaf],
    shardings: Sequence[Any] = (),
    state: frozenset[int] | None = None,
) -> Program:
    """The program of a traced step.

    Args:
        closed: what ``jax.jit(step).trace(...)`` produced.
        name: the user's function name.
        arguments: one leaf per input of the jaxpr.
        results: one leaf per output.
        shardings: one for each input that is laid out over several devices, ``None`` elsewhere.
        state: the arguments whose layout the results that replace them keep.

    Returns:
        A program whose block takes the captured constants first, then the arguments.
    """
    reader = _Reader()
    constvars = [reader.new(var.aval) for var in closed.jaxpr.constvars]
    invars = [reader.new(var.aval) for var in closed.jaxpr.invars]
    ops: list[Op] = []
    outputs = reader.read(closed.jaxpr, constvars, invars, ops, outer=None)
    hoisted = tuple(reader.hoisted)
    block = Block(
        path="",
        inputs=(*(v for v, _ in hoisted), *constvars, *invars),
        ops=tuple(ops),
        outputs=tuple(outputs),
    )
    return Program(
        name=name,
        block=block,
        consts=(*(c for _, c in hoisted), *closed.consts),
        arguments=tuple(arguments),
        results=tuple(results),
        shardings=tuple(shardings),
        state=state,
        fingerprint=_fingerprint(closed),
        equations=sum(op.origin is op for op in _all_ops(block)),
    )


def without_passed_on(
    program: Program, was: Sequence[int | None]
) -> tuple[Program, dict[int, int]]:
    """The program without what a step leaves as it is in an object of the caller's.

    Modules that are only read are arguments and results; their arrays need no copies. What comes
    from elsewhere does: two variables must not share an array, as one of them may be donated.

    Args:
        program: the whole.
        was: for each result that goes back into an object, the argument leaf that was there.

    Returns:
        The program, and for each result that it lost the argument leaf that it is.
    """
    arguments = program.block.inputs[len(program.consts) :]
    found = {
        n: place
        for n, (v, place) in enumerate(zip(program.block.outputs, was, strict=True))
        if place is not None and v is arguments[place] and not program.arguments[place].donated
    }
    left = [n for n in range(len(was)) if n not in found]
    block = replace(program.block, outputs=tuple(program.block.outputs[n] for n in left))
    results = tuple(program.results[n] for n in left)
    return replace(program, block=block, results=results), found


class _Reader:
    """Reads jaxprs into ops; counts values so that their keys are the same on every trace."""

    def __init__(self):
        self.counter = itertools.count()
        self.hoisted: list[tuple[Value, Any]] = []
        self.rectified = Rectified()
        self.sinking = Sinking()

    def new(self, aval: Any) -> Value:
        return Value(aval, f"v{next(self.counter)}")

    def read(
        self,
        jaxpr: Any,
        consts: Sequence[Atom],
        args: Sequence[Atom],
        ops: list[Op],
        outer: jex.JaxprEqn | None,
        path: str = "",
    ) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def value(atom: Any) -> Atom:
            return atom if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(value(atom) for atom in eqn.invars)
            placed = eqn if outer is None else _compat.under(eqn, outer)
            inner = _inlinable(eqn)
            if inner is not None and not (inner.consts and path):
                held = [
                    self.hoist(const, var)
                    for const, var in zip(inner.consts, inner.jaxpr.constvars, strict=True)
                ]
                given = self.laid_out(inputs, eqn.params.get("in_shardings", ()), ops, placed)
                made = self.read(inner.jaxpr, held, given, ops, placed, path)
                outputs: Sequence[Atom] = self.laid_out(
                    made, eqn.params.get("out_shardings", ()), ops, placed
                )
            else:
                results = tuple(self.new(var.aval) for var in eqn.outvars)
                inputs = self.rectified.inputs(eqn, inputs)
                self.rectified.add(eqn, inputs, results)
                loop = None
                if eqn.primitive.name == "scan":
                    loop = self.loop(eqn, inputs, path, len(ops))
                ops.append(Op(placed, inputs, results, loop))
                self.sinking.add(ops[-1])
                outputs = results
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def laid_out(
        self, atoms: Sequence[Atom], shardings: Sequence[Any], ops: list[Op], eqn: jex.JaxprEqn
    ) -> list[Atom]:
        """``atoms`` with the shardings that an opened call asks for, as constraints."""
        laid: list[Atom] = list(atoms)
        for n, (atom, sharding) in enumerate(zip(atoms, shardings, strict=False)):
            if not _specified(sharding) or sharding.num_devices == 1:
                continue
            result, traced = self.new(atom.aval), constraint(atom.aval, sharding)
            ops.append(Op(traced.replace(source_info=eqn.source_info), (atom,), (result,)))
            laid[n] = result
        return laid

    def hoist(self, const: Any, var: Any) -> Value:
        """A constant captured by an inner call becomes a constant of the whole step."""
        for held, existing in self.hoisted:
            if existing is const:
                return held
        held = Value(var.aval, f"c{len(self.hoisted)}")
        self.hoisted.append((held, const))
        return held

    def loop(self, eqn: jex.JaxprEqn, given: Sequence[Atom], path: str, index: int) -> Loop | None:
        """The body of a scan as a block; ``None`` keeps a scan with captured constants whole.

        Of the constants that it is ``given`` the body computes those itself that XLA would have it
        compute. It takes them all the same.
        """
        closed = eqn.params["jaxpr"]
        if closed.consts:
            return None
        arity = _compat.scan_arity(eqn.params)
        inner_path = f"{path}/{index}" if path else str(index)
        inputs = [self.new(var.aval) for var in closed.jaxpr.invars]
        consts = inputs[: arity.num_consts]
        ops, read = self.sinking.into(
            given[: arity.num_consts], consts, lambda v: Value(v.aval, f"{v.key}/{inner_path}")
        )
        read += inputs[arity.num_consts :]
        outputs = self.read(closed.jaxpr, (), read, ops, None, inner_path)
        body = Block(inner_path, tuple(inputs), tuple(ops), tuple(outputs))
        return Loop(
            body,
            arity.num_consts,
            arity.num_carry,
            eqn.params["length"],
            eqn.params["reverse"],
            eqn.params["unroll"],
        )


def _inlinable(eqn: jex.JaxprEqn) -> Any | None:
    """The jaxpr of a call that can be opened without changing what the program means."""
    if eqn.primitive.name not in _INLINED:
        return None
    params = eqn.params
    asked = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if not all(_is_constraint(s) for s in asked if _specified(s)):
        return None
    if params.get("compiler_options_kvs"):
        return None
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    return inner if hasattr(inner, "consts") and hasattr(inner, "jaxpr") else None


def _fingerprint(closed: jex.ClosedJaxpr) -> str:
    """Hash of the printed program; addresses of Python objects in it are not part of it.

    Nor are colours: JAX prints programs in them where standard output is a terminal or a notebook,
    and a plan that was made elsewhere would be one for another program there. Nor is what devices a
    mesh has, which newer JAX prints: a plan for an absent cluster is followed on the real one. How
    long these names are says where lines are broken, so spaces count only between two words.
    """
    text = _NOT_OF_THE_PROGRAM.sub("", str(closed.jaxpr))
    text = re.sub(r"\s+(?!\w)|(?<!\w)\s+", "", re.sub(r"\s+", " ", text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_constraint(sharding: Any) -> bool:
    """Whether a sharding of a call says no more than a sharding constraint inside would."""
    on_device = getattr(sharding, "memory_kind", None) in (None, "device", "unpinned_host")
    named = isinstance(sharding, NamedSharding) and not sharding.mesh.are_all_axes_explicit
    return on_device and (named or getattr(sharding, "num_devices", 0) == 1)


def _specified(sharding: Any) -> bool:
    return type(sharding).__name__ != "UnspecifiedValue"


def _all_ops(block: Block):
    for op in block.ops:
        yield op
        if op.loop is not None:
            yield from _all_ops(op.loop.body)


def opened(eqn: jex.JaxprEqn) -> tuple[Block, ...]:
    """The programs inside an equation that is kept whole (a branch, a checkpoint), as blocks."""
    blocks = []
    for jaxpr in inner_jaxprs(eqn):
        reader = _Reader()
        inputs = [reader.new(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)]
        ops: list[Op] = []
        constants = inputs[: len(jaxpr.constvars)]
        outputs = reader.read(jaxpr, constants, inputs[len(constants) :], ops, None, "inner")
        blocks.append(Block("inner", tuple(inputs), tuple(ops), tuple(outputs)))
    return tuple(blocks)
