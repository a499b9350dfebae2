"""Time programs of one step on the device: on arguments that no run of it consumes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmem import _compat
from jaxmem.errors import ArgumentError
from jaxmem.program.call import Call
from jaxmem.program.ir import Hosting, Program
from jaxmem.program.leaves import is_abstract
from jaxmem.program.source import origin_of
from jaxmem.runtime.planned import Chosen
from jaxmem.runtime.profile import StepProfile, profiled
from jaxmem.runtime.timing import Timer, in_turns, wall_seconds
from jaxmem.targets.compiling import runs_here, usable_bytes
from jaxmem.targets.target import Target
from jaxmem.units import format_bytes


def check_measure(measure: Any, plan: Any) -> None:
    """Check the option ``measure`` as far as it can be without a step.

    Raises:
        ArgumentError: it is neither ``True`` nor ``False``, or there is a plan already.
    """
    if not isinstance(measure, bool):
        raise ArgumentError(f"measure is {measure!r}: it takes True or False.")
    if measure and plan is not None:
        raise ArgumentError(
            "fit(plan=..., measure=True): a plan has decided already, so there is nothing to "
            "choose from. Leave one of them out."
        )


@dataclass(frozen=True)
class Bench:
    """Where programs of one call are timed.

    Attributes:
        call: gives the arguments; donated ones are copied for every run, and where there is no
            data (``ShapeDtypeStruct``) zeros stand in, which are safe as indices.
        target: what the programs are compiled for.
        timer: times one run.
        profiler: tells what the device did in one run.
        asked: what the user wrote to have programs timed, for messages.
    """

    call: Call
    target: Target
    timer: Timer = wall_seconds
    profiler: Callable[[Callable[[], Any]], StepProfile] = profiled
    asked: str = "measure=True"

    def check(self, program: Program) -> None:
        """Check that a step can be timed here.

        Raises:
            ArgumentError: the target is another device, the step has effects, or it runs in
                several processes.
        """
        here = (self.target.platform == "cpu") == (jax.default_backend() == "cpu")
        if not (here and runs_here(self.target)):
            raise ArgumentError(
                f"{program.name}: {self.asked} times programs on the device that is here "
                f"({jax.devices()[0].device_kind}), and the target is {self.target.name}. Leave "
                f"target out, or plan without {self.asked}."
            )
        effects = next((op for op in program.block.ops if op.eqn.effects), None)
        if effects is not None:
            raise ArgumentError(
                f"{program.name}: {self.asked} runs the step many times, and it has effects "
                f"({origin_of(effects).label}), which would happen each time. Leave {self.asked} "
                "out, or the effect."
            )
        if jax.process_count() > 1:
            raise ArgumentError(
                f"{program.name}: {self.asked} in {jax.process_count()} processes could choose "
                "another program in each. Measure in one process, save the plan, and pass plan=... "
                "to all of them."
            )

    def medians(
        self, program: Program, programs: Sequence[Chosen], hostings: Sequence[Hosting]
    ) -> list[float]:
        """The median seconds of a step with each of several programs.

        Args:
            program: the traced step.
            programs: compiled for the device that is here.
            hostings: for each of them what it takes in host memory.

        Raises:
            ArgumentError: there is no room for copies of the donated arguments.
        """
        items = [(program, *pair) for pair in zip(programs, hostings, strict=True)]
        return [statistics.median(times) for times in self.seconds(items)]

    def seconds(self, items: Sequence[tuple[Program, Chosen, Hosting]]) -> list[list[float]]:
        """The seconds of each run of several programs, which take turns.

        Args:
            items: traced steps of the call, compiled for the device that is here, with what each
                takes in host memory.

        Raises:
            ArgumentError: there is no room for copies of the donated arguments.
        """
        for program, chosen, _ in items:
            self._check_room(program, chosen)
        given = _Arguments(items[0][0], self.call)
        return in_turns([_Run(*item, given) for item in items], self.timer)

    def exposed_seconds(self, program: Program, chosen: Chosen, hosting: Hosting) -> float:
        """How long only copies to and from the host run in one step, of a profile of it.

        Args:
            program: the traced step.
            chosen: the program that is run, ``hosting`` what it takes in host memory.

        Raises:
            ArgumentError: the device is no GPU.
        """
        run = _Run(program, chosen, hosting, _Arguments(program, self.call))
        run.prepare()
        return self.profiler(run).exposed_seconds

    def missing_bytes(self, program: Program, chosen: Chosen) -> int:
        """How much more device memory a program needs than there is, with what stays beside it.

        What is donated is there twice: the caller's own, and the copy that a run consumes.
        """
        needed = chosen.compiled.memory.total_bytes + self._beside(program)
        return needed - usable_bytes(self.target)

    def _beside(self, program: Program) -> int:
        return sum(
            _device_bytes(leaf)
            for leaf, argument in zip(self.call.leaves, program.arguments, strict=True)
            if argument.donated
        )

    def _check_room(self, program: Program, chosen: Chosen) -> None:
        beside, room = self._beside(program), usable_bytes(self.target)
        if beside and self.missing_bytes(program, chosen) > 0:
            raise ArgumentError(
                f"{program.name}: {self.asked} needs "
                f"{format_bytes(chosen.compiled.memory.total_bytes + beside)} here, "
                f"{format_bytes(beside)} of it because donated arguments are copied for each run, "
                f"and {self.target.name} has {format_bytes(room)}. Plan before they are on the "
                f"device, {program.name}.plan(...) with jax.ShapeDtypeStruct: the call then uses "
                "that plan."
            )


@dataclass(eq=False)
class _Run:
    """One program with its arguments; results are dropped as soon as they are there."""

    program: Program
    chosen: Chosen
    hosting: Hosting
    arguments: _Arguments
    ready: Sequence[Any] = ()

    def prepare(self) -> None:
        self.ready = jax.block_until_ready(self.arguments.ready(self.hosting))

    def __call__(self) -> None:
        executable = self.chosen.compiled.executable
        given, self.ready = self.ready, ()
        jax.block_until_ready(executable(*self.program.consts, *given))


class _Arguments:
    """The arguments of a call, as often as they are wanted."""

    def __init__(self, program: Program, call: Call):
        self.program, self.leaves = program, call.leaves
        self.layouts = program.layouts()[len(program.consts) :]
        self._lasting: dict[int, Any] = {}

    def ready(self, hosting: Hosting) -> list[Any]:
        """All of them; those that a run gives away are nobody else's."""
        first = len(self.program.consts)
        hosted = self.program.layouts(hosting)[first:]
        found = []
        for n, argument in enumerate(self.program.arguments):
            away = first + n in hosting.inputs
            if argument.donated:
                leaf = self._copy(n)
            elif n in self._lasting:
                leaf = self._lasting[n]
            else:
                leaf = self._lasting[n] = self._lasting_one(n)
            found.append(jax.device_put(leaf, hosted[n]) if away else leaf)
        return found

    def _lasting_one(self, n: int) -> Any:
        leaf = self.leaves[n]
        here = isinstance(leaf, jax.Array) and not _has_no_data(leaf)
        return leaf if here and self._is_laid_out(n) else self._copy(n)

    def _is_laid_out(self, n: int) -> bool:
        leaf, layout = self.leaves[n], self.layouts[n]
        return layout is None or leaf.sharding.is_equivalent_to(layout, leaf.ndim)

    def _copy(self, n: int) -> Any:
        """A leaf in buffers of its own; zeros where there is no data."""
        leaf, layout = self.leaves[n], self.layouts[n]
        if _has_no_data(leaf):
            return jax.lax.full(leaf.shape, 0, leaf.dtype, sharding=layout)
        if not isinstance(leaf, jax.Array):
            return jax.device_put(np.array(leaf, jax.typeof(leaf).dtype), layout)
        if layout is None:
            return jax.numpy.copy(leaf)
        if not self._is_laid_out(n):
            # What is whole on each device would share the buffer of the one that has it.
            return jax.device_put(jax.numpy.copy(leaf), layout)
        return jax.device_put(leaf, layout, may_alias=False)


def _has_no_data(leaf: Any) -> bool:
    return is_abstract(leaf) or (_compat.is_concrete(leaf) and leaf.is_deleted())


def _device_bytes(leaf: Any) -> int:
    """Bytes that a caller's array takes of each device."""
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
        return 0
    if leaf.sharding.memory_kind == "pinned_host":
        return 0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
