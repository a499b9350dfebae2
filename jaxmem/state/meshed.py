"""Lay the arguments of a step out over a mesh: the state by rules, the batch by its rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem.errors import ArgumentError, ShardingError, TargetError
from jaxmem.program import leaves as program_leaves
from jaxmem.program import nnx
from jaxmem.program.call import Call, laid_out
from jaxmem.program.calling import Caller
from jaxmem.state.leaves import StateLeaf, leaves_of, specs_like
from jaxmem.state.rules import check_name
from jaxmem.state.sharded import Sharded
from jaxmem.state.sharder import Sharder
from jaxmem.state.sharding import short
from jaxmem.targets.target import Target


@dataclass(frozen=True)
class Laid:
    """The layout of one signature.

    Attributes:
        mesh: with the types that its axes have in this layout.
        layouts: a sharding for each leaf.
        state: which of them are state.
        notes: what is probably not as it was meant.
    """

    mesh: Mesh | AbstractMesh
    layouts: tuple[NamedSharding, ...]
    state: frozenset[int]
    notes: tuple[str, ...]

    def tracing(self) -> AbstractContextManager[Any]:
        """In it a ``PartitionSpec`` inside a step is over this mesh."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)


@dataclass(frozen=True)
class _Argument:
    """One argument of a call.

    Attributes:
        name: of the parameter.
        value: what was given; what is no array in it is left out.
        first: the number of its first leaf among those of the call, and ``count`` how many it has.
    """

    name: str
    value: Any
    first: int
    count: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(eq=False)
class Meshed:
    """Lays calls out over a mesh.

    The state is what is donated, or the first argument where nothing is, and every argument that
    holds an optimizer's state.

    Axes are of the type Auto, whatever the mesh says: ``jax.make_mesh`` makes Explicit ones, on
    which a program has to say how its products come out, and a rule is to need no change of it.
    They stay Explicit where there is no rule and an argument is laid out over them already.

    Attributes:
        caller: takes calls apart.
        mesh: the devices, or their counts by axis.
        rules: what ``fit(shard=...)`` was given.
    """

    caller: Caller
    mesh: Mesh | AbstractMesh
    rules: Any
    _known: dict[Hashable, Laid] = field(default_factory=dict)

    @property
    def is_abstract(self) -> bool:
        """Whether there are no devices behind the mesh."""
        return isinstance(self.mesh, AbstractMesh)

    def check_can_run(self) -> None:
        """Check that steps can be run.

        Raises:
            ArgumentError: the mesh has no devices.
        """
        if self.is_abstract:
            raise ArgumentError(
                f"{self.caller.name} was fitted over an AbstractMesh of {_axes(self.mesh)}, which "
                "has no devices to run on. Plan with .plan(...); to run it pass a "
                f"jax.sharding.Mesh, such as jax.make_mesh({tuple(self.mesh.shape.values())}, "
                f"{self.mesh.axis_names})."
            )

    def ruled_by(self, rules: Any) -> Meshed:
        """The same with other rules."""
        return Meshed(self.caller, self.mesh, rules)

    def laid(self, call: Call) -> Laid:
        """The layout of a call that was laid out."""
        return self._known[call.key]

    def lay_out(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call whose leaves have the layouts of the mesh.

        Raises:
            ShardingError: a rule or a spec does not fit, a batch does not divide, or an argument is
                on other devices.
        """
        known = self._known.get(call.key)
        if known is None:
            known = self._known[call.key] = self._lay_out(call, args, kwargs)
        laid = laid_out(call, known.layouts, known.state)
        self._known.setdefault(laid.key, known)
        return laid

    def _lay_out(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Laid:
        self._check_devices(call)
        mesh = self._mesh_of(call)
        arguments = _arguments(call, *self.caller.apart(args, kwargs)[:2])
        opened = {a.name: leaves_of(a.value) for a in arguments}
        donated = [a for a in arguments if any(call.donated[n] for n in a.numbers)]
        names = {a.name for a in donated or arguments[:1]}
        names |= {a.name for a in arguments if any(x.is_optimizers for x in opened[a.name][0])}
        state = [a for a in arguments if a.name in names]
        trees = [opened[a.name][2] for a in state]
        tree = trees[0] if len(trees) == 1 else tuple(trees)
        are_rules = is_rules(self.rules, tree)
        given = self._given([opened[a.name][0] for a in state], tree, are_rules)
        by_path = {
            f"{a.name}{leaf.path}": (leaf, spec)
            for a, specs in zip(state, given, strict=True)
            for leaf, spec in zip(opened[a.name][0], specs, strict=True)
        }
        numbers = [n for a in state for n in a.numbers]
        found = [_leaf_of(call, n, by_path) for n in numbers]
        sharder = self._sharder([leaf for leaf, _ in found])
        sharder.take(
            [self._own(call.leaves[n], spec) for n, (_, spec) in zip(numbers, found, strict=True)],
            {},
        )
        if are_rules:
            one = isinstance(self.rules, str | Mapping)
            for rule in [self.rules] if one else self.rules:
                sharder.apply(rule)
        layouts = dict(zip(numbers, sharder.shardings(mesh, set()), strict=True))
        axes = self.rules.data_axes if isinstance(self.rules, Sharded) else sharder.data_axes
        rows = [n for a in arguments if a.name not in names for n in a.numbers]
        for n in rows:
            layouts[n] = NamedSharding(mesh, self._of_batch(call, n, axes))
        notes = self._notes(sharder, bool(rows), axes)
        in_order = tuple(layouts[n] for n in range(len(call.leaves)))
        return Laid(mesh, in_order, frozenset(numbers), tuple(notes))

    def _mesh_of(self, call: Call) -> Mesh | AbstractMesh:
        """The mesh, with axes of the type that this call is for."""
        if self.rules is None and any(map(self._is_typed, call.leaves)):
            if self.is_abstract:
                raise ArgumentError(
                    f"{self.caller.name}: arguments are laid out over Explicit axes of an "
                    "AbstractMesh, and JAX compiles no such program for devices that are not "
                    "here. Give shapes without a sharding and shard=, or a mesh with axis_types="
                    f"(jax.sharding.AxisType.Auto,) * {len(self.mesh.axis_names)}."
                )
            return self.mesh
        types = (AxisType.Auto,) * len(self.mesh.axis_names)
        if isinstance(self.mesh, Mesh):
            return Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=types)
        return AbstractMesh(self.mesh.axis_sizes, self.mesh.axis_names, axis_types=types)

    def _is_typed(self, leaf: Any) -> bool:
        """Whether a leaf is laid out over Explicit axes of this mesh."""
        given = self._spec_on_mesh(leaf)
        return given is not None and AxisType.Explicit in leaf.sharding.mesh.axis_types

    def _notes(self, sharder: Sharder, has_batch: bool, axes: Sequence[str]) -> list[str]:
        told = [f"{leaf.path}: {leaf.note}" for leaf in sharder.rows(set()) if leaf.note]
        if self.rules is None or isinstance(self.rules, Sharded):
            told = []  # Nothing was asked for, or it was said when that was made.
        if has_batch and not axes:
            told.append(
                f"every device computes the whole batch: no axis of {_axes(self.mesh)} is called "
                '"data" or "fsdp"'
            )
        if told:
            lines = "\n  ".join(short(told))
            warnings.warn(f"{self.caller.name}: {lines}", UserWarning, stacklevel=2)
        return told

    def _sharder(self, leaves: Sequence[StateLeaf]) -> Sharder:
        return Sharder(leaves, dict(self.mesh.shape), None)

    def _given(
        self, opened: Sequence[Sequence[StateLeaf]], tree: Any, are_rules: bool
    ) -> Sequence[Sequence[PartitionSpec | None]]:
        """For each argument of the state the specs of its leaves, before any rule."""
        own = [[leaf.own for leaf in leaves] for leaves in opened]
        if self.rules is None or are_rules:
            return own
        sharded = isinstance(self.rules, Sharded)
        flat = self._of_sharded(opened) if sharded else specs_like(self.rules, tree, "shard")
        rest = iter(flat)
        return [[next(rest) for _ in leaves] for leaves in own]

    def _of_sharded(self, opened: Sequence[Sequence[StateLeaf]]) -> list[PartitionSpec | None]:
        paths = [
            leaf.path if len(opened) == 1 else f"[{n}]{leaf.path}"
            for n, leaves in enumerate(opened)
            for leaf in leaves
        ]
        made = {leaf.path: leaf.spec for leaf in self.rules.leaves}
        for path in (*paths, *made):
            if path not in made or path not in paths:
                where = "the state" if path in paths else "what shard= was made of"
                raise ShardingError(
                    f"shard= of {self.caller.name} was made of another state: {path} is only in "
                    f"{where}. Make it of the state that the step takes, jaxmem.shard(state, mesh, "
                    "...)."
                )
        return [made[path] for path in paths]

    def _own(self, leaf: Any, spec: PartitionSpec | None) -> PartitionSpec | None:
        """The spec of a leaf of the state; without rules that which it is given with."""
        given = self._spec_on_mesh(leaf) if self.rules is None else None
        return spec if given is None else given

    def _spec_on_mesh(self, leaf: Any) -> PartitionSpec | None:
        """The spec of a leaf that is laid out over this mesh already."""
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return None
        if isinstance(leaf, jax.Array) and not leaf.committed:
            return None
        same = dict(sharding.mesh.shape) == dict(self.mesh.shape)
        if isinstance(self.mesh, Mesh) and isinstance(sharding.mesh, Mesh):
            same = same and list(sharding.mesh.devices.flat) == list(self.mesh.devices.flat)
        return sharding.spec if same else None

    def _of_batch(self, call: Call, n: int, axes: Sequence[str]) -> PartitionSpec:
        """The layout of a leaf that is no state: its rows are split, unless it has a layout."""
        leaf, path = call.leaves[n], call.paths[n]
        given = self._spec_on_mesh(leaf)
        if given is not None:
            return given
        aval = leaf if program_leaves.is_abstract(leaf) else jax.typeof(leaf)
        parts = math.prod(self.mesh.shape[axis] for axis in axes)
        if not axes or not aval.shape or _is_raw_key(aval):
            return PartitionSpec()
        rows = aval.shape[0]
        if rows % parts:
            more, names = -(-rows // parts) * parts, ", ".join(axes)
            raise ShardingError(
                f"argument {path} {list(aval.shape)} of {self.caller.name} is split by its rows "
                f"over the {parts} devices of {names}, and {rows} rows do not divide by {parts}. "
                f"Give it {more} rows{f' or {more - parts}' if more > parts else ''}; if every "
                "device is to have all of it, pass jax.device_put(x, NamedSharding(mesh, "
                "PartitionSpec())); if it is state, name its argument in donate_argnums."
            )
        over = axes[0] if len(axes) == 1 else tuple(axes)
        return PartitionSpec(over)

    def _check_devices(self, call: Call) -> None:
        """Check that no leaf is on devices that the mesh does not have."""
        if isinstance(self.mesh, AbstractMesh):
            return
        there = set(self.mesh.devices.flat)
        for leaf, path in zip(call.leaves, call.paths, strict=True):
            if not isinstance(leaf, jax.Array) or not leaf.committed:
                continue
            others = sorted(map(str, leaf.sharding.device_set - there))
            if others:
                raise ShardingError(
                    f"argument {path} of {self.caller.name} is on {others[0]}, which is not in the "
                    f"mesh of {_axes(self.mesh)}. Move it, jax.device_put(x, NamedSharding(mesh, "
                    "PartitionSpec())), or take a mesh with that device."
                )


def make(
    caller: Caller, mesh: Any, shard: Any, target: Target | str | None, *, host: bool = False
) -> Meshed | None:
    """What lays calls out, as ``fit(mesh=..., shard=...)`` says; ``None`` without a mesh.

    ``host``: whether leaves in host memory are named, or a plan says which.

    Raises:
        ArgumentError: rules without a mesh, or something that is no mesh.
        TargetError: the target has another number of devices.
        ShardingError: a rule of that name does not exist, or rules are for another mesh.
    """
    if mesh is None:
        if shard is not None:
            raise ArgumentError(
                f"{caller.name}: shard={_shown(shard)} says how to split the state, and not over "
                'which devices. Give a mesh as well: fit(..., mesh=jax.make_mesh((8,), ("data",))).'
            )
        return None
    if not isinstance(mesh, Mesh | AbstractMesh) or mesh.empty:
        raise ArgumentError(
            f"{caller.name}: mesh is {_shown(mesh)}. Give a jax.sharding.Mesh, such as "
            'jax.make_mesh((8,), ("data",)), or an AbstractMesh with target="8xh100".'
        )
    _check_target(caller, mesh, target)
    if isinstance(shard, Sharded) and dict(shard.axes) != dict(mesh.shape):
        axes = ", ".join(f"{name}={size}" for name, size in shard.axes.items())
        raise ShardingError(
            f"{caller.name}: shard= was made for a mesh of {axes}, and mesh= has {_axes(mesh)}. "
            "Give both the same mesh."
        )
    if isinstance(shard, Sharded) and shard.host_bytes and not host:
        first = next(leaf.path for leaf in shard.leaves if leaf.on_host)
        raise ArgumentError(
            f"{caller.name}: shard= was made with host=, which keeps {first} in host memory, and "
            'the step is not told to. Name such leaves here as well: fit(..., host="*opt_state*").'
        )
    if isinstance(shard, str):
        check_name(shard)
    return Meshed(caller, mesh, shard)


def is_rules(shard: Any, state: Any) -> bool:
    """Whether this is a rule of :func:`jaxmem.shard`, or several; else it is a tree of specs.

    Patterns match whole paths, such as ``['w']``, and never are the keys of a state.

    >>> spec, state = PartitionSpec("data"), {"w": 0, "b": 0}
    >>> is_rules({"*w*": spec}, state), is_rules({"w": spec, "b": None}, state)
    (True, False)
    """
    if isinstance(shard, str):
        return True
    if isinstance(shard, Mapping):
        is_like = isinstance(state, Mapping) and set(state) == set(shard)
        plain = all(r is None or isinstance(r, str | PartitionSpec) for r in shard.values())
        return plain and not is_like
    is_sequence = type(shard) in (list, tuple)
    return is_sequence and all(is_rules(rule, state) for rule in shard)


def _check_target(caller: Caller, mesh: Any, target: Target | str | None) -> None:
    named = None if target is None else Target.resolve(target)
    if isinstance(mesh, AbstractMesh) and (named is None or named.platform != "gpu"):
        raise ArgumentError(
            f"{caller.name}: mesh is an AbstractMesh of {_axes(mesh)}, which has no devices. Name "
            f'those that it stands for, target="{mesh.size}xh100", or pass a jax.sharding.Mesh; '
            f"{jax.device_count()} are here."
        )
    if named is not None and named.platform == "gpu" and named.device_count != mesh.size:
        model = named.model or "h100"
        raise TargetError(
            f"{caller.name}: the mesh of {_axes(mesh)} has {mesh.size} devices, and target="
            f'{named.name} has {named.device_count}. Name a target with as many, such as "'
            f'{mesh.size}x{model}", or a mesh of {named.device_count}.'
        )


def _arguments(call: Call, dynamic: Mapping[str, Any], named: Mapping[str, Any]) -> list[_Argument]:
    """The arguments of a call, and which of its leaves each has."""
    tree = call.treedef
    if issubclass(tree.node_data()[0], nnx.Split):
        tree = tree.children()[0]
    by_position, by_name = tree.children()
    values = {**dynamic, **{name: named[name] for name in sorted(named)}}
    place, first, found = 0, 0, []
    children = [*by_position.children(), *by_name.children()]
    for (name, value), child in zip(values.items(), children, strict=True):
        taken = range(place, place + child.num_leaves)
        count = sum(n not in call.fixed for n in taken)
        found.append(
            _Argument(
                name, jax.tree_util.tree_map(_array, value, is_leaf=nnx.is_object), first, count
            )
        )
        place, first = taken.stop, first + count
    return found


def _array(leaf: Any) -> Any:
    """A leaf, or nothing in place of what is part of the program."""
    is_there = nnx.is_object(leaf) or program_leaves.is_arraylike(leaf)
    return leaf if is_there or program_leaves.is_abstract(leaf) else None


def _leaf_of(
    call: Call, n: int, by_path: Mapping[str, tuple[StateLeaf, PartitionSpec | None]]
) -> tuple[StateLeaf, PartitionSpec | None]:
    """A leaf of the state, by the path that the call has for it, and its spec."""
    path = call.paths[n]
    leaf, spec = by_path[path]
    return (
        StateLeaf(
            path, leaf.shape, leaf.dtype, leaf.nbytes, leaf.own, leaf.is_optimizers, leaf.path
        ),
        spec,
    )


def _is_raw_key(aval: Any) -> bool:
    """Whether an array is a random key as ``jax.random.PRNGKey`` makes it."""
    return aval.shape == (2,) and aval.dtype == jnp.uint32


def _axes(mesh: Any) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def _shown(given: Any) -> str:
    return f"{given!r:.80}"
