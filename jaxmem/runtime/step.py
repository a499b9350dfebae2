"""A planned step that runs."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmem import processes
from jaxmem.errors import (
    AbstractCallError,
    DonatedBufferError,
    StepInterruptedError,
    VerificationError,
)
from jaxmem.program.call import Call
from jaxmem.program.calling import Traced
from jaxmem.program.ir import Hosting, Program
from jaxmem.rewrite.emit import as_function
from jaxmem.runtime import finite, guard, verify
from jaxmem.runtime.tries import Outcome
from jaxmem.targets.compiling import compile_for
from jaxmem.targets.options import memory_schedules
from jaxmem.targets.target import Target
from jaxmem.units import format_bytes

_PINNED = "pinned_host"


@dataclass(frozen=True, eq=False)
class Ran:
    """A step that ran.

    Attributes:
        results: what it returns, NNX objects in parts.
        made: what the compiled program returned.
        ready: the arrays of the call that it was given.
    """

    results: Any
    made: Sequence[Any]
    ready: Sequence[Any]


@dataclass(eq=False)
class Step:
    """A step for one signature, compiled for the machine it runs on.

    Attributes:
        traced: the step as the user wrote it.
        outcome: the plan and the program that follows it.
        local: runs it, given captured constants and then the arrays of all argument leaves.
        waited: whether its first run was waited for.
    """

    traced: Traced
    outcome: Outcome
    local: Callable[[Sequence[Any]], Sequence[Any]]
    waited: bool = False

    @classmethod
    def make(cls, traced: Traced, outcome: Outcome) -> Step:
        """Compile for the local device if the plan was made for another one.

        Raises:
            VerificationError: this jaxlib computes wrong numbers from values in host memory.
        """
        executable, stream = outcome.compiled.executable, outcome.stream
        options = memory_schedules(Target.local(measure=False))[-1]
        if not outcome.compiled.runs_here and stream is not None:
            stream = stream.compiled_again(options)
        elif not outcome.compiled.runs_here:
            program, hosting = traced.program, outcome.hosting
            executable = compile_for(
                None,
                as_function(outcome.block),
                program.avals(hosting),
                donate=program.donated,
                out_shardings=program.out_shardings(hosting),
                options=options,
            ).executable
        else:
            guard.check(outcome.block, outcome.compiled.target)
        local = stream or (lambda ready: executable(*ready))
        return cls(traced, outcome, finite.checked(local, traced.program.name))

    def __call__(self, call: Call) -> Ran:
        """Run one step.

        What the plan keeps in host memory and was given on the device is copied to the host
        first, at every call that gives it so; :meth:`place` does it once. Until the step has ended
        it stays on the device, too, for it may fail: where that is over the budget, the first call
        warns.

        Raises:
            AbstractCallError: an argument has no data.
            DonatedBufferError: an argument's data was given away by an earlier call.
            StepInterruptedError: it failed twice between updates of leaves in host memory.
        """
        program = self.traced.program
        given = inputs(program, call)
        ready = where_planned(program, self.outcome.hosting, given)
        if not self.waited and (said := unplaced(program, self.outcome, given)):
            warnings.warn(said, UserWarning, stacklevel=4)

        def rebuild(outs: Sequence[Any]) -> Any:
            return self.traced.rebuild(outs, ready)

        with rebuilding(rebuild):
            made = self.local([*program.consts, *ready])
            if not self.waited:
                # What fails on the device, as memory that runs out does, fails here and not later
                # in whatever reads a result. It has just been compiled: a step more is nothing.
                jax.block_until_ready(made)
                self.waited = True
            results = rebuild(made)
        for leaf, used, its in zip(given, ready, program.arguments, strict=True):
            # A copy was used up in its place.
            if its.donated and used is not leaf and isinstance(leaf, jax.Array):
                leaf.delete()
        return Ran(results, made, ready)

    def check_against_plain(self, call: Call) -> None:
        """Run the step as written on copies of the same inputs and compare the results.

        Raises:
            VerificationError: they differ, or the comparison cannot be made.
        """
        program = self.traced.program
        if any(op.eqn.effects for op in program.block.ops):
            raise VerificationError(
                f'{program.name}: verify="full" runs the step twice, and it has effects (a '
                "callback or print), which would then happen twice. Use verify=True."
            )
        plain = compile_for(None, as_function(program.block, pinned=False), program.avals())
        local = Target.local(measure=False)
        if plain.memory.total_bytes > local.device_bytes:
            raise VerificationError(
                f'{program.name}: verify="full" needs the step as written to fit this device, and '
                f"it needs {format_bytes(plain.memory.total_bytes)} of "
                f"{format_bytes(local.device_bytes)}. Use verify=True, or smaller shapes."
            )
        given = where_planned(program, Hosting(), inputs(program, call))
        arguments = [copied(leaf) for leaf in given]
        reference = plain.executable(*program.consts, *arguments)
        hosted = where_planned(program, self.outcome.hosting, arguments)
        found = self.local([*program.consts, *hosted])

        def nearby() -> list[Any]:
            moved = [verify.nudged(leaf, n) for n, leaf in enumerate(given)]
            return plain.executable(*program.consts, *moved)

        paths = [r.path for r in program.results]
        verify.compare(reference, found, paths, program.name, nearby)


@contextlib.contextmanager
def rebuilding(rebuild: Callable[[Any], Any]) -> Iterator[None]:
    """A step that stops half way gives, when it is resumed, what it would have given."""

    def resumed(resume: Callable[[], Any]) -> Any:
        with rebuilding(rebuild):
            return rebuild(resume())

    try:
        yield
    except StepInterruptedError as error:
        error.resume = functools.partial(resumed, error.resume)
        raise


def inputs(program: Program, call: Call) -> list[Any]:
    """The arrays of a call, ready for the compiled step."""
    ready = []
    seen: set[int] = {id(const) for const in program.consts}
    donated = [leaf.donated for leaf in program.arguments]
    for leaf, path in zip(call.leaves, call.paths, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise AbstractCallError(
                f"argument {path} of {program.name} is a ShapeDtypeStruct, which has no data. Plan "
                "on it with .plan(...); to run the step pass an array."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise DonatedBufferError(
                f"argument {path} of {program.name} was donated to an earlier call and is gone. "
                "Use the state that call returned, or fit without donate_argnums."
            )
        # XLA must not be given one buffer twice when it may write to it (FACTS section 5).
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            leaf = copied(leaf) if any(donated) else leaf
        seen.add(id(leaf))
        ready.append(as_array(leaf) if not isinstance(leaf, jax.Array) else leaf)
    return ready


def unplaced(program: Program, outcome: Outcome, given: Sequence[Any]) -> str:
    """What to say of hosted arguments on a GPU that are over the budget with the step, if any."""
    plan, first = outcome.plan, len(program.consts)
    leaves = [given[n - first] for n in outcome.hosting.inputs if n >= first]
    here = [leaf for leaf in leaves if _is_on_gpu(leaf) and not _is_on_host(leaf)]
    nbytes = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in here)
    if not nbytes or plan.compiled_bytes + nbytes <= plan.budget_bytes:
        return ""
    return (
        f"{program.name}: {format_bytes(nbytes)} on each device are arguments that the plan keeps "
        "in host memory. They stay there until this call has ended, beside "
        f"{format_bytes(plan.compiled_bytes)} that it takes: more than the budget of "
        f"{format_bytes(plan.budget_bytes)}. Have them put in host memory first: "
        "state = step.place(state, batch)[0]."
    )


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and all(d.platform == "gpu" for d in leaf.devices())


def where_planned(program: Program, hosting: Hosting, ready: list[Any]) -> list[Any]:
    """The arrays of a call in the memory that the plan has for each, and on the mesh of the step.

    What is on no device in particular is split by the program itself, unless it is donated.
    """
    first = len(program.consts)
    if not hosting and program.state is None and not any(map(_is_on_host, ready)):
        return ready
    found = list(ready)
    for n, (leaf, layout) in enumerate(zip(ready, program.layouts(hosting)[first:], strict=True)):
        if first + n in hosting.inputs:
            if getattr(leaf, "sharding", None) != layout:
                found[n] = jax.device_put(leaf, layout)
        elif _is_on_host(leaf) and getattr(layout, "memory_kind", None) != _PINNED:
            found[n] = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
        elif program.state is not None and _is_elsewhere(leaf, layout):
            if leaf.committed or program.arguments[n].donated or _is_shared(layout):
                found[n] = processes.put(leaf, layout)
        elif program.state is not None and _is_shared(layout) and not isinstance(leaf, jax.Array):
            found[n] = processes.put(leaf, layout)
    return found


def _is_shared(layout: Any) -> bool:
    """Whether it is over several processes: no program splits what one of them has."""
    return layout is not None and not layout.is_fully_addressable


def _is_elsewhere(leaf: Any, layout: Any) -> bool:
    """Whether an array of JAX's is laid out in another way."""
    return isinstance(leaf, jax.Array) and not leaf.sharding.is_equivalent_to(layout, leaf.ndim)


def _is_on_host(leaf: Any) -> bool:
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == _PINNED


def as_array(leaf: Any) -> Any:
    """A number as the array JAX would make of it."""
    aval = jax.typeof(leaf)
    return np.asarray(leaf, aval.dtype)


def copied(leaf: Any) -> Any:
    """The same data in a buffer of its own."""
    return jax.numpy.copy(leaf)
