"""Lay a program out on devices that are not there: its arguments, its outputs, its own meshes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmem.errors import TargetError
from jaxmem.targets import topology
from jaxmem.targets.target import Target


class AbsentDevices:
    """The devices of an absent GPU target, and layouts carried over to them.

    A mesh keeps its axis names, sizes and types; what is on one device only is replicated.
    """

    def __init__(self, target: Target):
        self._target = target
        self._devices = np.array(topology.devices(target))
        self.replicated = NamedSharding(Mesh(self._devices, ("device",)), PartitionSpec())

    def sharding(self, given: Any) -> NamedSharding:
        """The same layout here.

        Raises:
            TargetError: a mesh of another size than the target, or a layout without a mesh.
        """
        kind = "pinned_host" if getattr(given, "memory_kind", None) == "pinned_host" else "device"
        if given is None or isinstance(given, SingleDeviceSharding):
            return self.replicated.with_memory_kind(kind)
        if not isinstance(given, NamedSharding):
            raise TargetError(
                f"{type(given).__name__} cannot be carried over to {self._target.name}: give the "
                "arguments NamedShardings, or ShapeDtypeStructs without sharding."
            )
        if given.mesh.size == 1 and self._devices.size > 1:
            return self.replicated.with_memory_kind(kind)
        return NamedSharding(self.mesh(given.mesh), given.spec, memory_kind=kind)

    def of_argument(self, given: Any) -> NamedSharding | None:
        """The same for the type of an argument, which says so where it waits in host memory.

        That is what JAX makes of a layout over a mesh; of one for a device it takes no memory into
        the type. ``None`` where that must not be in the type: :meth:`on_host` has it.
        """
        on_host = self.on_host(given)
        if on_host is None:
            return self.sharding(given)
        return on_host if isinstance(given, NamedSharding) else None

    def on_host(self, given: Any) -> NamedSharding | None:
        """The layout of an argument in host memory; ``None`` for what is on the device.

        Absent devices do not say what memory they have, and JAX forgets the memory kind of a
        layout over them. Without it XLA fetches nothing: kernels read what is in host memory where
        it is, and a program takes less than on the device. An abstract mesh keeps it, and the
        devices are those of the other arguments and of the results.
        """
        here = self.sharding(given)
        if getattr(given, "memory_kind", None) != "pinned_host":
            return None
        return NamedSharding(here.mesh.abstract_mesh, here.spec, memory_kind="pinned_host")

    def mesh(self, given: Any) -> Mesh:
        """The same mesh here.

        Raises:
            TargetError: the mesh has another size than the target.
        """
        self._check_size(given)
        shape = tuple(given.shape.values())
        return Mesh(self._devices.reshape(shape), given.axis_names, axis_types=given.axis_types)

    def _check_size(self, mesh: Any) -> None:
        if mesh.size != self._devices.size:
            raise TargetError(
                f"the program is laid out on a mesh of {mesh.size} devices {dict(mesh.shape)}, "
                f"and {self._target.name} has {self._devices.size}. Name a target with as many, "
                f'such as "{mesh.size}x{self._target.model}".'
            )

    def program(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """``closed`` without the devices of this process, or itself where it names none.

        ``shard_map``, sharding constraints and inner jits may name devices, which cannot stand
        in a program for others, nor can constants that were put on them. Their meshes become
        abstract: JAX then takes the devices from the arguments.

        Raises:
            TargetError: a mesh in the program has another size than the target.
        """
        jaxpr = self._jaxpr(closed.jaxpr)
        consts = [np.asarray(c) if _is_committed(c) else c for c in closed.consts]
        same = all(new is old for new, old in zip(consts, closed.consts, strict=True))
        return closed if same and jaxpr is closed.jaxpr else jex.ClosedJaxpr(jaxpr, consts)

    def _jaxpr(self, jaxpr: Any) -> Any:
        eqns = [self._eqn(eqn) for eqn in jaxpr.eqns]
        changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        return jaxpr.replace(eqns=eqns) if changed else jaxpr

    def _eqn(self, eqn: Any) -> Any:
        params = {name: self._param(value) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return eqn.replace(params=params) if changed else eqn

    def _param(self, value: Any) -> Any:
        if isinstance(value, Mesh) and not value.empty:
            self._check_size(value)
            return value.abstract_mesh
        if isinstance(value, SingleDeviceSharding):
            return self.sharding(value)
        if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh):
            mesh = self._param(value.mesh)
            return NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)
        if isinstance(value, jex.ClosedJaxpr):
            return self.program(value)
        if isinstance(value, jex.Jaxpr):
            return self._jaxpr(value)
        if type(value) in (tuple, list):
            return self._sequence(value)
        return value

    def _sequence(self, values: Any) -> Any:
        new = [self._param(value) for value in values]
        same = all(after is before for after, before in zip(new, values, strict=True))
        return values if same else type(values)(new)


def _is_committed(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.committed


def as_function(closed: jex.ClosedJaxpr, out_tree: Any) -> Any:
    """A function of the same arguments and outputs as the one ``closed`` was traced from."""

    flat = jex.jaxpr_as_fun(closed)
    return lambda *args: jax.tree.unflatten(out_tree, flat(*jax.tree.leaves(args)))
