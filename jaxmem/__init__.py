"""jaxmem: any JAX train step inside a byte budget, computing the same thing."""

import importlib
import sys
import types
import typing

from jaxmem import _before_jax
from jaxmem.errors import (
    ArgumentError,
    BudgetError,
    BudgetInfeasibleError,
    DeviceOutOfMemoryError,
    JaxmemError,
    PlanMismatchError,
    PolicyError,
    TraceError,
)

if typing.TYPE_CHECKING:
    from jaxmem import policies
    from jaxmem.beforehand import analyze, plan
    from jaxmem.fit import fit
    from jaxmem.frontier import frontier
    from jaxmem.monitor.oom.explain import explain_oom
    from jaxmem.monitor.track import track
    from jaxmem.planner.plan import Plan
    from jaxmem.planner.report import MemoryReport
    from jaxmem.policies.apply import remat
    from jaxmem.program.accumulating import accumulate
    from jaxmem.program.microbatches import AUTO
    from jaxmem.state.checkpoint import restore, save
    from jaxmem.state.preemption import preempted
    from jaxmem.state.sharding import shard
    from jaxmem.targets.target import Target

__version__ = "0.1.0"

__all__ = [
    "AUTO",
    "ArgumentError",
    "BudgetError",
    "BudgetInfeasibleError",
    "DeviceOutOfMemoryError",
    "JaxmemError",
    "MemoryReport",
    "Plan",
    "PlanMismatchError",
    "PolicyError",
    "Target",
    "TraceError",
    "accumulate",
    "analyze",
    "explain_oom",
    "fit",
    "frontier",
    "plan",
    "policies",
    "preempted",
    "remat",
    "restore",
    "save",
    "shard",
    "track",
]

# Errors of a narrow cause: their home is jaxmem.errors, and they can be had from here as well.
_NARROW = (
    "AbstractCallError",
    "AutoOutsideFitError",
    "CheckpointError",
    "DonatedBufferError",
    "MicrobatchError",
    "MissingPluginError",
    "ProcessError",
    "ReportFileError",
    "ReportError",
    "ShardingError",
    "TrackError",
    "UnknownTargetError",
    "VerificationError",
)

# These need jax, and `jaxmem --help` must not wait for it (nor may jax start before the command
# line has chosen its platform): they are imported when first used.
_HOMES = {
    "AUTO": "jaxmem.program.microbatches",
    "MemoryReport": "jaxmem.planner.report",
    "Plan": "jaxmem.planner.plan",
    "Target": "jaxmem.targets.target",
    "accumulate": "jaxmem.program.accumulating",
    "analyze": "jaxmem.beforehand",
    "explain_oom": "jaxmem.monitor.oom.explain",
    "fit": "jaxmem.fit",
    "frontier": "jaxmem.frontier",
    "plan": "jaxmem.beforehand",
    "preempted": "jaxmem.state.preemption",
    "remat": "jaxmem.policies.apply",
    "restore": "jaxmem.state.checkpoint",
    "save": "jaxmem.state.checkpoint",
    "shard": "jaxmem.state.sharding",
    "track": "jaxmem.monitor.track",
}
_MODULES = ("policies", "show")


_before_jax.raise_limit()

# Verbs that have a module of their own name.
_VERBS = ("fit", "frontier")


class _Face(types.ModuleType):
    """Keeps ``jaxmem.fit`` the decorator after an import has set it to the module of that name."""

    def __getattr__(self, name: str) -> typing.Any:
        if name in _MODULES:
            return importlib.import_module(f"jaxmem.{name}")
        if name in _NARROW:
            return getattr(importlib.import_module("jaxmem.errors"), name)
        if name not in _HOMES:
            raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: typing.Any) -> None:
        is_module = name in _VERBS and isinstance(value, types.ModuleType)
        super().__setattr__(name, getattr(value, name) if is_module else value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Face
