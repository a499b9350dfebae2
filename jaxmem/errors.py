"""Every error jaxmem raises on purpose: what was asked and its limit, where, the smallest fix."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What someone typed into a shell or notebook, or has in a docstring; other names in angle brackets
# are of generated code.
_TYPED = ("<stdin>", "<ipython-input", "<python-input", "<doctest")


class JaxmemError(Exception):
    """Base of all jaxmem errors; catch it to catch any of them."""


class BudgetError(JaxmemError, ValueError):
    """A byte budget that cannot be understood, or that the device does not have."""


@dataclass(frozen=True)
class Holder:
    """One thing that fills memory at the smallest peak found.

    Attributes:
        name: argument path, checkpoint name or ``primitive at file:line``.
        nbytes: bytes it holds on each device.
        kind: ``"argument"``, ``"constant"``, ``"output"``, ``"residual"`` or ``"temporary"``.
    """

    name: str
    nbytes: int
    kind: str


class BudgetInfeasibleError(JaxmemError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: the budget that was asked for, bytes per device.
        smallest_bytes: compiled bytes of the smallest program found; this budget works.
        holders: what fills memory at that peak, largest first.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        smallest_bytes: int,
        holders: tuple[Holder, ...] = (),
    ):
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.holders = holders


class ReportError(JaxmemError, ValueError):
    """A memory report that does not have what was asked, or a file that is none."""


class TargetError(JaxmemError):
    """Something about the hardware a plan is made for."""


class UnknownTargetError(TargetError, ValueError):
    """A target name that is not in the table."""


class MissingPluginError(TargetError, ImportError):
    """Planning for an absent GPU needs the deviceless compiler wheels, and they are not there."""


class TraceError(JaxmemError, TypeError):
    """The function cannot be traced by JAX; the user's own line is in the message."""


class ArgumentError(JaxmemError, TypeError):
    """An argument is not something JAX can pass to a compiled step."""


class AbstractCallError(ArgumentError):
    """A fitted step was called with ShapeDtypeStructs: it can be planned on them, not run."""


class DonatedBufferError(JaxmemError, ValueError):
    """An argument was donated to an earlier call and no longer holds data."""


class PlanMismatchError(JaxmemError, ValueError):
    """A plan was made for another program, other shapes or another version of the plan format."""


class PlanQueryError(JaxmemError, LookupError):
    """What a plan was asked about is not among the values that it decides."""


class MissingExtraError(JaxmemError, ImportError):
    """An optional library that is not installed; the message says how to install it."""


class VerificationError(JaxmemError):
    """The compiled program is not what the plan says: over budget, or recomputation undone."""


class CutError(JaxmemError, ValueError):
    """An argument leaf cannot wait in host memory until it is updated."""


class StepInterruptedError(JaxmemError, RuntimeError):
    """A step failed after some of its leaves had been updated; nothing that it needs is lost.

    Attributes:
        resume: runs what is left of the step and returns its results; may be called again.
    """

    def __init__(self, message: str, *, resume: Callable[[], Any]):
        super().__init__(message)
        self.resume = resume


class TrackError(JaxmemError, RuntimeError):
    """Memory cannot be tracked as asked: a file, a point or a process that is not there."""


class DeviceOutOfMemoryError(JaxmemError, RuntimeError):
    """Memory ran out in a fitted or tracked step; the original error is its cause.

    Attributes:
        explanation: what filled it, who holds that and what would help, a
            :class:`~jaxmem.monitor.oom.explanation.Explanation`; it holds no arrays.
    """

    def __init__(self, message: str, *, explanation: Any):
        super().__init__(message)
        self.explanation = explanation


class CheckpointError(JaxmemError, RuntimeError):
    """A state cannot be saved, or a checkpoint cannot be restored into the tree that was given."""


class ReportFileError(JaxmemError, OSError):
    """A report that cannot be written where it was asked for."""


class ProcessError(JaxmemError, RuntimeError):
    """Of several processes some are missing, or do something else than the others.

    Attributes:
        processes: their numbers.
    """

    def __init__(self, message: str, *, processes: tuple[int, ...]):
        super().__init__(message)
        self.processes = processes


class ShardingError(JaxmemError, ValueError):
    """A rule or spec that does not fit the mesh or the leaf that it is for, or matches nothing."""


class PolicyError(JaxmemError, ValueError):
    """A policy that contradicts itself, matches nothing, or asks for what JAX cannot do there."""


class MicrobatchError(JaxmemError, ValueError):
    """A batch cannot be split as asked, or the results of its parts cannot be put together."""


class AutoOutsideFitError(MicrobatchError):
    """``jaxmem.AUTO`` was used where no fitted step is planned, so nothing can choose a number."""


class EntryPointError(JaxmemError, ValueError):
    """``module:function`` on the command line does not name what jaxmem needs."""


def is_library(filename: str) -> bool:
    """Whether a frame of a traceback is in an installed library or in jaxmem, not the user's own.

    >>> is_library(__file__), is_library("/home/someone/jax/train.py"), is_library("<stdin>")
    (True, False, False)
    """
    if filename.startswith(_TYPED):
        return False
    path = Path(filename)
    installed = "site-packages" in path.parts or "dist-packages" in path.parts
    standard = filename[:1] == "<" or path.is_relative_to(sysconfig.get_path("stdlib"))
    return installed or standard or path.is_relative_to(Path(__file__).parent)
