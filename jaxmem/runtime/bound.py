"""A fitted method of one instance."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxmem.displayed import Displayed
from jaxmem.errors import ArgumentError, DeviceOutOfMemoryError
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport
from jaxmem.runtime.profile import StepProfile


class BoundStep(Displayed):
    """A fitted method of one instance: the step with its first argument filled in."""

    def __init__(self, step: Any, instance: Any):
        functools.update_wrapper(self, step, updated=())
        self.__func__, self.__self__ = step, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        try:
            return self.__func__(self.__self__, *args, **kwargs)
        except DeviceOutOfMemoryError:
            args, kwargs = (), {}  # Its traceback keeps this frame.
            raise

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """As :meth:`jaxmem.fitted.FittedStep.plan`."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As :meth:`jaxmem.fitted.FittedStep.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> MemoryReport:
        """As :meth:`jaxmem.fitted.FittedStep.report`."""
        return self.__func__.report(self.__self__, *args, **kwargs)

    def profile(self, *args: Any, **kwargs: Any) -> tuple[Any, StepProfile]:
        """As :meth:`jaxmem.fitted.FittedStep.profile`."""
        return self.__func__.profile(self.__self__, *args, **kwargs)

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As :meth:`jaxmem.fitted.FittedStep.place`, for the arguments after the instance."""
        return self.__func__.place(self.__self__, *args, **kwargs)[1:]


_UNSET = {"donate_argnums": (), "static_argnums": (), "verify": True, "measure": False}


def refuse_settings(step: Any, **given: Any) -> None:
    """A fitted step has its own settings; others given beside it must not be ignored silently.

    Raises:
        ArgumentError: one of ``given`` is not what it is where nothing is given.
    """
    extra = [name for name, value in given.items() if value != _UNSET.get(name)]
    if extra:
        name = getattr(step, "__name__", "the step")
        raise ArgumentError(
            f"{name} is fitted already and brings its own {', '.join(extra)}. Leave "
            f"{'it' if len(extra) == 1 else 'them'} out, or pass the plain function "
            f"({name}.__wrapped__)."
        )
