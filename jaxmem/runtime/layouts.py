"""Find how the compiler splits every value of a step over a mesh, before anything is compiled.

XLA spreads the layouts of arguments and results over a program with Shardy
(https://openxla.org/shardy). The same passes run here, on the step as written with each of its
values among the results: what they find for a result is how that value is split. A loop is written
out as one of its iterations, whose rows stand for all of a stack and whose carries have one layout
from the first iteration to the last.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jaxmem.program.ir import Atom, Block, Loop, Op, Program, Value
from jaxmem.program.layout import Axis, Layout
from jaxmem.program.making import is_typed
from jaxmem.rewrite.emit import as_function
from jaxmem.rewrite.standin import compilable
from jaxmem.targets.compiling import lower_for
from jaxmem.targets.target import Target

_MESH = re.compile(r"sdy\.mesh @(?P<name>[^ =]+) = <(?P<axes>[^>{]*)>")
_AXIS = re.compile(r'"(?P<name>[^"]+)"(?::\((?P<before>\d+)\)(?P<part>\d+))?(?:=(?P<size>\d+))?')
_SHARDING = re.compile(r"<@(?P<mesh>[^,]+), \[(?P<dims>.*?)\]")


@dataclass(frozen=True)
class Way:
    """One way to split all values of a step.

    Attributes:
        lay: tells the values.
        axes: of the mesh, along which batches are split: their layouts spread before those of
            state; empty where all spread alike.
    """

    lay: Callable[[], None]
    axes: frozenset[str]


def lay_out(program: Program, target: Target, choose: Callable[[Sequence[Way]], int]) -> None:
    """Tell every value of a step over several devices how it is split.

    Nothing happens where that is known already, where no argument is split, and where Shardy is off
    (``jax_use_shardy_partitioner``): bytes are then those of whole arrays.

    Args:
        program: the step; its values are changed.
        target: what it is compiled for.
        choose: of several ways to lay the values out, each of which it may try, the number of
            that which the compiled step has.
    """
    if program.is_counted:
        return
    values = [value for op in _operations(program.block) for value in op.outputs]
    if any(map(is_typed, (*program.block.inputs, *values))):
        for value in (*_inputs(program.block), *values):
            value.lay_out(_typed(value))
        return
    _give_arguments(program)
    flat = _Flat(program.block)
    wanted = [v for v in flat.values if _is_array(v)]
    block = replace(flat.block, outputs=(*flat.block.outputs, *wanted))
    pinned = program.out_shardings() or [None] * len(program.block.outputs)
    block = compilable(block, target)
    shardings = [*pinned, *[None] * len(wanted)]
    first, state = len(program.consts), program.state or ()
    later = {first + n for n in state}
    rows = [v.layout for n, v in enumerate(program.block.inputs) if n not in later and v.layout]
    axes = {name for layout in rows for name, _ in layout.all_axes}
    found: list[list[Layout]] = []
    orders = [set[str](), axes] if later and axes else [axes]
    for held_back in orders:
        # A function of its own: JAX remembers what it lowered, and that is changed here.
        function = as_function(block)
        lowered = lower_for(target, function, program.avals(), out_shardings=shardings)
        text, said = _propagated(lowered, later, program.replaced, held_back)
        meshes = {m["name"]: dict(_sizes(m["axes"])) for m in _MESH.finditer(text)}
        pairs = zip(wanted, said[len(pinned) :], strict=True)
        found.append([_layout(split, meshes, len(v.aval.shape)) for v, split in pairs])

    def lay(layouts: Sequence[Layout]) -> None:
        for value, layout in zip(wanted, layouts, strict=True):
            value.lay_out(layout)
        for copy, value in (*flat.read.values(), *flat.copies):
            value.lay_out(copy.layout)

    # XLA's own order of things is not always the same as either.
    pairs = zip(found, orders, strict=True)
    ways = [Way(functools.partial(lay, layouts), frozenset(its)) for layouts, its in pairs]
    different = any(layouts != found[0] for layouts in found)
    ways[choose(ways) if different else 0].lay()


def _give_arguments(program: Program) -> None:
    for value, sharding in zip(program.block.inputs, program.layouts(), strict=True):
        if _is_array(value):
            value.lay_out(_of_sharding(sharding, len(value.aval.shape)))


def _of_sharding(sharding: Any, rank: int) -> Layout:
    spec, sizes = getattr(sharding, "spec", ()), {}
    if spec:
        sizes = dict(sharding.mesh.shape)
    dims = [() if d is None else d if isinstance(d, tuple) else (d,) for d in spec]
    axes = [tuple((name, sizes[name]) for name in names) for names in dims]
    return Layout((*axes, *[()] * (rank - len(axes))))


def _typed(value: Value) -> Layout | None:
    sharding = getattr(value.aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    return _of_sharding(sharding, len(value.aval.shape))


def _is_array(value: Value) -> bool:
    return bool(value.part_bytes) and not jnp.issubdtype(value.aval.dtype, jax.dtypes.extended)


def _inputs(block: Block) -> Iterator[Value]:
    yield from block.inputs
    for op in block.ops:
        if op.loop is not None:
            yield from _inputs(op.loop.body)


def _operations(block: Block) -> Iterator[Op]:
    """The operations of a block, those in its loops too."""
    for op in block.ops:
        yield op
        if op.loop is not None:
            yield from _operations(op.loop.body)


class _Flat:
    """A block without loops: each as one of its iterations.

    Attributes:
        values: what its operations make, each once.
        copies: for each input of a loop's body what stands for it, and the input.
        read: of each value that depends on no argument, such as a mask, what its first reader has,
            and the value. Shardy has a copy of it for every reader, split as that one needs it.
    """

    def __init__(self, block: Block):
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.copies: list[tuple[Value, Value]] = []
        self.read: dict[Value, tuple[Value, Value]] = {}
        self.now: dict[Value, Atom] = {}
        self._constant: set[Value] = set()
        self._take(block.ops)
        # A result of a loop may be one of the block's.
        outputs = tuple(self._at(a) for a in block.outputs)
        self.block = replace(block, ops=tuple(self.ops), outputs=outputs)

    def _take(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if op.loop is None:
                inputs = [self._at(a) for a in op.inputs]
                if all(a in self._constant for a in inputs if isinstance(a, Value)):
                    self._constant.update(op.outputs)
                else:
                    inputs = [self._as_read(op, a) for a in inputs]
                self.ops.append(Op(op.eqn, inputs, op.outputs))
                self.values += op.outputs
            else:
                self._iteration(op, op.loop)

    def _at(self, atom: Atom) -> Atom:
        return self.now.get(atom, atom) if isinstance(atom, Value) else atom

    def _as_read(self, op: Op, atom: Atom) -> Atom:
        """An operand that depends on no argument is a value of its own for each of its readers."""
        if not isinstance(atom, Value) or atom not in self._constant or not _is_array(atom):
            return atom
        copy = self._new(op, lax.optimization_barrier, atom)
        self.read.setdefault(atom, (copy, atom))
        return copy

    def _iteration(self, op: Op, loop: Loop) -> None:
        given = [self._at(a) for a in op.inputs]
        first = loop.num_consts + loop.num_carry
        body = loop.body
        for n, value in enumerate(body.inputs):
            stands = given[n] if n < first else self._new(op, _row, given[n])
            self.now[value] = stands
            if isinstance(stands, Value):
                self.copies.append((stands, value))
        self._take(body.ops)
        made = [self._at(a) for a in body.outputs]
        for n, result in enumerate(op.outputs):
            if n < loop.num_carry:
                stands = self._either(op, given[loop.num_consts + n], made[n])
            else:
                stands = self._new(op, lambda a, n=loop.length: lax.broadcast(a, (n,)), made[n])
            self.now[result] = stands
            if isinstance(stands, Value):
                self.copies.append((stands, result))

    def _either(self, op: Op, before: Atom, after: Atom) -> Atom:
        """One of both, so that they have the same layout; keys cannot be selected."""
        if isinstance(after, Value) and not _is_array(after):
            return after
        return self._new(op, _selected, before, after)

    def _new(self, place: Op, fun: Callable[..., Any], *operands: Atom) -> Value:
        """What ``fun`` makes of the operands, in one operation or more of this block."""
        traced = jax.make_jaxpr(fun)(*(a.aval for a in operands))
        known: dict[Any, Atom] = dict(zip(traced.jaxpr.invars, operands, strict=True))
        for eqn in traced.jaxpr.eqns:
            inputs = [a if isinstance(a, jex.Literal) else known[a] for a in eqn.invars]
            outputs = [Value(v.aval) for v in eqn.outvars]
            known.update(zip(eqn.outvars, outputs, strict=True))
            placed = eqn.replace(source_info=place.eqn.source_info, ctx=place.eqn.ctx)
            self.ops.append(Op(placed, inputs, outputs))
            self.values += outputs
        return self.values[-1]


def _row(whole: Any) -> Any:
    return lax.index_in_dim(whole, 0, keepdims=False)


def _selected(before: Any, after: Any) -> Any:
    return lax.select(lax.full(after.shape, True), before, after)


def _sizes(axes: str) -> Iterator[Axis]:
    for axis in _AXIS.finditer(axes):
        yield axis["name"], int(axis["size"])


def _layout(text: str, meshes: dict[str, dict[str, int]], rank: int) -> Layout:
    """The layout that Shardy prints, ``<@mesh, [{"data"}, {}]>``; none is all on each device."""
    found = _SHARDING.search(text)
    if found is None:
        return Layout(((),) * rank)
    sizes = meshes[found["mesh"].strip('"')]
    dims = re.findall(r"\{([^}]*)\}", found["dims"])
    return Layout(tuple(tuple(_of_dimension(dim, sizes)) for dim in dims))


def _of_dimension(text: str, sizes: dict[str, int]) -> Iterator[Axis]:
    """The axes of one dimension; a part of an axis, ``"model":(2)4``, is one of its own."""
    for axis in _AXIS.finditer(text):
        if axis["part"]:
            yield f"{axis['name']}:({axis['before']})", int(axis["part"])
        else:
            yield axis["name"], sizes[axis["name"]]


def _propagated(
    lowered: jax.stages.Lowered,
    later_arguments: Iterable[int],
    later_results: Iterable[int],
    axes: set[str],
) -> tuple[str, list[str]]:
    """A lowered program with Shardy's propagation run on it: its meshes, and for each result how
    it is split, as Shardy prints them; the program itself is changed.

    Along ``axes``, those of the batch, the layouts of ``later_arguments`` and ``later_results``
    spread after those of all others.
    """
    from jaxlib.mlir import ir, passmanager

    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        ops = list(module.body.operations)
        main = next(op for op in ops if getattr(op, "name", None) == ir.StringAttr.get("main"))
        for name, later in (("arg_attrs", later_arguments), ("res_attrs", later_results)):
            given = [ir.DictAttr(each) for each in ir.ArrayAttr(main.attributes[name])]
            main.attributes[name] = ir.ArrayAttr.get(
                [_spread_later(a, axes, ir) if n in {*later} else a for n, a in enumerate(given)]
            )
        for passes in ("inline", "sdy-propagation-pipeline"):
            passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)
        ops = list(module.body.operations)
        meshes = "\n".join(str(op) for op in ops if op.operation.name == "sdy.mesh")
        main = next(op for op in ops if getattr(op, "name", None) == ir.StringAttr.get("main"))
        results = [ir.DictAttr(each) for each in ir.ArrayAttr(main.attributes["res_attrs"])]
        split = [str(each["sdy.sharding"]) if "sdy.sharding" in each else "" for each in results]
    return meshes, split


def _spread_later(attributes: Any, axes: set[str], ir: Any) -> Any:
    named = {each.name: each.attr for each in attributes}
    if "sdy.sharding" in named:
        said = str(named["sdy.sharding"])
        shared = "|".join(map(re.escape, sorted(axes)))
        later = re.sub(rf'(\{{[^{{}}]*"(?:{shared})"[^{{}}]*\}})', r"\1p1", said)
        named["sdy.sharding"] = ir.Attribute.parse(later if axes else said)
    return ir.DictAttr.get(named)
