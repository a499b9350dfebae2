"""A fitted method of one instance."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxmem.planner.plan import Plan
from jaxmem.planner.report import MemoryReport


class BoundStep:
    """A fitted method of one instance: the step with its first argument filled in."""

    def __init__(self, step: Any, instance: Any):
        functools.update_wrapper(self, step, updated=())
        self.__func__, self.__self__ = step, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        return self.__func__(self.__self__, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """As :meth:`jaxmem.fit.FittedStep.plan`."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As :meth:`jaxmem.fit.FittedStep.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> MemoryReport:
        """As :meth:`jaxmem.fit.FittedStep.report`."""
        return self.__func__.report(self.__self__, *args, **kwargs)

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As :meth:`jaxmem.fit.FittedStep.place`, for the arguments after the instance."""
        return self.__func__.place(self.__self__, *args, **kwargs)[1:]
